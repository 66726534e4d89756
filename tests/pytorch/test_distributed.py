"""Data-parallel training on two processes: DDP, FSDP2, and DTensors sharded over the batch."""

import pytest
import torch.distributed as dist
from ranks import two_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
THINGS = [
    "ddp", "fsdp2", "fsdp2 of layers", "dtensor one operator", "dtensor", "dtensor memory",
    "dtensor dropout", "dtensor counted", "dtensor called", "dtensor memory called",
]  # fmt: skip


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each of the two ranks prints (two_ranks.py)."""
    return two_ranks("two_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("thing", THINGS)
def test_two_ranks(printed, thing):
    for out, err in printed:
        assert f"right: {thing}" in out.splitlines(), err[-3000:]

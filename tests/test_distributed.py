"""Data-parallel training on two processes: DDP, FSDP2, and DTensors sharded over the batch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
THINGS = [
    "ddp", "fsdp2", "fsdp2 of layers", "dtensor one operator", "dtensor", "dtensor memory",
    "dtensor dropout", "dtensor counted", "dtensor called", "dtensor memory called",
]  # fmt: skip


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each of the two ranks prints (two_ranks.py)."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    program = Path(__file__).with_name("two_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), meeting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("thing", THINGS)
def test_two_ranks(printed, thing):
    for out, err in printed:
        assert f"right: {thing}" in out.splitlines(), err[-3000:]

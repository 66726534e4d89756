"""Small calls are looked at, timed in one round, and fused, whatever the time says."""

import pytest
import torch

from bahdanau_fast.fuse import choice, look


@pytest.fixture(autouse=True, scope="module")
def small_calls():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would only wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "PAYS", float("inf"))
        patch.setattr(choice, "_ROUNDS", 1)
        patch.setattr(look, "_SECONDS", 0.0)
        yield
    torch.set_num_threads(threads)

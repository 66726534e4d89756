"""One thread for tests of tiny models, which gain nothing by more."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that share the cores with other work wait for each other at every operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

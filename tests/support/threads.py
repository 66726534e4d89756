"""One thread of torch for a module of tests; calls in several threads of Python."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For tiny models: threads that share the cores with other work wait at every operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def at_once(work, count):
    """Call ``work(0)`` to ``work(count - 1)`` in a thread each; the first error is raised."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))

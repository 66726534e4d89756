"""Classes of other packages; a test is skipped where they cannot be had."""

import pytest

from benchmarks.contestants import published


def load(module, name):
    """A class of another package.

    Args:
        module: its module.
        name: of the class.
    """
    try:
        return published.load(module, name)
    except published.UnavailableError as error:
        pytest.skip(str(error))

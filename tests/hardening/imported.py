"""A pytest plugin: the tests run on the extension of the build that is asked for, or not at all."""

import os

import pytest


def pytest_collection_finish():
    import bahdanau_fast._C_cpu as extension

    wanted = os.environ["BAHDANAU_FAST_BUILD"]
    if not extension.__file__.startswith(wanted):
        raise pytest.UsageError(f"the extension must be in {wanted}, got {extension.__file__}")

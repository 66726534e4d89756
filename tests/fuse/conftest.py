"""Small calls are fused, too, in these tests."""

import pytest

from bahdanau_fast.fuse import report


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(report, "LEAST", 0)

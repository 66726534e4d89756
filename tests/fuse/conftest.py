"""Small calls are looked at, and fused, too."""

import pytest

from bahdanau_fast.fuse import report, watched


@pytest.fixture(autouse=True)
def small_calls(monkeypatch, threads):
    threads(1)  # more would only wait
    monkeypatch.setattr(report, "PAYS", float("inf"))
    monkeypatch.setattr(watched, "_SECONDS", 0.0)

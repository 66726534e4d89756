"""Small calls are looked at, and fused, too."""

import importlib

import pytest

# Not by attribute: the package's ``fuse`` is the function.
report, watched = (
    importlib.import_module(f"bahdanau_fast.fuse.{n}") for n in ("report", "watched")
)


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    monkeypatch.setattr(report, "PAYS", float("inf"))
    monkeypatch.setattr(watched, "_SECONDS", 0.0)

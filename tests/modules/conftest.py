"""Small calls are remembered here, and go by several operators, as large ones do elsewhere."""

import pytest
from ways.sides import remember_small


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    remember_small(monkeypatch)

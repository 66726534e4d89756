"""A module, keys and a query, as in remembered.py."""

import pytest
import torch
from remembered import DK, DQ, TK, TQ, B, H

import bahdanau_fast as bf


@pytest.fixture
def module():
    torch.manual_seed(0)
    return bf.AdditiveAttention(DK, DQ, H)


@pytest.fixture
def keys():
    return torch.randn(B, TK, DK, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def query():
    return torch.randn(B, TQ, DQ, generator=torch.Generator().manual_seed(2))

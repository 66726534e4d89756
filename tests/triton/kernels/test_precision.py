"""Whatever flags of matrix products a user has set, by which of torch's ways: no call fails."""

from functools import partial

import parity
import pytest
import torch

import bahdanau_fast as bf
from bahdanau_fast.backends import availability
from bahdanau_fast.backends.triton import call

# Of what is set first wins what is set last; "conv" and the like leave products of matrices alone.
backends = torch.backends
SET = {
    "matmul": partial(setattr, backends.cuda.matmul, "fp32_precision", "tf32"),
    "all of CUDA": partial(setattr, backends.cudnn, "fp32_precision", "tf32"),
    "all": partial(setattr, backends, "fp32_precision", "tf32"),
    "conv": partial(setattr, backends.cudnn.conv, "fp32_precision", "tf32"),
    "exact conv": partial(setattr, backends.cudnn.conv, "fp32_precision", "ieee"),
    "exact matmul": partial(setattr, backends.cuda.matmul, "fp32_precision", "ieee"),
    "old": partial(setattr, backends.cuda.matmul, "allow_tf32", True),
    "old, off": partial(setattr, backends.cuda.matmul, "allow_tf32", False),
    "words": partial(torch.set_float32_matmul_precision, "high"),
}
MIXES = {
    ("matmul",): "tf32",
    ("all of CUDA",): "tf32",
    ("all",): "tf32",
    ("conv",): "ieee",
    ("old",): "tf32",
    ("words",): "tf32",
    ("old", "exact matmul"): "ieee",
    ("words", "exact matmul"): "ieee",
    ("matmul", "exact conv"): "tf32",
    ("all", "old, off"): "ieee",
    ("conv", "old"): "tf32",
    (): "ieee",
}
PLACES = [(of, op) for of in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]
PLACES.append(("generic", "all"))


@pytest.fixture(autouse=True)
def restored():
    before = {place: torch._C._get_fp32_precision_getter(*place) for place in PLACES}
    yield
    torch.set_float32_matmul_precision("highest")
    for place, value in before.items():
        torch._C._set_fp32_precision_setter(*place, value)


@pytest.mark.parametrize(("settings", "wanted"), MIXES.items(), ids=str)
def test_every_mix_of_flags(settings, wanted, monkeypatch):
    x, w = (torch.ones(*s, device=parity.DEVICE) for s in ((1, 2, 3), (4, 3)))
    before, _ = bf.additive_attention(x, x, x, w, w, w[:, 0], backend="reference")
    for name in settings:
        SET[name]()
    got, _ = bf.additive_attention(x, x, x, w, w, w[:, 0], backend="triton")
    torch.testing.assert_close(got, before)
    # As on a GPU: the interpreter multiplies exactly.
    monkeypatch.setattr(availability, "interpreted", lambda: False)
    assert call.precision() == wanted

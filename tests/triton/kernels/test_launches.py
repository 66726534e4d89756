"""Nothing is launched beside the kernels to bring weights into their dtype, or to keep lengths; and
no flag of matrix products that a user has set, by which of torch's ways, lets a call fail.
"""

from functools import partial

import lengths
import parity
import pytest
import torch
from profiled import Operations
from torch import backends

import bahdanau_fast as bf
from bahdanau_fast.backends import availability
from bahdanau_fast.backends.triton import call


@pytest.mark.parametrize(
    ("dtype", "queries", "recorded"),
    [(torch.bfloat16, n, True) for n in (1, 2, 18)]
    + [(dtype, 1, False) for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_weights_come_in_the_dtype_of_the_module(dtype, queries, recorded):
    """Of a recorded call, and of a step on a memory."""
    module = bf.AdditiveAttention(8, 8, 8).to(parity.DEVICE, dtype)
    q, k = (torch.randn(2, n, 8, dtype=dtype, device=parity.DEVICE) for n in (queries, 5))
    with bf.backends.use("triton"), torch.set_grad_enabled(recorded):
        memory = None if recorded else module.memory(k)
        with Operations() as seen:
            context = module(q, k, k) if recorded else module.attend(q, memory)
            if recorded:
                (context.sum() + module.attention_weights.sum()).backward()
    assert module.attention_weights.dtype == dtype
    copies = [more for f, more in seen.calls if f is torch.ops.aten._to_copy.default]
    assert not any(more.get("dtype") for more in copies)


@pytest.mark.parametrize("kind", lengths.LENGTHS)
@pytest.mark.parametrize("queries", [1, 18])
def test_lengths_of_a_recorded_call(queries, kind):
    assert lengths.operators_for("triton", queries, kind) == {}
    lengths.check_changes("triton", queries, kind)


# Of what is set first wins what is set last; "conv" and the like leave products of matrices alone.
SET = {
    "matmul": partial(setattr, backends.cuda.matmul, "fp32_precision", "tf32"),
    "all of CUDA": partial(setattr, backends.cudnn, "fp32_precision", "tf32"),
    "all": partial(setattr, backends, "fp32_precision", "tf32"),
    "conv": partial(setattr, backends.cudnn.conv, "fp32_precision", "tf32"),
    "exact conv": partial(setattr, backends.cudnn.conv, "fp32_precision", "ieee"),
    "exact matmul": partial(setattr, backends.cuda.matmul, "fp32_precision", "ieee"),
    "old": partial(setattr, backends.cuda.matmul, "allow_tf32", True),
    "old off": partial(setattr, backends.cuda.matmul, "allow_tf32", False),
    "words": partial(torch.set_float32_matmul_precision, "high"),
}
TF32 = "matmul", "all of CUDA", "all", "old", "words", "matmul, exact conv", "conv, old"
IEEE = "", "conv", "old, exact matmul", "words, exact matmul", "all, old off"
PLACES = [(of, op) for of in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]
PLACES.append(("generic", "all"))


@pytest.fixture
def restored():
    before = {place: torch._C._get_fp32_precision_getter(*place) for place in PLACES}
    yield
    torch.set_float32_matmul_precision("highest")
    for place, value in before.items():
        torch._C._set_fp32_precision_setter(*place, value)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("settings", TF32 + IEEE)
def test_every_mix_of_flags(settings, monkeypatch):
    x, w = (torch.ones(*s, device=parity.DEVICE) for s in ((1, 2, 3), (4, 3)))
    before, _ = bf.additive_attention(x, x, x, w, w, w[:, 0], backend="reference")
    for name in filter(None, settings.split(", ")):
        SET[name]()
    got, _ = bf.additive_attention(x, x, x, w, w, w[:, 0], backend="triton")
    torch.testing.assert_close(got, before)
    # As on a GPU: the interpreter multiplies exactly.
    monkeypatch.setattr(availability, "interpreted", lambda: False)
    assert call.precision() == ("tf32" if settings in TF32 else "ieee")

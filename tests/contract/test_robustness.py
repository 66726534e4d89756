"""NaN and infinity stay in their rows; memory far apart; threads, forks and many calls."""

import math
import sys

import pytest
import torch
from beside import as_exact, close
from drawing import drawn
from fresh import python
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import at_once

import bahdanau_fast as bf

ops = torch.ops.bahdanau_fast
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def attend(q, k, v, w, lens=None, table=False):
    made, keys_max = ops.exp_keys(k) if table else (None, None)
    return ops.attention(q, k, v, w, valid_lens=lens, table=made, keys_max=keys_max)[:2]


# ---- NaN and infinity ----------------------------------------------------------------------------


@st.composite
def spoiled(draw):
    """Inputs, one number of which is NaN or infinite: (tensors, lens, which, where, value)."""
    B, Tq, H, Dv = (draw(st.integers(1, n)) for n in (4, 20, 40, 20))
    Tk = draw(st.one_of(st.integers(1, 60), st.sampled_from([64, 65, 200])))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shapes = (B, Tq, H), (B, Tk, H), (B, Tk, Dv), (1, H)
    scale = draw(st.sampled_from([0.01, 1.0, 20.0]))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    tensors = [(x * scale if i < 2 else x).to(dtype) for i, x in enumerate(tensors)]
    lens = None
    kind = draw(st.sampled_from(["none", "rows", "queries"]))
    if kind != "none":
        shape = (B,) if kind == "rows" else (B, Tq)
        lens = torch.randint(0, Tk + 3, shape, generator=generator)
    which = draw(st.integers(0, 2))
    where = tuple(draw(st.integers(0, size - 1)) for size in shapes[which])
    value = draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    return tensors, lens, which, where, value, draw(st.booleans())


@settings(drawn, max_examples=200)
@given(spoiled())
def test_what_is_not_finite_stays_in_its_rows(case):
    tensors, lens, which, where, value, table = case
    q, k, v, _ = tensors
    clean = attend(*tensors, lens, table)
    bad = [x.clone() for x in tensors]
    bad[which][where] = value
    context, weights = attend(*bad, lens, table)
    (B, Tq, _), Tk = q.shape, k.shape[1]
    length = torch.full((B, Tq), Tk) if lens is None else lens.reshape(B, -1).expand(B, Tq)
    empty = length <= 0
    b, i = where[:2]
    # Rows (b, query) whose scores, or whose context, see the spoiled number.
    scored, summed = (torch.zeros(B, Tq, dtype=torch.bool) for _ in range(2))
    if which == 0:
        scored[b, i] = not empty[b, i]
    elif which == 1:
        scored[b] = (length[b] > i) & ~empty[b]
    else:
        summed[b] = (length[b] > i) | empty[b]
    close = {"rtol": 8 * torch.finfo(q.dtype).eps, "atol": 8 * torch.finfo(q.dtype).eps}
    untouched = ~(scored | summed)
    torch.testing.assert_close(weights[~scored], clean[1][~scored], **close)
    if lens is None or lens.dim() == 1:
        torch.testing.assert_close(context[untouched], clean[0][untouched], **close)
    others = torch.arange(B) != b  # another batch row: the same bits
    assert torch.equal(context[others], clean[0][others])
    assert torch.equal(weights[others], clean[1][others])
    if scored.any() and math.isnan(value):
        assert torch.isnan(weights[scored][..., 0]).all()
        assert torch.isnan(context[scored]).all()
    if which == 2:
        assert torch.equal(weights, clean[1])
        assert not torch.isfinite(context[summed][..., where[2]]).any()
        rest = torch.arange(v.shape[2]) != where[2]
        torch.testing.assert_close(context[..., rest], clean[0][..., rest], **close)


@settings(drawn, max_examples=80)
@given(spoiled())
def test_gradients_of_other_batch_rows_stay_as_they_are(case):
    tensors, lens, which, where, value, _ = case
    results = []
    for spoil in (False, True):
        x = [t.clone() for t in tensors]
        if spoil:
            x[which][where] = value
        x = [t.requires_grad_() for t in x]
        outs = attend(*x, lens)
        results.append(torch.autograd.grad(outs, x[:3], [o.detach().cos() * 0 + 1 for o in outs]))
    others = torch.arange(tensors[0].shape[0]) != where[0]
    for clean, bad in zip(*results, strict=True):
        assert torch.equal(clean[others], bad[others])


# ---- far apart -----------------------------------------------------------------------------------


def far(shape, dtype, dim):
    """A tensor whose steps along ``dim`` are more than 2^31 elements, most of it never touched."""
    rest = 1
    strides = [0] * len(shape)
    for i in reversed([i for i in range(len(shape)) if i != dim]):
        strides[i], rest = rest, rest * shape[i]
    strides[dim] = 2**31 + 5
    room = strides[dim] * (shape[dim] - 1) + rest
    x = torch.empty(room, dtype=dtype).as_strided(shape, strides)
    return x.copy_(torch.randn(shape))


@pytest.mark.skipif(sys.platform != "linux", reason="memory that is not used is not there")
@pytest.mark.parametrize("dim", [0, 1])
def test_strides_past_two_to_the_31(dim):
    torch.manual_seed(0)
    shapes = (2, 2, 9), (2, 2, 9), (2, 2, 5)
    near = [torch.randn(s).half() for s in shapes]
    w = torch.randn(1, 9).half()
    want = attend(*near, w, torch.tensor([2, 1]))
    for spread in range(3):
        x = list(near)
        x[spread] = far(shapes[spread], torch.float16, dim).copy_(near[spread])
        for got, right in zip(attend(*x, w, torch.tensor([2, 1])), want, strict=True):
            assert torch.equal(got, right)


def test_more_than_two_to_the_31_elements():
    # Keys of 2^31 + 2^21 elements in memory of 2^10: sizes and counts that need 64 bits.
    B, Tk, H = 2**19 + 2**9, 2, 2048
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, H), torch.randn(1, Tk, H) * 0.1, torch.randn(1, Tk, 2)
    w = torch.randn(1, H) * 0.1
    x = [t.bfloat16().expand(B, -1, -1) for t in (q, k, v)]
    assert B * Tk * H > 2**31
    context, weights = attend(*x, w.bfloat16())
    row = [*(t[:1] for t in x), w.bfloat16()]
    eager, exact = (bf.reference.attend(*of)[:1] for of in (row, [t.double() for t in row]))
    as_exact([context[:1]], eager, exact, torch.bfloat16)
    assert bool((context == context[:1]).all())
    assert bool((weights == weights[:1]).all())


# ---- threads, forks, many calls ------------------------------------------------------------------


def test_eight_threads_train_one_module():
    torch.manual_seed(0)
    attention = bf.AdditiveAttention(16, 16, 64)
    data = [(torch.randn(2, 3, 16), torch.randn(2, 80, 16)) for _ in range(8)]

    def gradients(q, k):
        k = k.clone().requires_grad_()
        out = attention(q, k, k) + attention.attend(q, attention.memory(k))
        return [
            out.detach(),
            *torch.autograd.grad(out.square().sum(), [k, *attention.parameters()]),
        ]

    wants = [gradients(*x) for x in data]

    def work(n):
        for _ in range(20):
            close(gradients(*data[n]), wants[n])

    at_once(work, 8)


FORKED = """
import torch, bahdanau_fast as bf
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
torch.set_num_threads(2)
attention = bf.AdditiveAttention(32, 32, 64)
source = torch.randn(6, 16, 300, 32)
def step(i):
    q, k = source[i][:, :2], source[i].clone().requires_grad_()
    out = attention(q, k, k)
    return torch.autograd.grad(out.square().sum(), k)[0]
class Attended(Dataset):
    def __len__(self):
        return len(source)
    def __getitem__(self, i):
        return step(i)
if {before}:
    before = [step(i) for i in range(6)]  # the parent's threads are up when it forks
loaded = [x for x in DataLoader(Attended(), batch_size=None, num_workers=2,
                                multiprocessing_context="fork", timeout=60)]
for i, x in enumerate(loaded):
    assert torch.equal(x, step(i)), i
print("same bits")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("before", [True, False])
def test_forked_workers(before):
    done = python("-W", "ignore", "-c", FORKED.format(before=before))
    assert done.stdout.strip() == "same bits"

"""A call of a raw C++ entry point out of any bytes: right results, or an error in words.

``one(data)`` reads sizes, dtypes, strides, lengths, magnitudes and mistakes out of the bytes (past
their end: zeros), calls ``exp_keys``, ``attend`` and ``attend_backward`` or the operator that does
all, and holds what comes back against the reference in fp64.
"""

import torch

from bahdanau_fast import reference

ops = torch.ops.bahdanau_fast
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LENS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float32, torch.float64,
    torch.bfloat16, torch.float16, torch.bool, torch.complex64,
)  # fmt: skip
ODD = (torch.int32, torch.complex64, torch.bool)
SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70, 127, 128, 130, 260)
SCALES = (1.0, 1e-6, 1e-3, 0.1, 5.0, 30.0, 400.0, 1e4)
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0)


class Bytes:
    """Choices read from bytes, one or two at a time."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self, below):
        """In [0, below)."""
        taken = self.data[self.at : self.at + 2]
        self.at += 2
        return int.from_bytes(taken, "little") % below

    def of(self, choices):
        return choices[self.number(len(choices))]

    def rarely(self, times=24):
        """True about once in so many."""
        return self.number(times) == times - 1


def tensor(read, shape, dtype, generator, scale):
    """A tensor in some layout; now and then of a wrong rank, size or dtype. (tensor, broken)"""
    broken = False
    if read.rarely(60):
        shape, broken = list(shape), True
        at = read.number(len(shape))
        shape[at] += read.of((1, 2, 7))
    if read.rarely(60):
        shape, broken = (*shape, 1), True
    if read.rarely(60):
        dtype, broken = read.of((*DTYPES, *ODD)), True
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * scale
    x = x.to(dtype)
    layout = read.number(6)
    if x.dim() < 2 or layout == 0:
        return x, broken
    if layout == 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2), broken
    if layout == 2:
        wide = torch.empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=dtype)
        return wide[..., ::2].copy_(x), broken
    if layout == 3:
        padded = torch.empty([n + 3 for n in x.shape], dtype=dtype)
        return padded[tuple(slice(1, n + 1) for n in x.shape)].copy_(x), broken
    if layout == 4:
        return x.transpose(0, 1).contiguous().transpose(0, 1), broken
    return (x[:1].expand(x.shape) if x.shape[0] else x), broken


def lengths(read, B, Tq, Tk, generator):
    """None, or lengths of some dtype, now and then of a wrong shape or kind. (lens, broken)"""
    kind = read.number(4)
    if kind == 0:
        return None, False
    shape = ((B,), (B, Tq), (B, Tq + 1))[min(kind - 1, 1 if not read.rarely(40) else 2)]
    dtype = LENS[read.number(9)] if not read.rarely(40) else read.of(LENS)
    x = torch.rand(shape, generator=generator) * (Tk + 6) - 3
    if not dtype.is_floating_point:
        x = x.round()
    if dtype == torch.uint8:
        x = x.clamp(0, 255)
    if dtype == torch.int8:
        x = x.clamp(-100, 100)
    broken = len(shape) == 2 and shape != (B, Tq)
    return x.to(dtype), broken or dtype in (torch.bool, torch.complex64)


def spoil(read, tensors):
    """Now and then write a special number somewhere; whether results may be not finite."""
    if not read.rarely(8):
        return False
    x = read.of(tensors)
    if x.numel() == 0 or not x.is_floating_point() or 0 in x.stride():
        return False
    value = read.of(SPECIAL)
    x[tuple(read.number(n) for n in x.shape)] = value
    return value not in (0.0,)


def agree(name, got, want, size):
    """Loosely: parity is another test's. What is looked for is garbage."""
    if got.dtype == torch.float64 or want.numel() == 0:
        eps = 1e-9
    else:
        eps = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}[size]
    eps = max(eps, {torch.float32: 1e-3, torch.float64: 1e-9}.get(size, 0.06))
    largest = float(want.abs().max()) if want.numel() else 0.0
    error = float((got.double() - want).abs().max()) if want.numel() else 0.0
    assert error <= eps * (1.0 + largest), f"{name}: off by {error} of {largest}"


def one(data):
    """Run one case; "refused", "checked" or "ran". Raises AssertionError on a wrong result."""
    read = Bytes(data)
    generator = torch.Generator().manual_seed(read.number(1 << 16))
    dtype = read.of(DTYPES)
    B, Tq, Tk, H, Dv = (read.of(SIZES[:k]) for k in (7, 14, 22, 17, 17))
    while B * Tq * Tk * H > 150_000:
        Tk, H = (Tk + 1) // 2, (H + 1) // 2
    scale = read.of(SCALES)
    shapes = (B, Tq, H), (B, Tk, H), (B, Tk, Dv), (1, H) if read.number(2) else (H,)
    made = [
        tensor(read, s, dtype, generator, scale if i < 2 else 1.0) for i, s in enumerate(shapes)
    ]
    (q, k, v, w), broken = [x for x, _ in made], any(b for _, b in made)
    lens, bad_lens = lengths(read, B, Tq, Tk, generator)
    broken |= bad_lens
    odd = spoil(read, [q, k, v, w])
    dropout_p = read.of((0.0, 0.0, 0.0, 0.3, 1.0))
    seed = torch.tensor([read.number(1 << 16)]) if dropout_p and not read.rarely(40) else None
    broken |= bool(dropout_p) and seed is None
    need_weights, tabled, needs = bool(read.number(2)), read.number(3), read.number(16)
    try:
        table = ops.exp_keys(k, bool(read.number(2))) if tabled else (None, None)
        if tabled == 2 and read.rarely(10):
            table, broken = (table[0][..., :-1], table[1]), True
        context, weights = ops.attend(q, k, *table, v, w, lens, seed, dropout_p, need_weights)
        weights_ = (
            weights
            if need_weights
            else ops.attend(q, k, *table, v, w, lens, seed, dropout_p, True)[1]
        )
        grads = torch.randn(context.shape, generator=generator).to(context.dtype), None
        if read.number(2):
            grads = grads[0], torch.randn(weights_.shape, generator=generator).to(weights_.dtype)
        found = ops.attend_backward(
            q, k, *table, v, w, lens, seed, dropout_p, weights_, *grads, needs
        )
    except RuntimeError as error:
        words = str(error)
        assert broken or not words, f"refused what is right: {words}"
        assert "API call failed" not in words, words
        return "refused"
    if broken or odd or dropout_p:
        return "ran"
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, w)]
    want = reference.attend(*leaves, lens)
    agree("context", context, want[0].detach(), dtype)
    agree("weights", weights_, want[1].detach(), dtype)
    outs = [o for o, g in zip(want, grads, strict=True) if g is not None]
    exact = torch.autograd.grad(outs, leaves, [g.double() for g in grads if g is not None])
    for bit, name in enumerate(("d queries", "d keys", "d values", "d w_v")):
        if needs >> bit & 1:
            agree(name, found[bit], exact[bit], dtype)
    return "checked"

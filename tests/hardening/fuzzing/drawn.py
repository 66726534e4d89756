"""Arguments of a raw C++ entry point out of any bytes, right ones and wrong ones.

A case of an entry point is a function of :class:`Bytes` and a generator. It reads sizes, dtypes,
strides, lengths, magnitudes and mistakes, calls operators forward and backward, and returns what
holds their results against the reference in fp64; None where there is nothing to compare with.
"""

import functools

import torch
from layouts import LAYOUTS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LENS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float32, torch.float64,
    torch.bfloat16, torch.float16, torch.bool, torch.complex64,
)  # fmt: skip
ODD = (torch.int32, torch.complex64, torch.bool)
SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70, 127, 128, 130, 260)
SCALES = (1.0, 1e-6, 1e-3, 0.1, 5.0, 30.0, 400.0, 1e4)
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0)
# Numbers that an operator may be handed for a size, a token or a probability.
NUMBERS = (-1, 0, 1, 2**31, 2**40, 2**62, -(2**63))


class Bytes:
    """Choices read from bytes, two at a time; past their end they are zeros.

    Attributes:
        broken: whether something was drawn that an operator may refuse.
    """

    def __init__(self, data):
        self.data, self.at, self.broken = data, 0, False

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

    def mistake(self, times):
        """The same, of something that breaks the case."""
        now = self.rarely(times)
        self.broken |= now
        return now


def case(function):
    """Of bytes: "refused", "checked" or "ran"; an AssertionError where a result is wrong."""

    @functools.wraps(function)
    def run(data):
        read = Bytes(data)
        try:
            compare = function(read, torch.Generator().manual_seed(read.number(1 << 16)))
        except RuntimeError as error:
            words = str(error)
            assert read.broken, f"refused what is right: {words}"
            assert "API call failed" not in words, words
            return "refused"
        if read.broken or compare is None:
            return "ran"
        compare()
        return "checked"

    return run


def tensor(read, shape, dtype, generator, scale):
    """A tensor in some layout; now and then of a wrong rank, size or dtype."""
    if read.mistake(60):
        shape = list(shape)
        at = read.number(len(shape))
        shape[at] += read.of((1, 2, 7))
    if read.mistake(60):
        shape = (*shape, 1)
    if read.mistake(60):
        dtype = read.of((*DTYPES, *ODD))
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * scale
    x = x.to(dtype)
    arranged = read.of(list(LAYOUTS.values()))
    return x if dtype in ODD else arranged(x)  # which have no NaN


def lengths(read, B, Tq, Tk, generator):
    """None, or lengths of some dtype, now and then of a wrong shape or kind."""
    kind = read.number(4)
    if kind == 0:
        return None
    shape = ((B,), (B, Tq), (B, Tq + 1))[min(kind - 1, 1 if not read.rarely(40) else 2)]
    dtype = LENS[read.number(9)] if not read.rarely(40) else read.of(LENS)
    x = torch.rand(shape, generator=generator) * (Tk + 6) - 3
    if not dtype.is_floating_point:
        x = x.round()
    if dtype == torch.uint8:
        x = x.clamp(0, 255)
    if dtype == torch.int8:
        x = x.clamp(-100, 100)
    read.broken |= shape == (B, Tq + 1) or dtype in (torch.bool, torch.complex64)
    return x.to(dtype)


def dropout(read):
    """A probability, and the seed that it asks for or, now and then, does not get."""
    dropout_p = read.of((0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 1.0))
    if not dropout_p or read.mistake(40):
        return dropout_p, None
    return dropout_p, torch.tensor([read.number(1 << 16)])


def gradients_of(read, context, weights, generator):
    """Of both results, or of the first alone."""
    both = 1 + read.number(2)
    return tuple(
        torch.randn(x.shape, generator=generator).to(x.dtype) if i < both else None
        for i, x in enumerate((context, weights))
    )


def spoil(read, tensors):
    """Now and then write a special number somewhere; whether results may be not finite."""
    if not read.rarely(8):
        return False
    x = read.of(tensors)
    if x.numel() == 0 or not x.is_floating_point() or 0 in x.stride():
        return False
    value = read.of(SPECIAL)
    x[tuple(read.number(n) for n in x.shape)] = value
    return value != 0.0


def agree(name, got, want, size):
    """Loosely: parity is another test's. What is looked for is garbage."""
    if want.numel() == 0:
        return
    eps = {torch.float32: 1e-3, torch.float64: 1e-9}.get(size, 0.06)
    largest, error = float(want.abs().max()), float((got.double() - want).abs().max())
    assert error <= eps * (1.0 + largest), f"{name}: off by {error} of {largest}"


def mistaken(read, arguments, times=5):
    """About once in so many another argument at some place."""
    if not read.mistake(times):
        return arguments
    at, arguments = read.number(len(arguments)), list(arguments)
    now = arguments[at]
    if isinstance(now, float):
        now = read.of((-0.5, 1.5, float("nan")))
    elif isinstance(now, int):
        now = read.of(NUMBERS)
    elif now is None:
        now = torch.ones(
            tuple(read.number(4) for _ in range(read.number(5))), dtype=read.of(DTYPES)
        )
    else:
        now = _another(read, now)
    arguments[at] = now
    return arguments


def _another(read, x):
    """A tensor of another dtype, size, rank or layout, as far as ``x`` has one to change."""
    what, last = read.number(7), max(x.dim() - 1, 0)
    at = read.number(last + 1)
    if what == 0 or x.dim() == 0:
        return x.to(read.of((*DTYPES, *ODD)))
    return (
        lambda: x.unsqueeze(0),
        lambda: x.narrow(at, 0, max(x.shape[at] - 1, 0)),
        lambda: torch.cat((x, x), at),
        lambda: x.transpose(0, last),
        lambda: x.sum(0),
        lambda: x.unsqueeze(-1).expand(*x.shape, 2)[..., 0],
    )[what - 1]()


def exact(want, leaves, grads):
    """The gradients of the reference's results for some output gradients."""
    given = [(x, g.double()) for x, g in zip(want, grads, strict=True) if g is not None]
    outs, of_outs = zip(*given, strict=True)
    return torch.autograd.grad(outs, leaves, of_outs, materialize_grads=True)

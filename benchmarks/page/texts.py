"""The sentences of docs/performance.md. They hold for any run: no figure is in them."""

from __future__ import annotations

from ..contestants.peers import DIFFERENCES

__all__ = ["CONDITIONS", "MEMORY", "NOT_MEASURED", "PEERS", "ROOFS", "differences"]

CONDITIONS = """\
Generated from the figures in `benchmarks/results/` by `make performance`; `make bench` measures
them. Every figure is a median with its 20th and 80th percentile.

- A call is timed only after its result has passed the parity check against the reference in fp64:
  ours by the rule of the contract, others to a thousandth of the largest value.
- All providers of a row are timed in turns, in an order drawn anew for each round, and ratios are
  taken within a round: what disturbs a round disturbs all of it.
- *d2l eager* is the course's module in our own words; *rewrite eager* is
  `(tanh(q + k) * w).sum(-1)`; *compiled* is that under `torch.compile`, compiled for each shape
  alone; *ours module*, *memory* and *op* are `AdditiveAttention`, its `memory()` with `attend()`,
  and the operator behind both.
- *full* projects queries and keys and does the rest; *step* is a decoder step on keys projected
  beforehand; *projected* gets queries and keys projected; *scan* has our table of exponentials
  ready too; *again* is the unchanged call on keys it has seen; *loop* is 50 dependent steps and the
  one projection of their keys."""

MEMORY = """\
Working memory, what a forward and backward take beyond inputs, outputs and gradients, grows by this
much for one more of each size (least squares over its three sizes). Eager code keeps tensors of
(B,Tq,Tk,H); ours keeps none, so its peak is what has to be there anyway: flat in H but for the
projected queries and keys themselves, and linear in Tk like the keys, values and weights."""

ROOFS = """\
How to read a roof: a kernel can be no faster than the slowest of what it needs. Across the picture
goes how many elements of (B,Tq,Tk,H) are worked on per byte of keys and values that has to be
read; upwards goes how many of them a second. The slope is the memory bandwidth: a point on it
cannot be faster unless its data are already in a cache, and a point above it had them there. The
flat lines are arithmetic: the multiply-adds and the quarter of a division that our forward does
for each element, and one `torch.tanh` per element, what eager code pays. A point above the last
one computes tanh without computing tanh ([how it works](how-it-works.md)). The distance to the
nearest line above a point is what is left to win there. Small shapes stay below all lines: they
wait for the call, not for the processor. Roofs are the best of two measurements, before and after
the tables, all cores."""

PEERS = """\
Each runs in a process of its own, on the same tensors, in turns with ours; where it is not
installed its row says so (`make peers` installs them). What differs:"""

NOT_MEASURED = """\
- Half precision and fp64 on the CPU: the contract covers them, these tables are fp32.
- Peers in training: only their forward passes are compared.
- More than the cores named above, more than one socket, and other processors: `make bench` does.
- Energy, and throughput with several processes at a time."""


def differences() -> list[str]:
    """How each peer's formula or result differs from ours, as a list."""
    return [*(f"- {name}: {text}." for name, text in DIFFERENCES.items()), ""]

"""What plain PyTorch and torch.compile launch and move for the same, by the formula.

Counted for projected queries and keys, as the kernels here are. Each kernel reads its inputs and
writes its output once; F is a tensor of (B,Tq,Tk,H), S one of (B,Tq,Tk).
"""

from __future__ import annotations

from dataclasses import dataclass

from .counted import Problem
from .gpus import ASSUMED, Gpu

__all__ = ["Rival", "compiled", "eager"]


@dataclass(frozen=True)
class Rival:
    """What a call launches and moves.

    Attributes:
        name: of who does.
        launches: kernels.
        moved: bytes read and written.
        tanh: evaluations, each one operation of the special-function units.
    """

    name: str
    launches: int
    moved: int
    tanh: int

    def floor(self, gpu: Gpu) -> float:
        """Seconds that it takes at least: its bytes or its tanh at full speed, and its launches."""
        tanh = self.tanh / (gpu.special * gpu.multiprocessors * gpu.clock * 1e9)
        moved = self.moved / (gpu.dram * 1e12 * ASSUMED.dram_share)
        return max(tanh, moved) + self.launches * ASSUMED.launch * 1e-6


def _elements(p: Problem) -> tuple[int, int, int, int]:
    """Of F, of S, of queries and keys together, and of values and context together."""
    scores = p.batch * p.queries * p.keys
    projected = p.batch * (p.queries + p.keys) * p.hidden
    return scores * p.hidden, scores, projected, p.batch * (p.queries + p.keys) * p.value_size


def eager(p: Problem, backward: bool = False) -> Rival:
    """The d2l module.

    Forward: sum, tanh, product with w_v, softmax, product with the values; four more kernels on S
    make and apply a mask. Backward: two products with the values, softmax, two products with w_v,
    tanh, and the sums over queries and over keys.
    """
    f, s, projected, valued = _elements(p)
    size = p.dtype.itemsize
    if backward:
        moved = 2 * valued + 3 * s + projected + 3 * s + 7 * f
        return Rival("eager", 8, moved * size, 0)
    masked = p.lens is not None
    moved = projected + 4 * f + 4 * s + valued + (6 * s if masked else 0)
    return Rival("eager", 9 if masked else 5, moved * size, f)


def compiled(p: Problem, backward: bool = False) -> Rival:
    """``(tanh(q + k) * w).sum(-1)``, softmax and product with the values, under torch.compile.

    Forward: one kernel for the scores, F stays in registers; one for mask and softmax; one product.
    Backward: two products with the values, softmax, tanh once more with two gradients of F written,
    and three sums that read them.
    """
    f, s, projected, valued = _elements(p)
    size = p.dtype.itemsize
    if backward:
        moved = 2 * valued + 3 * s + 3 * s + 2 * projected + 5 * f
        return Rival("torch.compile", 7, moved * size, f)
    return Rival("torch.compile", 3, (projected + 4 * s + valued) * size, f)

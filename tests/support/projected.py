"""Projections of every size, and how they are to one another: what tanh can be hard for."""

from dataclasses import dataclass

import torch
from parity import Case


def normal(size):
    return lambda draw: (size * draw("queries"), size * draw("keys"))


def opposite(size, spread):
    """Of queries and keys, whose sums are small beside them."""
    return lambda draw: (size * (1 + spread * draw("queries")), -size * (1 + spread * draw("keys")))


def saturated(size):
    """Of either sign, whatever the key: tanh is one, or nearly so, and never zero."""
    return lambda draw: (size * draw("queries").sign(), 0.1 * draw("keys"))


def one_far(size, others):
    """A hidden unit of the queries has another size than all else."""

    def drawn(draw):
        queries, keys = (others * draw(name) for name in ("queries", "keys"))
        queries[..., 3] = size
        return queries, keys

    return drawn


def alike(size):
    """All queries are one, and all keys."""
    return lambda draw: tuple(
        (size * draw(name)[:, :1]).expand(-1, draw(name).shape[1], -1)
        for name in ("queries", "keys")
    )


PROJECTIONS = {
    **{f"normal {x}": normal(x) for x in (1e-6, 1e-4, 0.01, 0.1, 1.0, 1.7, 3.0, 30.0, 1e4)},
    **{
        f"opposite {x} {s}": opposite(x, s)
        for x in (1e-6, 0.01, 1.0, 4.0, 6.0)
        for s in (0.01, 0.1)
    },
    **{f"saturated {x}": saturated(x) for x in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)},
    # Keys of either sign: scores that differ by much are next to others that hardly do.
    "keys 8.0": lambda draw: (0.1 * draw("queries"), 8.0 * draw("keys").sign()),
    **{f"far {x} {y}": one_far(x, y) for x in (6.0, 20.0) for y in (0.1, 1.0)},
    "all 8.0": lambda draw: (torch.full_like(draw("queries"), 8.0), 0.3 * draw("keys")),
    **{f"alike {x}": alike(x) for x in (1e-3, 0.1, 1.0, 3.0)},
}


@dataclass
class Projected(Case):
    """Projections as one of them draws them; w_v of the unit that is far, among small ones."""

    kind: str = ""
    far_weight: float = 0.0

    def draw(self, dtype):
        drawn = super().draw(dtype)
        projections = PROJECTIONS[self.kind](drawn.__getitem__)
        for name, x in zip(("queries", "keys"), projections, strict=True):
            drawn[name] = x.to(dtype).double()
        drawn["w_q"] = drawn["w_k"] = torch.eye(self.H, dtype=torch.float64)
        if self.far_weight:
            drawn["w_v"] = torch.full((1, self.H), 0.1, dtype=dtype).double()
            drawn["w_v"][0, 3] = self.far_weight
        return drawn


def case_of(kind, dtype, **more):
    """A case whose gradients fp16 has in full."""
    scale = {"w_v": 0.2} | ({"context": 64.0, "weights": 64.0} if dtype == torch.float16 else {})
    sizes = {"B": 2, "Tq": 37, "Tk": 45, "H": 16, "Dq": 16, "Dk": 16, "Dv": 8, "bias": False}
    return Projected(**{**sizes, **more}, scale=scale, kind=kind)

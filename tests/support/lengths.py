"""Lengths of recorded calls: what they cost, and that a caller may change them afterwards."""

from collections import Counter

import parity
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bahdanau_fast as bf

__all__ = ["check_changes", "operators_for"]

LENGTHS = {"row": [2, 0], "query": [[1, 5, 0] * 6, [3, 2, 0] * 6]}
MADE = "empty", "new_empty"  # memory, without a launch
CHANGES = {
    "nothing": lambda _: None,
    "in place": lambda lens: lens.add_(2),
    "data": lambda lens: lens.data.add_(2),
}


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._opname] += func._opname not in MADE
        return func(*args, **(kwargs or {}))


def _drawn(queries, kind):
    torch.manual_seed(queries)
    module = bf.AdditiveAttention(8, 8, 8).to(parity.DEVICE)
    inputs = [torch.randn(2, n, 8, device=parity.DEVICE).requires_grad_() for n in (queries, 5)]
    given = torch.tensor(LENGTHS[kind], device=parity.DEVICE)
    return module, inputs, given if kind == "row" else given[:, :queries]


def operators_for(backend, queries, kind):
    """What a recorded forward runs for the sake of lengths, by name.

    Args:
        backend: that serves it.
        queries: Tq.
        kind: of LENGTHS.
    """
    (module, (q, k), lens), ran = _drawn(queries, kind), []
    for given in (None, lens):
        with bf.backends.use(backend), _Operators() as seen:
            module(q, k, k, given)
        ran.append(seen.names)
    return dict(ran[1] - ran[0])


def check_changes(backend, queries, kind):
    """Assert that gradients are those of the lengths at the time of the call."""
    (module, (q, k), lens), found = _drawn(queries, kind), {}
    for how, change in CHANGES.items():
        own = lens.clone()
        with bf.backends.use(backend):
            context = module(q, k, k, own)
        loss = context.square().sum() + module.attention_weights.square().sum()
        change(own)
        found[how] = torch.autograd.grad(loss, [q, k, *module.parameters()])
    for grads in found.values():
        assert all(map(torch.equal, grads, found["nothing"]))
    assert float(found["nothing"][0].abs().max()) > 0

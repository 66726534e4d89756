"""Lengths of recorded calls: what they cost, and that a caller may change them afterwards."""

from collections import Counter

import parity
import torch
from profiled import Operations

import bahdanau_fast as bf

LENGTHS = {"row": [2, 0], "query": [[1, 5, 0] * 6, [3, 2, 0] * 6]}
MADE = "empty", "new_empty"  # memory, without a launch
CHANGES = {
    "nothing": lambda _: None,
    "in place": lambda lens: lens.add_(2),
    "data": lambda lens: lens.data.add_(2),
}


def _drawn(queries, kind):
    torch.manual_seed(queries)
    module = bf.AdditiveAttention(8, 8, 8).to(parity.DEVICE)
    inputs = [torch.randn(2, n, 8, device=parity.DEVICE).requires_grad_() for n in (queries, 5)]
    given = torch.tensor(LENGTHS[kind], device=parity.DEVICE)
    return module, inputs, given if kind == "row" else given[:, :queries]


def operators_for(backend, queries, kind):
    """What a recorded forward of a backend runs for lengths of LENGTHS, by name."""
    (module, (q, k), lens), ran = _drawn(queries, kind), []
    for given in (None, lens):
        with bf.backends.use(backend), Operations() as seen:
            module(q, k, k, given)
        ran.append(Counter(f._opname for f, _ in seen.calls if f._opname not in MADE))
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

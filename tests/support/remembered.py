"""What the tests of the key cache share: sizes, the plain formula, and what is remembered."""

import torch
from torch.profiler import profile

import bahdanau_fast as bf
from bahdanau_fast.backends.route import REUSE_ELEMENTS
from bahdanau_fast.memory import ProjectedKeys

B, TQ, TK, DK, DQ, H = 3, 1, 53, 17, 5, 19
# Keys that are faster projected than remembered are not in question here.
assert min(B * TK * DK, B * TK * H) >= REUSE_ELEMENTS


def held(module):
    """The projection that is remembered, or None."""
    entry = module._cache._entry
    if entry is None or entry.projected() is None:
        return None
    return ProjectedKeys(entry.projected(), entry.table, entry.keys_max)


def truth(module, query, keys, lens=None):
    bias = module.bias
    with bf.backends.use("reference"):
        return bf.additive_attention(
            query,
            keys,
            keys,
            module.W_q.weight,
            module.W_k.weight,
            module.w_v.weight,
            lens,
            bias=bias,
        )[0]


def agrees(module, query, keys):
    got = module(query, keys, keys)
    torch.testing.assert_close(got, truth(module, query, keys), rtol=1e-5, atol=1e-6)
    return got


def projections(run, shape=(B, TK, DK)):
    """How many products of the key weight with keys of a shape a run makes."""
    with profile(record_shapes=True) as record:
        run()
    return sum(
        event.name == "aten::linear" and list(shape) in event.input_shapes
        for event in record.events()
    )

"""The contract table of every backend, as cases: a row each, and per way to get that row wrong."""

import torch
from parity import INPUTS

# Big enough that the CPU computes fp32 in its fp32 kernels (kMaxFp64CpuElements), and that
# projections are not part of the operator (backends/cpu.py).
LARGE = {"B": 3, "Tq": 17, "Tk": 53, "H": 121, "Dq": 23, "Dk": 29, "Dv": 29}
assert LARGE["B"] * LARGE["Tq"] * LARGE["Tk"] * LARGE["H"] > 196608
assert LARGE["B"] * (LARGE["Tq"] * LARGE["Dq"] + LARGE["Tk"] * LARGE["Dk"]) * LARGE["H"] > 2**19


def lens(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


per_query = torch.arange(-3, 48).reshape(3, 17) * 1.3

EVERY = (*INPUTS, "context", "weights")
# So small that projections and attention are one operator (backends/route.py).
SMALLEST = {"B": 2, "Tq": 2, "Tk": 7, "H": 5, "Dq": 3, "Dk": 9, "Dv": 2}

# One entry per row, and per way to get that row wrong, of the contract table.
CONTRACT = {
    "no lens": {},
    "lens per row": {"lens": lens(1, 26, 53)},
    "lens per query": {"lens": per_query.long()},
    "lens fractional": {"lens": lens(0.5, 2.5, 8.0001, dtype=torch.float64)},
    "lens fractional per query": {"lens": per_query},
    "lens just below a number": {"lens": lens(2.9999, 3.0, 3.0001, dtype=torch.float32)},
    "lens int32": {"lens": lens(3, 4, 5, dtype=torch.int32)},
    "lens uint8": {"lens": lens(0, 200, 52, dtype=torch.uint8)},
    "lens int8": {"lens": lens(-7, 1, 52, dtype=torch.int8)},
    "lens int16": {"lens": lens(-30000, 1, 52, dtype=torch.int16)},
    "lens bf16": {"lens": lens(1.5, 4, 52, dtype=torch.bfloat16)},
    "lens fp16": {"lens": lens(0.5, 4, 52, dtype=torch.float16)},
    "lens bf16, positions that it rounds": {
        **{"Tk": 264, "H": 43},
        "lens": lens(260, 255, 264, dtype=torch.bfloat16),
    },
    "lens of odd strides": {"lens": per_query.t().contiguous().t()},
    "lens expanded": {"lens": lens(5).expand(3)},
    "longer than Tk": {"lens": lens(54, 10**12, 53)},
    "infinite lens": {"lens": lens(float("inf"), float("-inf"), 7.0, dtype=torch.float32)},
    "whole row masked": {"lens": lens(0, -5, 7)},
    "all rows masked": {"lens": lens(0, 0, 0)},
    "B = 0": {"B": 0},
    "B = 0 with lens": {"B": 0, "lens": torch.zeros(0, dtype=torch.int64)},
    "Tq = 0": {"Tq": 0},
    "Tq = 0 with lens": {"Tq": 0, "lens": torch.zeros(3, 0)},
    "Tk = 0": {"Tk": 0},
    "Tk = 0 with lens": {"Tk": 0, "lens": lens(0, 1, 2)},
    "Dv = 0": {"Dv": 0},
    "values is keys": {"tied": True},
    "values is keys with lens": {"tied": True, "lens": lens(3, 0, 99)},
    "one of each": {"B": 1, "Tq": 1, "Tk": 1, "H": 1, "Dq": 1, "Dk": 1, "Dv": 1},
    "H = 1": {"H": 1, "Tq": 100, "Tk": 500},
    "whole vectors": {"H": 64, "Dv": 64, "Tk": 64, "Tq": 16},
    "one past whole vectors": {"H": 65, "Dv": 65, "Tk": 65, "Tq": 17},
    "one short of whole vectors": {"H": 63, "Dv": 63, "Tk": 63, "Tq": 15},
    "no bias": {"bias": False},
    "through the weights alone": {"grads": "weights"},
    "through the context alone": {"grads": "context"},
    "wide values": {"Dv": 1100, "Tq": 9, "B": 1},  # past the 1024 columns of one tile
    "many batch rows": {"B": 19, "Tq": 2},  # one task per row
    "decoder step": {"B": 16, "Tq": 1, "Tk": 50, "H": 96, "lens": torch.arange(16) * 3},
    "split keys": {"B": 1, "Tq": 2, "Tk": 1033, "H": 131},
    "split keys, lens inside a chunk": {"B": 1, "Tq": 2, "Tk": 1033, "H": 131, "lens": lens(65)},
    "split keys, lens at a chunk": {"B": 2, "Tq": 1, "Tk": 1033, "H": 131, "lens": lens(64, 128)},
    "split keys, whole row masked": {"B": 1, "Tq": 2, "Tk": 1033, "H": 131, "lens": lens(0)},
    "fp32 in small": {"B": 1, "Tq": 2, "Tk": 8, "H": 5},
    "all in one operator": SMALLEST,
    "all in one operator, lens": {**SMALLEST, "lens": lens(0, 2)},
    "all in one operator, lens per query": {**SMALLEST, "lens": torch.tensor([[1, 7], [3.5, -1]])},
    "all in one operator, no bias": {**SMALLEST, "bias": False},
    "all in one operator, values is keys": {**SMALLEST, "tied": True},
    "all in one operator, weights alone": {**SMALLEST, "grads": "weights"},
    "all in one operator, context alone": {**SMALLEST, "grads": "context"},
    "all in one operator, strided": {**SMALLEST, "layout": dict.fromkeys(EVERY, "strided")},
    "all in one operator, transposed": {**SMALLEST, "layout": dict.fromkeys(EVERY, "transposed")},
    "all in one operator, large inputs": {**SMALLEST, "scale": {"queries": 60.0, "keys": 60.0}},
    "all in one operator, fp32 kernels": {"Tq": 40, "Tk": 60, "H": 64, "Dq": 9, "Dk": 40, "Dv": 9},
    "table of the other precision": {"B": 1, "Tq": 80, "Tk": 41, "H": 43},
}


def scattered(*shape, seed=0, share=0.4):
    """A mask without order."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def places(length, *seen):
    """A mask over ``length`` keys with these ranges."""
    mask = torch.zeros(length, dtype=torch.bool)
    for first, end in seen:
        mask[first:end] = True
    return mask


per_row = scattered(3, 53, seed=1)
for_queries = scattered(3, 17, 53, seed=2)
for_queries[0, 3] = for_queries[1] = False  # nothing to look at
LONG = {"B": 1, "Tq": 2, "Tk": 1033, "H": 131}
#: The same for masks, which only some backends have kernels for.
MASKED = {
    "mask per row": {"mask": per_row},
    "mask per query": {"mask": for_queries},
    "mask of all rows alike": {"mask": per_row[:1].expand(3, 53)},
    "mask of all queries alike": {"mask": per_row.unsqueeze(1)},
    "mask and lens": {"mask": per_row, "lens": lens(0, 26, 53)},
    "mask and lens per query": {"mask": per_row, "lens": per_query},
    # By the same mask one query sees a tile that its neighbour, whose length is 0, weighs.
    "mask and lens per query, some of them 0": {
        **{"Tk": 153, "mask": places(153, (0, 2), (152, 153)).expand(3, 153)},
        "lens": torch.tensor([160, 0, 2, -4]).repeat(13)[:51].reshape(3, 17),
    },
    "mask per query and lens": {"mask": for_queries, "lens": lens(50, 3, 99)},
    "mask that is a length": {"mask": torch.arange(53) < lens(1, 26, 53)[:, None]},
    "mask that leaves out the last": {"mask": places(53, (52, 53)).expand(3, 53)},
    "mask of all": {"mask": torch.ones(3, 53, dtype=torch.bool)},
    "mask of nothing": {"mask": torch.zeros(3, 53, dtype=torch.bool)},
    "mask of odd strides": {"mask": for_queries.transpose(1, 2).contiguous().transpose(1, 2)},
    "mask strided": {"mask": scattered(3, 106)[:, ::2]},
    "mask with B = 0": {"B": 0, "mask": torch.zeros(0, 53, dtype=torch.bool)},
    "mask with Tq = 0": {"Tq": 0, "mask": torch.zeros(3, 0, 53, dtype=torch.bool)},
    "mask with Tk = 0": {"Tk": 0, "mask": torch.zeros(3, 0, dtype=torch.bool)},
    "mask, values is keys": {"mask": for_queries, "tied": True},
    "mask, weights alone": {"mask": for_queries, "grads": "weights"},
    "mask, decoder step": {"B": 16, "Tq": 1, "Tk": 50, "H": 96, "mask": scattered(16, 50)},
    "mask, split keys": {**LONG, "mask": scattered(1, 1033)},
    "mask, split keys, chunks without any": {
        **LONG,
        "mask": places(1033, (3, 5), (900, 970))[None],
    },
    "mask, split keys, per query": {**LONG, "mask": scattered(1, 2, 1033, share=0.01)},
    "mask, split keys, nothing": {**LONG, "mask": scattered(1, 2, 1033, share=0.0)},
    "mask, fp32 in small": {"B": 1, "Tq": 2, "Tk": 8, "H": 5, "mask": scattered(1, 2, 8)},
    "mask, all in one operator": {**SMALLEST, "mask": scattered(2, 7)},
    "mask, all in one operator, per query": {**SMALLEST, "mask": scattered(2, 2, 7)},
    "mask, large inputs": {"scale": {"queries": 60.0, "keys": 60.0}, "mask": for_queries},
    "mask, many tiles without any": {"Tq": 3, "mask": places(53, (0, 1), (40, 44)).expand(3, 53)},
}
CONTRACT |= {
    f"{name} inputs": {
        "layout": dict.fromkeys(("queries", "keys", "values", "w_q", "w_k", "w_v", "bias"), name)
    }
    for name in ("sliced", "strided", "part")
}
CONTRACT |= {
    f"{name} inputs": {"layout": dict.fromkeys(("queries", "keys", "values"), name)}
    for name in ("transposed", "batch_last", "expanded")
}
CONTRACT |= {
    f"{name} output gradients": {"layout": {"context": name, "weights": name}}
    for name in ("sliced", "strided", "part", "transposed", "batch_last", "expanded")
}

#: What is inside a score: features that are more than a vector wide, or one alone (coverage).
FORMS = {
    "features": {"C": 10},
    "one feature": {"C": 1},
    "many features": {"C": 33},
    "whole vectors of features": {"C": 32},
    "relu": {"activation": "relu"},
    "leaky_relu": {"activation": "leaky_relu", "negative_slope": 0.2},
    "leaky_relu upside down": {"activation": "leaky_relu", "negative_slope": -1.5},
    "relu of features": {"C": 3, "activation": "relu"},
    "sigmoid": {"activation": "sigmoid"},
    "sigmoid of features": {"C": 3, "activation": "sigmoid"},
}


def operands(dtype, B=2, Tq=3, Tk=5, H=7, Dv=4, C=0, activation=0, grad=True):
    """Of ``ops.attention``: projected queries and keys, values and w_v; what is inside, by name."""
    generator = torch.Generator().manual_seed(0)
    shapes = (B, Tq, H), (B, Tk, H), (B, Tk, Dv), (1, H)
    shapes += ((B, Tk, C), (H, C)) if C else ()
    drawn = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    made = [x.to(dtype).requires_grad_(grad) for x in drawn]
    features, w_f = made[4:] or (None, None)
    numbers = {"activation": activation, "negative_slope": 0.2}
    return made[:4], {"features": features, "w_f": w_f, **numbers}

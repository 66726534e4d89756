"""Features inside a score, other activations, and scores themselves: parity, PyTorch."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from beside import close
from contract import FORMS, LARGE, lens, scattered
from parity import (
    DTYPES,
    INPUTS,
    Case,
    attended,
    called,
    check,
    fused,
    judged,
    keep_the_rule,
    module_of,
    neighbour,
)
from targets import CPU, REFERENCE
from thorough import every_dtype, one_of_each
from torch.nn.functional import linear

import bahdanau_fast as bf
from bahdanau_fast import reference

BACKENDS = [x.name for x in (CPU, REFERENCE) if x.name in bf.backends.available()]
ROWS = (
    "no lens", "lens per query", "whole row masked", "B = 0", "Tq = 0", "Tk = 0", "Dv = 0",
    "values is keys", "one of each", "one past whole vectors", "no bias",
    "through the weights alone", "many batch rows", "decoder step",
    "split keys, lens inside a chunk", "fp32 in small", "sliced inputs", "batch_last inputs",
    "expanded inputs", "mask per row", "mask per query", "mask and lens per query",
    "mask and lens per query, some of them 0", "mask of nothing",
    "mask, split keys, chunks without any", "mask, many tiles without any",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, dtype):
    for units in (LARGE["H"], 40):  # of few, projections are part of the operator
        CPU.check(Case(**{**LARGE, "H": units}, **FORMS[form], lens=lens(7, 53, 0)), dtype)


# Activations know nothing of rows: with one the rows are kept in fp32, and in the others in deep.
CONTRACTED = [("features", dtype) for dtype in DTYPES] + [("leaky_relu", torch.float32)]
CONTRACTED += [pytest.param("leaky_relu", dtype, marks=pytest.mark.deep) for dtype in DTYPES[1:]]


@pytest.mark.parametrize(("form", "dtype"), CONTRACTED, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_contract(row, form, dtype):
    CPU.check(row, dtype, **FORMS[form])


def stepped(inputs, lens, backend="cpu", remembered=True, **options):
    """The module with a call for each query, on a memory or on the same keys."""
    module, found = module_of(inputs, **options), []
    source = inputs["keys"], inputs["values"], lens
    with bf.backends.use(backend):
        memory = module.memory(*source) if remembered else None
        for query in inputs["queries"].split(1, 1):
            context = module.attend(query, memory) if remembered else module(query, *source)
            found.append((context, module.attention_weights))
    return [torch.cat(of_steps, 1) for of_steps in zip(*found, strict=True)]


def hoisted(inputs, lens, sides="qk", **options):
    """The function with queries or keys or both projected in front of it."""
    given = dict(inputs)
    if "q" in sides:
        given |= {"queries": linear(inputs["queries"], inputs["w_q"]), "w_q": None}
    if "k" in sides:
        keys = linear(inputs["keys"], inputs["w_k"], inputs["bias"])
        given |= {"keys": keys, "w_k": None, "bias": None}
    return fused(given, lens, **options)


MODULES = {
    "call": called,
    "memory": attended,
    "steps on a memory": stepped,
    "a loop": partial(stepped, remembered=False),
}


@pytest.mark.parametrize(("how", "dtype", "backend"), every_dtype(MODULES, BACKENDS))
@pytest.mark.parametrize("form", ["relu", "leaky_relu", "sigmoid"])
def test_modules(form, how, dtype, backend):
    # Of so many rows that single steps are computed in fp32, too.
    case = Case(**LARGE | {"B": 36, "Tq": 3}, **FORMS[form], lens=torch.arange(36) * 2)
    check(case, dtype, partial(MODULES[how], backend=backend))


@pytest.mark.parametrize(("sides", "dtype", "backend"), every_dtype(["q", "k", "qk"], BACKENDS))
@pytest.mark.parametrize("form", [{}, FORMS["relu"], FORMS["features"]], ids=str)
def test_projected_in_front(form, sides, dtype, backend):
    case = Case(**LARGE, **form, lens=lens(7, 53, 0))
    check(case, dtype, partial(hoisted, sides=sides, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("sizes", [LARGE, {}, {"B": 1, "Tq": 1}], ids=["large", "small", "step"])
def test_projected_keys_and_a_bias(sizes, activation, grad, backend):
    """The bias is inside without a projection of the keys, too; of the reference likewise."""
    drawn = Case(**sizes).draw(torch.float64)
    given = {n: drawn[n].requires_grad_(grad) for n in INPUTS if n in drawn}
    want, weights = reference.additive_attention(**given, activation=activation)
    scores = reference.additive_scores(
        **{n: x for n, x in given.items() if n != "values"}, activation=activation
    )
    given["keys"] = linear(given["keys"], given["w_k"])
    given["w_k"] = None
    for of in (bf, reference):
        how = {"activation": activation} | ({"backend": backend} if of is bf else {})
        got = of.additive_attention(**given, **how)
        close(got, (want, weights))
        got = of.additive_scores(**{n: x for n, x in given.items() if n != "values"}, **how)
        close(got, scores)


SCALED = product(
    ("queries", "keys", "w_k", "bias", "features", "w_f", "w_v", "values"), (1e-6, 1e-3, 30.0, 1e4)
)
IN_BOTH = ([(*case, dtype) for dtype in (torch.float32, torch.float64)] for case in SCALED)


@pytest.mark.parametrize(("name", "scale", "dtype"), one_of_each(IN_BOTH))
def test_magnitudes(name, scale, dtype):
    for fewer in ({}, {"Tq": 2, "H": 40}):  # fp32 is computed in fp64 for few
        sizes = {**LARGE, **fewer, "lens": lens(7, 53, 1)}
        CPU.check(Case(**sizes, C=10, scale={name: scale}), dtype)


@pytest.mark.parametrize("layout", ["strided", "transposed", "batch_last", "expanded"])
def test_layouts_of_features(layout):
    given = {"features": layout}
    if layout != "expanded":
        given["w_f"] = layout
    CPU.check(Case(**LARGE, C=10, layout=given), torch.float32)


# ---- scores --------------------------------------------------------------------------------------

SCORED = {
    "tanh": {},
    "clipped": {"clip": 10.0},
    "small inputs": {"scale": {"queries": 1e-5, "keys": 1e-5}},
    **FORMS,
    "decoder step": {"B": 16, "Tq": 1, "Tk": 50, "H": 96},
    "one query, one past whole vectors": {"B": 16, "Tq": 1, "Tk": 200, "H": 65, "C": 3},
    "Tk = 0": {"Tk": 0, "C": 3},
    "fp32 in small": {"B": 1, "Tq": 2, "Tk": 8, "H": 5, "C": 3},
}


def scored(function, case, drawn, dtype, clip, **options):
    """Scores and their gradients by name, in fp64."""
    names = [n for n in INPUTS if n in drawn and n != "values"]
    inputs = {n: drawn[n].to(dtype).requires_grad_() for n in names}
    scores = function(**inputs, **case.options(), clip=clip, **options)
    assert scores.dtype == dtype
    grads = torch.autograd.grad(scores, list(inputs.values()), drawn["weights"].to(dtype))
    named = zip(["scores", *(f"d {n}" for n in names)], [scores, *grads], strict=True)
    return {n: x.detach().double().numpy() for n, x in named}


@pytest.mark.parametrize(("row", "dtype", "backend"), every_dtype(SCORED, BACKENDS))
def test_scores(row, dtype, backend):
    given = {**LARGE, **SCORED[row]}
    clip = given.pop("clip", None)
    case = Case(**given)
    drawn = case.draw(dtype)

    def plain(drawn, dtype):
        return scored(reference.additive_scores, case, drawn, dtype, clip)

    ours = scored(bf.additive_scores, case, drawn, dtype, clip, backend=backend)
    near = partial(neighbour, case, drawn, dtype)
    keep_the_rule(judged(ours, plain, drawn, near, dtype), row)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("activation", "slope"), [("relu", 0.0), ("leaky_relu", 0.25)])
def test_slopes_at_zero(activation, slope, dtype, backend):
    """Those that PyTorch gives ReLU and leaky ReLU: 0, and the lower one."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape):  # all sums of them are exact
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    B, Tq, Tk, H = (LARGE[name] for name in ("B", "Tq", "Tk", "H"))
    queries = torch.zeros(B, Tq, 4, dtype=dtype, requires_grad=True)
    keys = torch.zeros(B, Tk, 5, dtype=dtype, requires_grad=True)
    w_q, w_k, w_v, grad = integers(H, 4), integers(H, 5), integers(1, H), integers(B, Tq, Tk)
    scores = bf.additive_scores(
        queries, keys, w_q, w_k, w_v, activation=activation, negative_slope=0.25, backend=backend
    )
    scores.backward(grad)
    assert torch.equal(scores, torch.zeros_like(scores))
    assert torch.equal(queries.grad, slope * grad.sum(2, keepdim=True) * (w_v @ w_q))
    assert torch.equal(keys.grad, slope * grad.sum(1).unsqueeze(2) * (w_v @ w_k))


# ---- what PyTorch does with them -----------------------------------------------------------------


@pytest.mark.parametrize("form", ["features", "leaky_relu", "sigmoid"])
@pytest.mark.parametrize("of", ["scores", "attention", "masked attention"])
def test_gradcheck_and_second_derivatives(form, of):
    case = replace(Case(**FORMS[form]), C=FORMS[form].get("C", 0) and 2)
    drawn = {n: x for n, x in case.draw(torch.float64).items() if n in INPUTS}
    if of == "scores":
        del drawn["values"]
    names = list(drawn)
    look = {"mask": scattered(case.B, case.Tq, case.Tk)} if of == "masked attention" else {}

    def function(*tensors):
        given = dict(zip(names, tensors, strict=True))
        if of == "scores":
            return bf.additive_scores(**given, **case.options(), clip=3.0)
        valid = torch.tensor([5, 0])
        return bf.additive_attention(**given, **case.options(), valid_lens=valid, **look)

    inputs = [x.requires_grad_() for x in drawn.values()]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def tensors(dtype=torch.float32, grad=False):
    drawn = Case(**LARGE, C=4).draw(torch.float32)
    return {n: x.to(dtype).requires_grad_(grad) for n, x in drawn.items() if n in INPUTS}


def test_distributed_tensors():
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    inputs = {n: x for n, x in tensors().items() if n != "values"}
    want = bf.additive_scores(**inputs)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        rows = ("queries", "keys", "features")
        spread = {
            n: distribute_tensor(x, mesh, [Shard(0)] if n in rows else None)
            for n, x in inputs.items()
        }
        torch.testing.assert_close(bf.additive_scores(**spread).full_tensor(), want)
    finally:
        distributed.destroy_process_group()

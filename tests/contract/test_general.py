"""Features inside a score, other activations, and scores themselves: parity, PyTorch."""

from dataclasses import replace
from functools import partial
from itertools import product

import parity
import pytest
import torch
from contract import FORMS, LARGE, lens, scattered
from parity import (
    DTYPES,
    INPUTS,
    Case,
    check,
    fused,
    judged,
    keep_the_rule,
    module_of,
    neighbour,
)
from targets import CPU, REFERENCE
from test_parity import WAYS
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


def hoisted(inputs, lens, sides, function, **options):
    """A function with queries, keys or both projected in front of it, with the bias or without."""
    given = dict(inputs)
    if "queries" in sides:
        given |= {"queries": linear(inputs["queries"], inputs["w_q"]), "w_q": None}
    if "keys" in sides:
        bias = inputs["bias"] if "bias" in sides else None
        given |= {"keys": linear(inputs["keys"], inputs["w_k"], bias), "w_k": None}
    if "bias" in sides:
        given["bias"] = None
    return function(given, lens, **options)


def hooked(inputs, lens, name, backend="cpu", **options):
    """The module, one of whose layers has a hook, which nothing but a call would run."""
    module, seen = module_of(inputs, **options), []
    module.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    with bf.backends.use(backend):
        context = module(inputs["queries"], inputs["keys"], inputs["values"], lens)
    assert seen == [1]
    return context, module.attention_weights


MODULES = {f"{name} hooked": partial(hooked, name=name) for name in ("W_q", "W_k", "w_v")} | WAYS
del MODULES["function"]
ACTIVATED = [name for name, form in FORMS.items() if "C" not in form]


@pytest.mark.parametrize(("how", "dtype", "backend"), every_dtype(MODULES, BACKENDS))
@pytest.mark.parametrize("form", ACTIVATED)
def test_modules(form, how, dtype, backend):
    # Of so many rows that single steps are computed in fp32, too.
    case = Case(**LARGE | {"B": 36, "Tq": 3}, **FORMS[form], lens=torch.arange(36) * 2)
    check(case, dtype, partial(MODULES[how], backend=backend))


SIDES = "queries", "keys", "keys and bias", "queries, keys and bias"


@pytest.mark.parametrize(("sides", "dtype", "backend"), every_dtype(SIDES, BACKENDS))
@pytest.mark.parametrize("form", [{}, FORMS["relu"], FORMS["features"]], ids=str)
def test_projected_in_front(form, sides, dtype, backend):
    for sizes in (LARGE, {"B": 3}):
        case = Case(**sizes, **form, lens=lens(7, 53, 0))
        for function in (fused, parity.scored):
            how = partial(hoisted, sides=sides, function=function, backend=backend)
            check(case, dtype, how)


SCALED = product(
    ("queries", "keys", "w_q", "w_k", "bias", "features", "w_f", "w_v", "values"),
    (1e-6, 1e-3, 30.0, 1e4),
)
IN_EACH = ([(*case, dtype) for dtype in DTYPES[:3]] for case in SCALED)


@pytest.mark.parametrize(("name", "scale", "dtype"), one_of_each(IN_EACH))
def test_magnitudes(name, scale, dtype):
    for fewer in ({}, {"Tq": 2, "H": 40}):  # fp32 is computed in fp64 for few
        for features in ({"C": 10}, {}) if name not in ("features", "w_f") else ({"C": 10},):
            sizes = {**LARGE, **fewer, **features, "lens": lens(7, 53, 0)}
            CPU.check(Case(**sizes, scale={name: scale}), dtype)


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


def by_name(function):
    return lambda inputs, **options: function(**inputs, **options)


def on_a_memory(inputs, clip, backend, **options):
    """By the module."""
    module = module_of(inputs, **options)
    with bf.backends.use(backend):
        return module.scores(inputs["queries"], module.memory(inputs["keys"]), clip)


def scored(function, case, drawn, dtype, clip, **options):
    """Scores and their gradients by name, in fp64."""
    names = [n for n in INPUTS if n in drawn and n != "values"]
    inputs = {n: drawn[n].to(dtype).requires_grad_() for n in names}
    scores = function(inputs, **case.options(), clip=clip, **options)
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
        return scored(by_name(reference.additive_scores), case, drawn, dtype, clip)

    near = partial(neighbour, case, drawn, dtype)
    for way in (by_name(bf.additive_scores), *[on_a_memory] * (not case.C)):
        ours = scored(way, case, drawn, dtype, clip, backend=backend)
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


MASK = scattered(2, 3, 7)
MASK[1] = False
LOOKS = {
    "scores": {"clip": 3.0},
    "all": {},
    "without weights": {"need_weights": False, "valid_lens": lens(5, 0)},
    "lens": {"valid_lens": lens(5, 0)},
    "lens per query": {"valid_lens": torch.tensor([[1, 5, 0], [2, 3, 4]])},
    "mask per row": {"valid_lens": lens(6, 7), "mask": MASK[:, 0]},
    "mask per query": {"valid_lens": lens(5, 0), "mask": MASK},
}


@pytest.mark.parametrize(
    "form", [{}, *map(FORMS.get, ("features", "leaky_relu", "sigmoid"))], ids=str
)
@pytest.mark.parametrize("look", LOOKS)
def test_gradcheck_and_second_derivatives(form, look):
    case = replace(Case(**form), C=form.get("C", 0) and 2)
    drawn = {n: x for n, x in case.draw(torch.float64).items() if n in INPUTS}
    call = bf.additive_attention
    if look == "scores":
        call = bf.additive_scores
        del drawn["values"]

    def function(*tensors):
        given = dict(zip(drawn, tensors, strict=True))
        found = call(**given, **case.options(), **LOOKS[look], backend="cpu")
        return [x for x in found if x is not None] if isinstance(found, tuple) else found

    inputs = [x.requires_grad_() for x in drawn.values()]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)

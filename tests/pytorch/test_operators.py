"""The operators as PyTorch sees them: schemas, fakes, autograd, compilation, determinism."""

import pytest
import torch
from beside import close
from contract import operands
from opchecked import opcheck

import bahdanau_fast as bf
from bahdanau_fast._C_cpu import most_table_elements_in_fp64
from bahdanau_fast.ops.attention import INPUTS, NEED

pytestmark = pytest.mark.usefixtures("nothing_compiled")
FP64_CPU_ELEMENTS = most_table_elements_in_fp64(True)
ops = torch.ops.bahdanau_fast
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EVERYTHING = sum(NEED.values())
SOME = NEED["queries"] | NEED["w_v"] | NEED["w_f"]


SEED = torch.tensor([12345])
VARIED = {
    "plain": {},
    "a table": {"table": True},
    "lens": {"lens": torch.tensor([0, 3])},
    "lens per query": {"lens": torch.tensor([[1.5, 0, 9]] * 2)},
    "mask": {"mask": torch.tensor([[[1, 0, 1, 1, 0]], [[0, 0, 0, 0, 1]]]) > 0},
    "mask per query": {"table": True, "mask": torch.arange(30).reshape(2, 3, 5) % 4 == 1, "p": 0.5},
    "mask and lens": {"mask": torch.arange(30).view(2, 3, 5) % 3 > 0, "lens": torch.tensor([2, 4])},
    "dropout": {"p": 0.5},
    "all of it": {"table": True, "lens": torch.tensor([2, 5]), "p": 0.25},
    "features": {"C": 3, "p": 0.25, "lens": torch.tensor([0, 1])},
    "features, mask and lens": {
        **{"C": 3, "lens": torch.tensor([3, 5])},
        "mask": torch.arange(30).reshape(2, 3, 5) % 4 != 1,
    },
    "features, mask per row": {"C": 3, "mask": torch.arange(10).view(2, 1, 5) % 3 > 0},
    "features, large": {"C": 10, "B": 3, "Tq": 17, "Tk": 53, "H": 211},
    "features, no batch": {"B": 0, "C": 3},
    "features, no keys": {"Tk": 0, "C": 3},
    "leaky ReLU": {"activation": 2},
    "large": {"Tq": 33, "Tk": 64, "H": 70, "table": True},
    "split": {"B": 1, "Tq": 1, "Tk": 1500, "H": 130, "table": True},
    "no batch": {"B": 0},
    "no queries": {"Tq": 0},
    "no keys": {"Tk": 0},
    "raw": {"raw": "w_q w_k"},
    "raw queries": {"raw": "w_q", "table": True, "lens": torch.tensor([[1.5, 0, 9]] * 2)},
    "raw keys": {"raw": "w_k bias", "p": 0.5},
    "raw, bias and lens": {"raw": "w_q w_k bias", "lens": torch.tensor([0, 3])},
    "raw, mask and lens": {
        **{"raw": "w_q w_k", "lens": torch.tensor([2, 4])},
        "mask": torch.arange(30).view(2, 3, 5) % 3 > 0,
    },
    "raw, dropout": {"raw": "w_q w_k bias", "p": 0.5},
    "raw, no keys": {"raw": "w_q w_k bias", "Tk": 0},
    "raw, features": {"raw": "w_q w_k", "C": 3, "lens": torch.tensor([2, 5])},
}


def arguments(dtype, case, grad=True):
    """Tensors that ``attention`` is given by their places, and the others by name."""
    case = dict(case)
    options = {"valid_lens": case.pop("lens", None), "mask": case.pop("mask", None)}
    table, p, raw = case.pop("table", False), case.pop("p", 0.0), case.pop("raw", "").split()
    general = case.keys() & {"C", "activation"}
    tensors, inside = operands(dtype, grad=grad, **case)
    if table:
        options["table"], options["keys_max"] = ops.exp_keys(tensors[1].detach())
    sizes, hidden = {"w_q": (4,), "w_k": (3,), "bias": ()}, tensors[0].shape[2]
    for place, (name, size) in enumerate(sizes.items()):
        if name in raw:
            options[name] = torch.randn(hidden, *size).to(dtype).requires_grad_(grad)
        if name in raw and size:
            shape = *tensors[place].shape[:2], *size
            tensors[place] = torch.randn(shape).to(dtype).requires_grad_(grad)
    options |= inside if general else {}
    return tensors, {**options, "seed": SEED if p else None, "dropout_p": p}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_exp_keys(dtype):
    for size in ({}, {"H": 64}, {"Tk": 0}, {"B": 0}, {"Tk": 999, "H": 133}):
        keys = operands(dtype, grad=False, **size)[0][1]
        opcheck(ops.exp_keys.default, (keys,), traced=not size)
        opcheck(ops.exp_keys.default, (keys.transpose(0, 1),), traced=not size)


def case_of(case, dtype, traced):
    """A case of VARIED, in a dtype, with tracing or without."""
    name = f"{case}-{dtype}" + "-traced" * traced
    return pytest.param(case, dtype, traced, id=name)


# Traced are those that differ from each other in more than sizes, and one of the two half types,
# each option in its first variant; every variant in these.
EVERY = ("plain", "features")
SIZED = [case for case in VARIED if VARIED[case].keys() & {"B", "Tq", "Tk", "H"}]
OPCHECKED = [case_of(case, torch.float32, case not in SIZED) for case in VARIED]
OPCHECKED += [
    case_of(case, dtype, dtype == torch.bfloat16)
    for case in ("all of it", "features", "raw queries", "raw, bias and lens")
    for dtype in (DTYPES[1:] if case.startswith("raw") else DTYPES[1:3])
]
RAW = [case for case in VARIED if "raw" in VARIED[case]]
GENERAL = [c for c in VARIED if c not in RAW and VARIED[c].keys() & {"C", "activation"}]


def of(*cases):
    """Those of OPCHECKED."""
    return [each for each in OPCHECKED if each.values[0] in cases]


@pytest.mark.parametrize(("case", "dtype", "traced"), OPCHECKED)
def test_opcheck_attention(case, dtype, traced):
    opcheck(ops.attention.default, *arguments(dtype, VARIED[case]), traced=traced)
    tensors, options = arguments(dtype, VARIED[case], grad=False)
    for need_weights in (False, True):
        options |= {"need_weights": need_weights, "precise": False, "narrow": need_weights}
        opcheck(ops.attention.default, tensors, options, traced=traced and case in EVERY)
    opcheck(ops.attention.recorded, tensors, options, traced=False)


@pytest.mark.parametrize(("case", "dtype", "traced"), OPCHECKED)
def test_opcheck_attention_backward(case, dtype, traced):
    tensors, options = arguments(dtype, VARIED[case], grad=False)
    context, weights, _, *projected = ops.attention.recorded(*tensors, **options)
    grads = torch.randn_like(context), torch.randn_like(weights)
    variants = [(*grads, EVERYTHING), (None, grads[1], NEED["keys"] | NEED["w_v"])]
    if case == "plain" or case in RAW:
        variants += [(grads[0], None, EVERYTHING)]
    if case == "plain":
        variants += [(*grads, NEED["queries"]), (*grads, NEED["values"]), (*grads, 0)]
    if case in GENERAL:
        variants = [(*grads, EVERYTHING), (*grads, NEED["features"]), (*grads, SOME)]
    for variant in variants:
        args = (weights, *projected, *variant, *tensors)
        opcheck(ops.attention_backward.default, args, options, traced=traced)
        if case in GENERAL or case == "plain":
            _opcheck_onto(weights, variant, tensors, options, traced)
        traced &= case in EVERY


def _opcheck_onto(weights, variant, tensors, options, traced):
    *given, needs = variant
    added = torch.ones_like(tensors[1])
    args = (weights, *given, needs & ~NEED["keys"], added, *tensors)
    opcheck(ops.attention_backward.onto, args, options, traced=traced)
    ops.attention_backward.onto(*args, **options)
    args = (weights, None, None, *given, NEED["keys"], *tensors)
    of_keys = ops.attention_backward(*args, **options)[1]
    torch.testing.assert_close(added, 1 + of_keys)


@pytest.mark.parametrize(("case", "dtype", "traced"), of(*GENERAL, "plain"))
def test_opcheck_scores(case, dtype, traced):
    sizes = {n: x for n, x in VARIED[case].items() if n not in ("lens", "mask", "p")}
    (queries, keys, _, w_v), inside = operands(dtype, **sizes)
    scored = queries, keys, w_v
    opcheck(ops.attend_scores.default, scored, inside, traced=traced)
    with torch.no_grad():
        grad = torch.randn_like(ops.attend_scores(*scored, **inside))
        for needs in (EVERYTHING & ~NEED["values"], NEED["features"], SOME):
            args = (grad, needs, *scored)
            opcheck(ops.attend_scores_backward.default, args, inside, traced=traced)
            traced &= case in EVERY


@pytest.mark.parametrize(("case", "dtype", "traced"), of(*(VARIED.keys() - {*RAW, *GENERAL})))
def test_opcheck_the_backward_in_two_parts(case, dtype, traced):
    tensors, options = arguments(dtype, VARIED[case], grad=False)
    context, weights = ops.attention(*tensors, **options)
    grads = torch.randn_like(context), torch.randn_like(weights)
    for needed in (True, False):
        args = (weights, *grads, needed, *tensors)
        first = traced and (needed or case in EVERY)
        opcheck(ops.attend_backward_queries.default, args, options, traced=first)
    args = (weights, *grads, False, *tensors)
    _, grad_scores, dropped = ops.attend_backward_queries(*args, **options)
    seen = dropped if dropped.numel() else weights
    rest = {name: x for name, x in options.items() if name not in ("seed", "dropout_p")}
    for grad_context, needs in ((grads[0], 14), (None, 14), (grads[0], 4)):
        args = (seen, grad_context, grad_scores, needs, *tensors)
        opcheck(ops.attend_backward_keys.default, args, rest, traced=traced)
        traced &= case in EVERY


@pytest.mark.parametrize("case", ["lens", "features", "raw, bias and lens", "raw, features"])
def test_only_the_gradients_asked_for_are_made(case):
    tensors, options = arguments(torch.float32, VARIED[case], grad=False)
    context, *saved = ops.attention.recorded(*tensors, **options)
    saved.pop(1)
    grads = torch.randn_like(context), torch.randn_like(saved[0])
    everything = ops.attention_backward(*saved, *grads, EVERYTHING, *tensors, **options)
    there = [name for name, x in zip(INPUTS, everything, strict=True) if x.numel()]
    assert there == [*INPUTS[:4], *(n for n in INPUTS[4:] if options.get(n) is not None)]
    for needs in range(EVERYTHING + 1):
        some = ops.attention_backward(*saved, *grads, needs, *tensors, **options)
        for bit, (one, all_) in enumerate(zip(some, everything, strict=True)):
            if needs >> bit & 1:
                assert torch.equal(one, all_)
            else:
                assert one.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_recorded_call_keeps_for_its_backward(dtype):
    # Lengths as they were, though the caller changes them; projections, which backward makes again.
    for case, kept in (("raw, bias and lens", [0, 3]), ("raw queries", [[2, 0, 5]] * 2)):
        tensors, options = arguments(dtype, VARIED[case], grad=False)
        context, weights, counts, *projected = ops.attention.recorded(*tensors, **options)
        assert counts.dtype == torch.int32
        assert counts.tolist() == kept
        for names, x, found in zip((("w_q",), ("w_k", "bias")), tensors, projected, strict=False):
            with_weight = [options[name] for name in names if name in options]
            want = torch.nn.functional.linear(x, *with_weight) if with_weight else x.new_empty(0)
            torch.testing.assert_close(found, want)
        grads = torch.randn_like(context), torch.randn_like(weights)
        want = ops.attention_backward(
            weights, *projected, *grads, EVERYTHING, *tensors, **{**options, "valid_lens": counts}
        )
        got = ops.attention_backward(weights, None, None, *grads, EVERYTHING, *tensors, **options)
        assert all(map(torch.equal, got, want))
        mask = torch.ones(2, 1, 5) > 0
        assert ops.attention.recorded(*tensors, **{**options, "mask": mask})[2].numel() == 0


def test_the_fakes_know_the_sizes_of_the_tables():
    # Right at the size where the table changes its precision.
    for elements in (FP64_CPU_ELEMENTS, FP64_CPU_ELEMENTS + 1):
        keys = torch.randn(1, elements, 1)
        real = ops.exp_keys(keys)
        fake = ops.exp_keys(keys.to("meta"))
        assert [(x.shape, x.dtype) for x in real] == [(x.shape, x.dtype) for x in fake]


def leaves():
    generator = torch.Generator().manual_seed(2)
    shapes = (2, 3, 4), (2, 5, 3), (2, 5, 2), (6, 4), (6, 3), (1, 6), (6,)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def test_gradcheck_of_a_step_with_a_location():
    # All three results; the module differentiates context and weights alone.
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 1, 3), (2, 5, 3), (2, 5, 2), (1, 3), (2, 2, 5), (4, 2, 3), (4,), (3, 4)
    inputs = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]

    def step(*tensors):
        lens = torch.tensor([2, 5])
        return ops.attend_location(*tensors, valid_lens=lens)

    assert torch.autograd.gradcheck(step, inputs)


# ---- compilation ---------------------------------------------------------------------------------


def operators_of(module, *inputs):
    """The functions that a compiled module is made of."""
    seen = []

    def keep(graph, _):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(module, fullgraph=True, backend=keep)(*inputs)
    return seen


def test_a_compiled_module_is_fused():
    module, q = bf.AdditiveAttention(4, 4, 6), torch.randn(2, 3, 4)
    assert ops.attention.default in operators_of(module, q, q, q)
    for layer in (module.W_q, module.W_k, module.w_v):  # a layer that is called, and w_v's formula
        layer.forward = lambda x, of=layer: torch.nn.functional.linear(x, 2 * of.weight)
    patched = operators_of(module, q, q, q)
    assert ops.attention.default not in patched
    assert torch.tanh in patched


@pytest.mark.parametrize("activation", ["tanh", "leaky_relu"])
def test_compiled_decoder_loop(activation):
    module = bf.AdditiveAttention(3, 4, 6, activation=activation)
    q, k, v = (x.detach().float().requires_grad_() for x in leaves()[:3])

    def call(q, k, v):
        memory = module.memory(k, v)
        steps = [module.attend(q[:, i : i + 1], memory) for i in range(3)]
        again = [module(q[:, i : i + 1], k, v) for i in range(3)]
        return torch.cat(steps, 1), torch.cat(again, 1)

    results, leaves_ = [], (q, k, v, *module.parameters())
    for one in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        outs = one(q, k, v)
        results.append([*outs, *torch.autograd.grad(outs, leaves_, [x.cos() for x in outs])])
    close(*results)


def test_no_size_is_a_guard():
    # From sizes that eager calls take in one operator to sizes that it projects through oneDNN.
    module = bf.AdditiveAttention(16, 16, 16)
    function = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for B, Tk in (2, 3), (3, 50), (64, 1100):  # none alike: torch makes a guard of that
            q, k = torch.randn(B, 5, 16, requires_grad=True), torch.randn(B, Tk, 16)
            got, want = function(q, k, k), module(q, k, k)
            close(got, want)
            got.sum().backward()


def test_lengths_and_masks_made_in_code_whose_sizes_change():
    x = [draw.detach().float() for draw in leaves()]
    mask = torch.ones(x[0].shape[0], x[1].shape[1], dtype=torch.bool).tolist()

    def call(*x):
        lens = torch.tensor([2, 1])
        return bf.additive_attention(*x[:6], lens, mask=torch.tensor(mask))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*x), call(*x))


# ---- determinism ---------------------------------------------------------------------------------


SHAPES = {
    "split": {"B": 1, "Tq": 1, "Tk": 5000, "H": 64, "Dv": 33},
    "split, few queries": {"B": 2, "Tq": 5, "Tk": 700, "H": 65, "Dv": 17},
    "many queries": {"B": 3, "Tq": 70, "Tk": 90, "H": 67, "Dv": 40},
    "decoder step": {"B": 32, "Tq": 1, "Tk": 50, "H": 128, "Dv": 128},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_bitwise_the_same_on_any_number_of_threads(shape, dtype, threads):
    first = None
    inputs, _ = operands(dtype, **SHAPES[shape])
    q, k, v, w = inputs
    lens = torch.arange(1, q.shape[0] + 1) * k.shape[1] // q.shape[0]
    for count in (1, 2, 4, 1, 3):
        threads(count)
        table, keys_max = ops.exp_keys(k.detach())
        options = {"table": table, "keys_max": keys_max, "seed": SEED, "dropout_p": 0.3}
        outs = ops.attention(q, k, v, w, valid_lens=lens, **options)[:2]
        grads = torch.autograd.grad(outs, inputs, [x.detach().cos() for x in outs])
        results = [table[..., : q.shape[2]], keys_max, *outs, *grads]
        first = first or results
        for one, other in zip(results, first, strict=True):
            assert torch.equal(one, other), count

"""What people leave out, share or add: default values, one query for all rows, causal attention."""

import copy
import random

import pytest
import torch
from beside import and_gradients, close
from contract import scattered
from thorough import every_dtype

import bahdanau_fast as bf
from bahdanau_fast.parity import allowed, error

B, TQ, TK, D, H, DV = 3, 4, 9, 5, 7, 6
LENS = torch.tensor([2, 9, 0])
DRAWN = 150  # cases of three options; 2000 take a quarter of a minute
BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])


@pytest.fixture
def attention():
    torch.compiler.reset()
    torch.manual_seed(0)
    return bf.AdditiveAttention(D, D, H, bias=True).double()


def drawn(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def weights_of(attention):
    return [layer.weight for layer in (attention.W_q, attention.W_k, attention.w_v)]


SHARED = {"(1,1,D)": (1, 1, D), "(1,Tq,D)": (1, TQ, D), "(D,)": (D,)}


@BACKENDS
@pytest.mark.parametrize("is_parameter", [True, False])
@pytest.mark.parametrize("shape", SHARED.values(), ids=SHARED)
def test_queries_of_all_rows(attention, shape, is_parameter, backend):
    q, k, v = drawn(*shape), drawn(B, TK, D, seed=2), drawn(B, TK, DV, seed=3)
    q = torch.nn.Parameter(q.detach()) if is_parameter else q
    leaves, weights = [q, k, v, *attention.parameters()], weights_of(attention)
    rows = q.expand(B, *shape[-2:])
    mask = scattered(B, TK)

    def results(queries):
        memory = attention.memory(k, v, LENS, mask=mask)
        yield attention(queries, k, v, LENS, mask=mask)
        yield attention.attention_weights
        yield attention.attend(queries, memory)
        yield attention.attend(queries, attention.memory(k, v, LENS), mask=mask)
        yield attention.scores(queries, memory)
        yield from bf.additive_attention(queries, k, v, *weights, LENS, mask=mask)
        yield bf.additive_scores(queries, k, *weights)
        yield bf.DotProductAttention()(queries, k, v, LENS)

    with bf.backends.use(backend):
        got, want = (and_gradients(list(results(x)), leaves) for x in (q, rows))
        close(got, want)
    several = [x.expand(2, *x.shape) for x in (k, v)]
    of_several = attention(q if q.dim() == 1 else q[None], *several, LENS.expand(2, B))
    close(of_several, attention(rows, k, v, LENS).expand(2, *want[0].shape))


# ---- causal, query_mask, scale, scores -----------------------------------------------------------


def plain(attention, q, k, v, **options):
    """The formula with all options: context, weights, scores."""
    rows, state = len(k), q.dim() < 3
    q = (q.unsqueeze(-2) if state else q).expand(rows, -1, -1)
    hidden = attention.W_q(q).unsqueeze(2) + (attention.W_k(k) + attention.bias).unsqueeze(1)
    scores = attention.w_v(torch.tanh(hidden)).squeeze(-1) * options.get("scale", 1.0)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if (lens := options.get("valid_lens")) is not None:
        seen &= torch.arange(k.shape[1]) < lens.view(rows, -1, 1)
    if (mask := options.get("mask")) is not None:
        seen &= mask.unsqueeze(1) if mask.shape == k.shape[:2] else mask
    if options.get("causal"):
        seen &= torch.arange(k.shape[1]) <= torch.arange(q.shape[1])[:, None]
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0).softmax(-1)
    context = weights @ v
    if (wanted := options.get("query_mask")) is not None:
        factor = wanted.view(rows, -1, 1).to(weights.dtype)
        context, weights = context * factor, weights * factor
    results = context, weights, scores
    return [x.squeeze(1) for x in results] if state else list(results)


QUERY_MASK = scattered(B, TQ, seed=5, share=0.6)
OPTIONS = {
    "causal": {"causal": True},
    "causal with a mask": {"causal": True, "mask": scattered(B, TK), "valid_lens": LENS},
    "query_mask": {"query_mask": QUERY_MASK, "valid_lens": LENS},
    "scale": {"scale": -1.7, "mask": scattered(TQ, TK)},
    "all": {"causal": True, "query_mask": QUERY_MASK, "scale": 0.3},
}


def of_function(attention, q, k, v, **options):
    lens = options.pop("valid_lens", None)
    given = (q, k, v, *weights_of(attention), lens)
    return bf.additive_attention(*given, bias=attention.bias, **options)


def of_module(attention, q, k, v, **options):
    return attention(q, k, v, **options), attention.attention_weights


def of_memory(attention, q, k, v, valid_lens=None, **options):
    context = attention.attend(q, attention.memory(k, v, valid_lens), **options)
    return context, attention.attention_weights


def with_scores(attention, q, k, v, valid_lens=None, **options):
    memory = attention.memory(k, v, valid_lens)
    context, scores = attention.attend(q, memory, return_scores=True, **options)
    return context, attention.attention_weights, scores


@pytest.mark.parametrize("way", [of_function, of_module, of_memory, with_scores])
@pytest.mark.parametrize(
    ("options", "dtype", "backend"), every_dtype(OPTIONS, ["auto", "reference"])
)
def test_options_keep_the_parity_rule(attention, options, dtype, way, backend):
    options = OPTIONS[options]
    if "causal" in options and way in (of_memory, with_scores):
        options = {**options, "mask": torch.ones(1, TQ, TK, dtype=torch.bool).tril()}
        del options["causal"]
    attention.to(dtype)
    leaves = [drawn(B, n, size, seed=n + size) for n, size in ((TQ, D), (TK, D), (TK, DV))]
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]

    def run(call, module, tensors):
        results = list(call(module, *tensors, **options))[: 3 if way is with_scores else 2]
        found = and_gradients(results, [*tensors, *module.parameters()])
        return [x.detach() for x in found]

    eager = run(plain, attention, leaves)
    exact = run(
        plain,
        copy.deepcopy(attention).double(),
        [x.detach().double().requires_grad_() for x in leaves],
    )
    with bf.backends.use(backend):
        got = run(way, attention, leaves)
    for ours, others, true in zip(got, eager, exact, strict=True):
        assert ours.dtype == dtype
        # fp64 is measured by itself: 64 roundings of the largest.
        size = float(true.abs().max()) * (64 if dtype == torch.float64 else 1)
        assert error(ours, true) <= allowed(error(others, true), size, dtype)
    if "query_mask" in options:
        assert not got[0][~QUERY_MASK].any()
        assert not got[1][~QUERY_MASK].any()
        assert way is with_scores or not got[-7][~QUERY_MASK].any()  # scores have a gradient


def test_layers_and_dropout_that_are_called(attention):
    """A scoring layer with a hook, a dropout with one: options go around both."""
    q, k, v = drawn(B, TQ, D), drawn(B, TK, D, seed=2), drawn(B, TK, DV, seed=3)
    options = {"scale": 1.5, "query_mask": QUERY_MASK, "mask": scattered(TQ, TK)}
    want = plain(attention, q, k, v, **options)
    attention.w_v.register_forward_hook(lambda layer, inputs, result: 2 * result)
    half = {**options, "scale": 0.75}
    close(list(with_scores(attention, q, k, v, **half)), want)
    close(list(of_module(attention, q, k, v, **half)), want[:2])
    attention.dropout.register_forward_hook(lambda layer, inputs, result: 3 * result)
    close(with_scores(attention, q, k, v, **half)[0], 3 * want[0])


@BACKENDS
@pytest.mark.parametrize("clip", [None, 2.0])
def test_masked_scores(attention, clip, backend):
    q, k = drawn(B, TQ, D), drawn(B, TK, D, seed=2)
    memory = attention.memory(k, valid_lens=LENS, mask=scattered(B, TK))
    seen = scattered(B, TK) & (torch.arange(TK) < LENS[:, None])
    with bf.backends.use(backend):
        free, masked = (attention.scores(q, memory, clip, masked=m) for m in (False, True))
    close(masked, free.masked_fill(~seen.unsqueeze(1), -torch.inf))
    of_state = attention.scores(q[:, 0], memory, clip, masked=True)
    close(of_state, masked[:, 0])
    unmasked = attention.memory(k)
    close(attention.scores(q, unmasked, masked=True), attention.scores(q, unmasked))


# ---- any three of them ---------------------------------------------------------------------------


def drawn_case(number):
    """A way to call, its inputs and three options, drawn by a number."""
    draw = random.Random(number)
    rows, length = draw.randint(2, 4), draw.choice([2, 3, 9, 17])
    queries_len = draw.choice([n for n in (1, 2, 3, 5) if n != rows])
    way = draw.choice([of_function, of_module, of_memory, with_scores])
    names = ["lens", "mask", "query_mask", "scale", "shared", "tied", "state"]
    names += ["causal"] * (way in (of_function, of_module))
    chosen = draw.sample(names, 3)
    queries_len = 1 if "state" in chosen else queries_len
    q = drawn(rows, queries_len, D, seed=number)
    if "shared" in chosen:
        q = drawn(1, queries_len, D, seed=number)
    if "state" in chosen:
        q = (q[0, 0] if "shared" in chosen else q[:, 0]).detach().requires_grad_()
    k, v = drawn(rows, length, D, seed=number + 1), drawn(rows, length, DV, seed=number + 2)
    forms = [(rows, length), (rows, 1, 1), (1, 1, length), (rows, queries_len, 1), (1, length)]
    forms += [(queries_len, length), (1, queries_len, length)]
    per_query = (rows, queries_len) if "state" not in chosen else (rows,)
    every = {
        "lens": {"valid_lens": torch.tensor([draw.randint(0, length) for _ in range(rows)])},
        "mask": {"mask": scattered(*draw.choice(forms), seed=number, share=0.6)},
        "query_mask": {"query_mask": scattered(*per_query, seed=number, share=0.6)},
        "scale": {"scale": draw.uniform(-2, 2)},
        "causal": {"causal": True},
    }
    options = {}
    for name in chosen:
        options |= every.get(name, {})
    return way, [q, k] if "tied" in chosen else [q, k, v], options


@BACKENDS
def test_drawn_options(attention, backend):
    for number in range(backend == "auto", DRAWN, 2):
        way, leaves, options = drawn_case(number)
        more = [*leaves, *attention.parameters()]
        tied = [None] * (3 - len(leaves))
        with bf.backends.use(backend):
            got = and_gradients(list(way(attention, *leaves, *tied, **options)), more)
        want = plain(attention, *leaves, *leaves[1:2] * len(tied), **options)
        want = and_gradients(want[: len(got) - len(more)], more)
        try:
            close(got, want)
        except AssertionError as failed:
            raise AssertionError(f"case {number}: {way.__name__}, {options}") from failed


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_that_change_in_compiled_code(attention, dynamic):
    q, k = drawn(B, TQ, D), drawn(B, TK, D)
    activation = {"activation": "leaky_relu"}

    def called(number):
        by_function = bf.additive_attention(
            q, k, None, *weights_of(attention), **activation, negative_slope=number
        )
        return [attention(q, k, scale=number), *by_function]

    compiled = torch.compile(called, backend="eager", dynamic=dynamic, fullgraph=True)
    for number in (0.5, 0.25, 2.0):
        close(compiled(number), called(number))

"""bf.AttentionPooling: parity by chunks and without, memory, models of others, what torch does."""

from itertools import accumulate, product

import pytest
import torch
from beside import as_exact
from contract import scattered
from opchecked import opcheck
from parity import DTYPES, judged, keep_the_rule, moved
from profiled import allocated, counts
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast.backends import cpu
from bahdanau_fast.ops import pool_in_chunks

B, TK, D, H = 3, 37, 6, 5
LENS = torch.tensor([300, 0, 12])
FORMS = {
    "plain": {},
    "gated": {"gated": True},
    "gated, heads, no bias": {"gated": True, "heads": 3, "bias": False},
    "heads, statistics": {"heads": 2, "statistics": True},
    "gated, statistics": {"gated": True, "statistics": True},
}
ALL = 1 << 40
CHUNKS = {"MOST_POOLED": -1, "PLAIN": 0, "CHUNK": 16 * H}
# The limits that make small calls go each way. Of chunks those whose activations are not remembered
# compute them again: half of them, or fewer.
WAYS = {
    "chunks, half": {**CHUNKS, "REMEMBERED": 0},
    "chunks, all": {**CHUNKS, "REMEMBERED": ALL},
    "operations": {"MOST_POOLED": -1},
    "operations in training": {"LEAST_POOLED_TO_TRAIN": ALL},
    "one operator": {"LEAST_POOLED_TO_TRAIN": 0, "POOLED_WORK_TO_TRAIN": ALL},
    "projected": {
        "LEAST_POOLED_TO_TRAIN": 0,
        "ONE_OPERATOR_WORK": 0,
        "POOLED_WORK_TO_TRAIN": 0,
    },
}


PARAMETERS = ("V.weight", "V.bias", "U.weight", "U.bias", "w.weight", "w.bias")


@pytest.fixture
def go(monkeypatch):
    """Makes calls go one of WAYS."""

    def this(way):
        for name, size in WAYS[way].items():
            monkeypatch.setattr(cpu if hasattr(cpu, name) else pool_in_chunks, name, size)

    return this


@pytest.fixture(params=["chunks, half", "one operator", "projected"])
def each_way(request, go):
    """One after the other, for what all ways have to do."""
    go(request.param)


@pytest.fixture
def chunks(go):
    """Several chunks for the smallest of calls; the last one has fewer rows."""
    go("chunks, half")


def made(keys_len=TK, hidden=H, **form):
    torch.manual_seed(0)
    module = bf.AttentionPooling(D, hidden, dtype=torch.float64, **form)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module, torch.randn(B, keys_len, D, dtype=torch.float64)


def plain(module, keys, lens=None, mask=None, values=None):
    """The formula; result, weights and raw scores."""
    hidden = torch.tanh(module.V(keys))
    if module.U is not None:
        hidden = hidden * torch.sigmoid(module.U(keys))
    scores = module.w(hidden).transpose(1, 2)
    weights = bf.masked_softmax(scores, lens, mask=mask)
    values = keys if values is None else values
    pooled = weights @ values
    if module.statistics:
        variance = weights @ values.square() - pooled.square()
        pooled = torch.cat((pooled, variance.clamp(min=1e-7).sqrt()), -1)
    return pooled.squeeze(1) if module.heads == 1 else pooled, weights, scores


def close(ours, exact):
    """Some hundred roundings of fp64."""
    torch.testing.assert_close(list(ours), list(exact), rtol=2.0**-40, atol=2.0**-40)


def results(function, module, drawn, dtype):
    """Results and gradients, as arrays of fp64."""
    module = module.to(dtype)
    keys = drawn[0].to(dtype).requires_grad_()
    results = function(module, keys)
    assert {x.dtype for x in results} == {dtype}
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    named = {"keys": keys, **dict(module.named_parameters())}
    got = torch.autograd.grad(results, [*named.values()], [g.to(dtype) for g in grads])
    names = [*("pooled", "weights", "scores")[: len(results)], *(f"d {name}" for name in named)]
    return {n: x.detach().double().numpy() for n, x in zip(names, [*results, *got], strict=True)}


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_batch(way, go):
    go(way)
    module, keys = made(heads=3, gated=True)
    pooled = module(keys[:0].requires_grad_())
    pooled.sum().backward()
    assert pooled.shape == (0, 3, D)
    assert module(keys[0, :0]).eq(torch.zeros(3, D)).all()  # an empty bag
    assert all(parameter.grad.eq(0).all() for parameter in module.parameters())


ANY = ("chunks, half", "chunks, all", "operations")  # statistics, too
# More units than a vector has, more keys than a task takes, more heads than a block of them.
MANY = {"keys_len": 300, "hidden": 70}
LARGER = {"plain, larger": MANY, "gated, 18 heads, larger": {**MANY, "gated": True, "heads": 18}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("way", "form"),
    [
        *((way, form) for way, form in product(WAYS, FORMS) if way in ANY or "stat" not in form),
        *product(["one operator", "projected"], LARGER),
    ],
)
def test_parity(way, form, dtype, go):
    go(way)
    module, keys = made(**(FORMS | LARGER)[form])
    module, keys = module.to(dtype).double(), keys.to(dtype).double()
    with_scores = "chunks" in way or way == "operations"  # else operations are the way
    masked = () if way == "operations in training" else (LENS, scattered(*keys.shape[:2]))

    def ours(module, keys):
        lens, mask = masked or (None, None)
        result = module(keys, lens, mask=mask, return_scores=with_scores)
        return result if with_scores else (result, module.attention_weights)

    def theirs(drawn, dtype):
        got = results(
            lambda *x: plain(*x, *masked)[: 3 if with_scores else 2], module, drawn, dtype
        )
        module.double()
        return got

    def near(seed):
        return [moved(keys, dtype, torch.Generator().manual_seed(seed))]

    got = results(ours, module, [keys], dtype)
    module.double()
    if dtype is torch.float64:  # its own oracle: some hundred roundings
        for name, exact in theirs([keys], dtype).items():
            assert abs(got[name] - exact).max() <= 2.0**-44 * max(1.0, abs(exact).max()), name
    else:
        keep_the_rule(judged(got, theirs, [keys], near, dtype), form)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form, each_way):
    module, keys = made(**FORMS[form])
    keys = keys[:2, :6].requires_grad_()

    def function(keys, *_):
        return module(keys, torch.tensor([6, 4])), module.attention_weights

    inputs = (keys, *module.parameters())
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("needs", ["weights", "keys", "both", "one weight"])
def test_gradients_as_needed(needs, each_way):
    module, keys = made(gated=True)
    keys.requires_grad_(needs in ("keys", "both"))
    module.requires_grad_(needs in ("weights", "both"))
    module.U.weight.requires_grad_(needs != "keys")
    asked = [x for x in (keys, *module.parameters()) if x.requires_grad]
    seed = torch.randn(B, D, dtype=torch.float64)
    ours = torch.autograd.grad(module(keys, LENS), asked, seed)
    close(ours, torch.autograd.grad(plain(module, keys, LENS)[0], asked, seed))


def test_backward_twice_and_vectorized(each_way):
    module, keys = made(**FORMS["gated"])
    inputs = keys.requires_grad_(), *module.parameters()
    pooled, seeds = module(keys, LENS), torch.randn(2, B, D, dtype=torch.float64)
    one_by_one = [torch.autograd.grad(pooled, inputs, x, retain_graph=True) for x in seeds]
    exact = plain(module, keys, LENS)[0]
    for got, seed in zip(one_by_one, seeds, strict=True):
        close(got, torch.autograd.grad(exact, inputs, seed, retain_graph=True))
    vectorized = torch.autograd.grad(pooled, inputs, seeds, is_grads_batched=True)
    close(vectorized, map(torch.stack, zip(*one_by_one, strict=True)))
    assert not any(x.requires_grad for x in vectorized)


@pytest.mark.parametrize("with_keys", [False, True], ids=["of weights", "of keys, too"])
@pytest.mark.parametrize("form", ["plain", "gated"])
def test_memory(form, with_keys, monkeypatch):
    rows, hidden, size = 4096, 256, 16
    monkeypatch.setattr(cpu, "MOST_POOLED", -1)
    monkeypatch.setattr(pool_in_chunks, "CHUNK", 1 << 15)
    monkeypatch.setattr(pool_in_chunks, "REMEMBERED", 0)
    module = bf.AttentionPooling(size, hidden, **FORMS[form])
    keys = torch.randn(1, rows, size, requires_grad=with_keys)

    def peak(function):
        def step():
            function(keys).sum().backward()
            module.zero_grad()
            keys.grad = None

        step()
        return max(accumulate(allocated(step)))

    assert peak(module) <= peak(lambda keys: plain(module, keys)[0]) / 4


def test_gradients_of_keys_are_one_tensor(monkeypatch):
    """The part of the weighted sum is added to, not added up beside another."""
    monkeypatch.setattr(cpu, "MOST_POOLED", -1)
    monkeypatch.setattr(pool_in_chunks, "PLAIN", 0)
    module, keys = bf.AttentionPooling(64, 2), torch.randn(1, 4096, 64, requires_grad=True)
    loss = module(keys).sum()
    large = [size for size in allocated(loss.backward) if size >= 4 * keys.numel()]
    assert len(large) == 1


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_shapes(batch, heads, each_way):
    module, _ = made(heads=heads, gated=True)
    keys, values = torch.randn(*batch, TK, D).double(), torch.randn(*batch, TK, 4).double()
    lens = torch.randint(1, TK, batch)
    mask = torch.rand(*batch, heads, TK) < 0.7
    pooled, weights, scores = module(keys, lens, values=values, mask=mask, return_scores=True)
    flat = [x.reshape(-1, *x.shape[len(batch) :]) for x in (keys, lens, mask, values)]
    exact = plain(module, *flat)
    assert pooled.shape == (*batch, *([heads] if heads > 1 else []), 4)
    assert scores.shape == weights.shape == (*batch, heads, TK)
    got = [x.reshape(y.shape) for x, y in zip((pooled, weights, scores), exact, strict=True)]
    close(got, exact)
    assert torch.equal(module.attention_weights, weights)
    assert torch.equal(module.scores(keys), scores)
    alone = module(keys, lens, values=values, mask=mask)
    assert alone.shape == pooled.shape
    close([alone, module.attention_weights], [pooled, weights])


@pytest.mark.parametrize("name", ["keys", *PARAMETERS])
def test_what_is_no_number_reaches_the_result(name, each_way):
    module, keys = made(gated=True)
    tensor = keys if name == "keys" else module.get_parameter(name).data
    tensor.view(-1)[0] = torch.nan
    assert module(keys).isnan().flatten(1).all(1)[0]


def test_deviations_far_from_zero():
    """They are those of centered keys, which E[x^2] - E[x]^2 would round to nothing."""
    module, keys = made(statistics=True, bias=False)
    module, keys = module.float(), keys.float()
    nn.init.zeros_(module.w.weight)
    deviation = module(keys + 4096.0)[:, D:].detach()
    exact = keys.double().std(1, correction=0)
    assert float((deviation - exact).abs().max()) < 2.0**-10


def gradients(call, module, keys):
    pooled = call(keys, LENS[: len(keys)])
    return pooled, *torch.autograd.grad(pooled.square().sum(), [keys, *module.parameters()])


def test_compiled_for_any_length(chunks):
    module, keys = made(**FORMS["gated"])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (TK, 20):
        some = keys[:, :rows].requires_grad_()
        exact = gradients(module, module, some)
        close(gradients(compiled, module, some), exact)


def test_exported(chunks):
    module, keys = made(**FORMS["gated"])
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(module, (keys,), dynamic_shapes=({1: length},))
    taken_apart = program.run_decompositions(bf.decompositions.TABLE)
    assert "pooling_scores" in str(program.graph)
    assert "pooling_scores" not in str(taken_apart.graph)
    keys = torch.randn(B, 50, D, dtype=torch.float64)
    for each in (program, taken_apart):
        torch.testing.assert_close(each.module()(keys), module(keys))


@pytest.mark.parametrize("form", ["gated", "heads, statistics"])
@pytest.mark.parametrize("way", ["chunks, half", "operations", "projected"])
def test_under_autocast(way, form, go):
    go(way)
    module, keys = made(**FORMS[form])
    module, keys = module.float(), keys.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = (
            gradients(module, module, keys),
            gradients(lambda *x: plain(module, *x)[0], module, keys),
        )
    assert ours[0].dtype is torch.bfloat16
    eager = [x.to(o.dtype) for x, o in zip(eager, ours, strict=True)]
    double = keys.detach().double().requires_grad_()
    exact = gradients(module.double(), module, double)
    for a, b, c in zip(ours, eager, exact, strict=True):
        as_exact([a.bfloat16()], [b.bfloat16()], [c], torch.bfloat16)


@pytest.mark.parametrize("batch", [(), (B,), (1, B)], ids=str)
@pytest.mark.parametrize("form", ["plain", "heads, statistics"])
def test_weights_are_on_the_way_to_the_result(form, batch, each_way):
    module, keys = made(dropout=0.5, **FORMS[form])
    keys = keys.view(*batch, TK, D) if batch else keys[0]
    torch.manual_seed(1)
    pooled = module(keys)[..., :D]  # the means
    weights = module.attention_weights
    (grad,) = torch.autograd.grad(pooled.sum(), weights)
    assert 0 < int((grad == 0.0).sum()) < grad.numel()  # of those that were dropped
    close([(weights * grad).sum()], [pooled.sum()])


def test_a_changed_layer_is_called(each_way):
    module, keys = made(**FORMS["gated"])
    module.U.register_forward_hook(lambda *_: torch.zeros(B, TK, H, dtype=torch.float64))
    exact = plain(module, keys)
    close(module(keys, return_scores=True), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated, dtype):
    module, keys = made(gated=gated, heads=2)
    parameters = [
        p
        for layer in (module.V, module.U, module.w)
        for p in ((None, None) if layer is None else (layer.weight, layer.bias))
    ]
    given = [None if x is None else x.detach().to(dtype) for x in (keys, *parameters)]
    operator, backward = (
        torch.ops.bahdanau_fast.pooling_scores.default,
        torch.ops.bahdanau_fast.pooling_scores_backward.default,
    )
    grad = torch.randn(B, 2, TK).to(torch.promote_types(dtype, torch.float32))
    for needs in (0b0000001, 0b1100110, 0b1111111):
        opcheck(backward, (grad, *given, needs), traced=False)
    leaves = [None if x is None else x.requires_grad_() for x in given]
    opcheck(operator, leaves, traced=gated and dtype is torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("raw", [False, True], ids=["projected", "raw"])
def test_opcheck_of_one_operator(raw, dtype):
    module, keys = made(gated=True, heads=2)
    keys, V, b, U, c, w, d = (
        x.detach().to(dtype) for x in (keys, *map(module.get_parameter, PARAMETERS))
    )
    names = torch.ops.bahdanau_fast
    seed, layers, gate = torch.tensor([3]), (V, b, U, c), None
    values, inner = torch.randn(B, TK, 4).to(dtype), keys
    if not raw:
        inner, gate = (torch.randn(B, TK, H).to(dtype) for _ in range(2))
        layers = (None,) * 4
    inputs = [inner, w, values, d, gate, *layers]
    rest = LENS, None, seed, 0.5
    pooled, weights, _, *sums = names.pool.recorded(*inputs, *rest)
    grads = torch.randn_like(pooled), torch.randn_like(weights)
    for needs in (0b000000001, 0b011101010, 0b111111111):
        call = (weights, *sums, *grads, needs, *inputs, *rest)
        opcheck(names.pool_backward.default, call, traced=False)
    leaves = [None if x is None else x.requires_grad_() for x in inputs]
    opcheck(names.pool.default, (*leaves, *rest), traced=raw and dtype is torch.float32)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_statistics_of_dropped_weights(heads, inplace):
    keys = torch.randn(B, TK, D) + 10.0
    module = bf.AttentionPooling(D, H, heads, statistics=True, dropout=0.5)
    module.dropout.inplace = inplace
    torch.manual_seed(3)
    pooled = module(keys).view(B, heads, 2 * D)
    torch.manual_seed(3)
    weights = torch.nn.functional.dropout(module.attention_weights, 0.5)
    mean = weights @ keys
    deviation = (weights @ keys.square() - mean.square()).clamp(min=1e-7).sqrt()
    torch.testing.assert_close(pooled, torch.cat((mean, deviation), -1))


@pytest.mark.parametrize("changed", ["keys", *PARAMETERS])
@pytest.mark.parametrize("way", ["one operator", "projected"])
def test_in_place_changes_before_backward(way, changed, go):
    """They are refused, or change nothing, as in plain code."""
    go(way)
    module, keys = made(gated=True)
    inputs = {"keys": keys.requires_grad_(), **dict(module.named_parameters())}

    def grads(pooled):
        loss, tensor = pooled.square().sum(), inputs[changed].detach()
        before, _ = tensor.clone(), tensor.mul_(2.0)
        try:
            return torch.autograd.grad(loss, list(inputs.values()))
        except RuntimeError as error:
            return str(error).partition(":")[0]
        finally:
            tensor.copy_(before)

    ours, theirs = grads(module(keys)), grads(plain(module, keys)[0])
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        close(ours, theirs)


def test_what_another_backend_is_to_serve_is_not_one_operator(go):
    go("one operator")
    module, keys = made(**FORMS["gated"])
    assert "pool" in counts(lambda: module(keys))
    with bf.backends.use("reference"):
        assert not counts(lambda: module(keys))


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("layer", ["U", "w"])
@pytest.mark.parametrize("way", ["chunks, half", "operations", "one operator"])
def test_layers_of_two_dtypes_are_refused(way, layer, statistics, go):
    go(way)
    module, keys = made(gated=True, statistics=statistics)
    module.get_submodule(layer).float()
    with pytest.raises(RuntimeError, match="dtype"):
        module(keys)


@pytest.mark.parametrize("training", [False, True])
def test_integers_are_refused_under_autocast(training):
    module = bf.AttentionPooling(D, H).train(training).requires_grad_(training)
    with torch.autocast("cpu"), pytest.raises(TypeError, match="keys must be float32"):
        module(torch.ones(B, TK, D, dtype=torch.long))


def test_what_does_not_fit_together_is_refused_by_the_operator():
    names, (module, keys) = torch.ops.bahdanau_fast, made()
    w_v, w = module.w.weight.detach(), module.V.weight.detach()
    with pytest.raises(RuntimeError, match="b and w_gate with w"):
        names.pool(keys, w_v, keys, w_gate=w)
    few = keys[:, :2]
    _, weights, _, projected, _ = names.pool.recorded(few, w_v, few, w=w)
    with pytest.raises(RuntimeError, match="projected_keys must be those"):
        names.pool_backward(weights, projected, None, few[:, :1], None, 32, keys, w_v, few, w=w)

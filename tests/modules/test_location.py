"""bf.LocationAttention: parity over several steps, gradients through earlier ones."""

import pytest
import torch
from beside import as_exact
from contract import scattered
from opchecked import opcheck
from parity import DTYPES, judged, keep_the_rule, moved
from profiled import allocated
from thorough import every_dtype
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast import parity, reference

BACKENDS = [name for name in ("cpu", "reference") if name in bf.backends.available()]
LENS = torch.tensor([37, 0, 12])
# Rows in fp32 are computed in fp32 from 196 608 elements on, smaller ones in fp64.
FORMS = {
    "one channel in": {},
    "two channels in": {"inputs": 2, "channels": 6, "kernel_size": 5},
    "many channels": {"channels": 33, "kernel_size": 1},
    "coverage": {"channels": None},
    "no bias": {"bias": False},
    "a convolution with a bias": {"channels": 10, "conv_bias": True},
    "in fp32": {"num_hiddens": 300, "batch": 20, "keys_len": 90},
    "longer than the keys": {"kernel_size": 101},
    "one tap of odd strides": {"kernel_size": 1, "inputs": 2, "strides": (2, 1, 2)},
    "masked": {"mask": scattered(3, 37)},
    "a mask of a query": {"mask": scattered(3, 1, 37, seed=1)},
    "a mask in fp32": {
        **{"num_hiddens": 300, "batch": 20, "keys_len": 90},
        "mask": scattered(20, 90, share=0.03),
    },
    "leaky_relu": {"activation": "leaky_relu", "negative_slope": 0.2},
    "sigmoid inside": {"activation": "sigmoid", "inputs": 2},
    "sigmoid weights": {"normalize": "sigmoid"},
    "forward": {"normalize": "forward", "activation": "sigmoid"},
    "stepwise": {"normalize": "stepwise", "mask": scattered(3, 37)},
    "stepwise in fp32": {"normalize": "stepwise", "num_hiddens": 300, "batch": 20, "keys_len": 90},
    "a window": {"window": (1, 4)},
    "a window of forward weights": {"normalize": "forward", "window": (2, 3)},
}


def plain_weights(how, scores, previous, seen):
    """The formulas of the papers, with nothing beside them."""
    before = torch.cat((torch.zeros_like(previous[..., :1]), previous[..., :-1]), 2)
    if how == "stepwise":
        p = scores.sigmoid()
        p_before = torch.cat((torch.zeros_like(p[..., :1]), p[..., :-1]), 2)
        return (previous * p + before * (1 - p_before)) * seen
    if how == "sigmoid":
        weights = scores.sigmoid() * seen
        nothing = ~seen.any(2, keepdim=True)
        return (weights + nothing) / (weights + nothing).sum(2, keepdim=True)
    softmax = reference.masked_softmax(scores, mask=seen)
    if how == "softmax":
        return softmax
    moved = (previous + before) * softmax
    return moved / moved.sum(2, keepdim=True)


class Plain:
    """The formula, step by step in plain PyTorch, on the parameters of a module."""

    def __init__(self, of):
        self.of, self.normalize = of, of.normalize

    def memory(self, *inputs, mask):
        return *inputs, mask

    def attend(self, queries, memory, location, previous=None, window=None):
        of, (keys, values, lens, mask) = self.of, memory
        features = location if of.conv is None else of.conv(location)
        inner = of.W_k(keys) + of.W_f(features.transpose(1, 2))
        if of.bias is not None:
            inner = inner + of.bias
        inside = reference.ScoreTerms(None, None, of.activation, of.negative_slope)
        scores = reference.projected_scores(of.W_q(queries), inner, of.w_v.weight, inside)
        if previous is None:
            previous = torch.zeros_like(scores)
            previous[..., 0] = 1
        seen, visible = (
            torch.ones_like(scores, dtype=torch.bool),
            reference.visible(lens, mask, keys.shape[1]),
        )
        seen = seen if visible is None else seen & visible
        if window is not None:
            far = torch.arange(keys.shape[1]) - previous.argmax(2, keepdim=True)
            seen = seen & (far >= -window[0]) & (far <= window[1])
        self.attention_weights = plain_weights(of.normalize, scores, previous, seen)
        return self.attention_weights @ values


def made(batch=3, keys_len=37, num_hiddens=17, conv_bias=False, strides=None, **form):
    """A module, and keys, values, queries of three steps and the first location, in fp64."""
    form = {"channels": 4, "kernel_size": 7, **form}
    torch.manual_seed(0)
    module = bf.LocationAttention(6, 5, num_hiddens, dtype=torch.float64, **form)
    if conv_bias:  # a layer of the user's own
        module.conv.bias = nn.Parameter(torch.empty(form["channels"], dtype=torch.float64))
    if strides:
        weight = module.conv.weight.detach()
        module.conv.weight = nn.Parameter(torch.empty_strided(weight.shape, strides).to(weight))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    keys, values = torch.randn(batch, keys_len, 6), torch.randn(batch, keys_len, 4)
    location = torch.rand(batch, form.get("inputs", 1), keys_len) / keys_len
    return module, [keys, values, torch.randn(3, batch, 1, 5), location]


def followed(module, memory, queries, location, window=None):
    """Contexts of three steps, each seeing the weights of those before, and the last weights."""
    contexts, weights = [], None
    for query in queries:
        moves = {"previous": weights, "window": window}
        moves = moves if window or module.normalize != "softmax" else {}
        contexts.append(module.attend(query, memory, location, **moves))
        weights = module.attention_weights
        if location.shape[1] == 2:
            location = torch.cat((weights, location[:, 1:] + weights), 1)
        else:
            location = weights
    return torch.cat(contexts, 1), weights


def steps(module, drawn, dtype, plain, mask=None, window=None):
    """Results and gradients, as arrays of fp64."""
    module = module.to(dtype)
    inputs = [x.to(dtype).requires_grad_() for x in drawn]
    keys, values, queries, location = inputs
    attention = Plain(module) if plain else module
    memory = attention.memory(keys, values, LENS.repeat(7)[: len(keys)], mask=mask)
    results = followed(attention, memory, queries, location, window)
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    assert {x.dtype for x in results} == {dtype}
    named = dict(module.named_parameters())
    found = torch.autograd.grad(results, [*inputs, *named.values()], [g.to(dtype) for g in grads])
    names = ["context", "weights", "d keys", "d values", "d queries", "d location", *named]
    return {n: x.detach().double().numpy() for n, x in zip(names, [*results, *found], strict=True)}


@pytest.mark.parametrize(("form", "dtype", "backend"), every_dtype(FORMS, BACKENDS))
def test_steps(form, dtype, backend):
    given = dict(FORMS[form])
    looks = {"mask": given.pop("mask", None), "window": given.pop("window", None)}
    module, drawn = made(**given)
    # Values that the dtype holds.
    module, drawn = module.to(dtype).double(), [x.to(dtype).double() for x in drawn]

    def plain(drawn, dtype):
        found = steps(module, drawn, dtype, plain=True, **looks)
        module.double()
        return found

    def near(seed):
        generator = torch.Generator().manual_seed(seed)
        return [moved(x, dtype, generator) for x in drawn]

    with bf.backends.use(backend):
        ours = steps(module, drawn, dtype, plain=False, **looks)
    module.double()
    keep_the_rule(judged(ours, plain, drawn, near, dtype), form)


@pytest.mark.parametrize("form", ["two channels in", "coverage", "sigmoid inside", "forward"])
def test_several_queries_and_their_scores(form):
    module, (keys, values, queries, location) = made(**FORMS[form])
    module, queries = module.float(), queries[:, :, 0].transpose(0, 1)
    memory, plain = module.memory(keys, values, LENS), Plain(module)
    context = module.attend(queries, memory, location)
    looked = plain.attend(queries, (keys, values, LENS, None), location)
    torch.testing.assert_close(context, looked)
    torch.testing.assert_close(module.attention_weights, plain.attention_weights)
    scores = module.scores(queries, memory, location, clip=2.0)
    every = torch.full_like(scores, 2.0)
    assert (scores.abs() <= every).all()
    if module.normalize == "softmax":
        again = reference.masked_softmax(module.scores(queries, memory, location), LENS)
        torch.testing.assert_close(again, module.attention_weights)
    state = queries[:, 0]
    one = module.attend(state, memory, location)
    torch.testing.assert_close(one, context[:, 0])
    assert module.attention_weights.shape == (3, 37)
    moves = {} if module.normalize == "softmax" else {"previous": module.attention_weights}
    compiled = torch.compile(module.attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(state, memory, location, **moves), module.attend(state, memory, location, **moves)
    )


@pytest.mark.parametrize("mask", [None, scattered(2, 5)], ids=["no mask", "mask"])
@pytest.mark.parametrize(
    "form", ["one channel in", "two channels in", "coverage", "a convolution with a bias"]
)
def test_second_derivatives(form, mask):
    module, drawn = made(batch=2, keys_len=5, num_hiddens=3, **FORMS[form])
    memory_of = [x.double().requires_grad_() for x in drawn[:2]]
    query = drawn[2][0].double().requires_grad_()
    location = drawn[3].double().requires_grad_()

    def function(keys, values, query, location, *_):
        context = module(query, keys, values, location, torch.tensor([3, 0]), mask=mask)
        return context, module.attention_weights

    inputs = (*memory_of, query, location, *module.parameters())
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_a_step_is_one_operator_and_a_projection():
    module, (keys, values, queries, location) = made()
    module = module.float()
    with torch.no_grad(), bf.backends.use("cpu"):
        memory = module.memory(keys, values, LENS)
        with torch.profiler.profile() as profile:
            module.attend(queries[0], memory, location)
    names = {e.key for e in profile.key_averages() if e.key.startswith("bahdanau_fast::")}
    # The fingerprint is that of some rows of W_k, which must be those of the memory.
    assert names == {"bahdanau_fast::attend_location", "bahdanau_fast::fingerprint"}
    assert not any("conv" in e.key for e in profile.key_averages())


@pytest.mark.skipif("cpu" not in BACKENDS, reason="operators of the C++ backend")
@pytest.mark.parametrize(
    "seen", [{"valid_lens": LENS}, {"mask": scattered(3, 1, 37)}], ids=["lens", "mask"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype, seen):
    module, (keys, values, queries, location) = made(inputs=2, conv_bias=True)
    module = module.to(dtype)
    q, k = module.W_q(queries[0].to(dtype)).detach(), module.W_k(keys.to(dtype)).detach()
    given = [q, k, values.to(dtype), module.w_v.weight.detach(), location.to(dtype)]
    layers = module.conv.weight, module.conv.bias, module.W_f.weight
    given += [x.detach() for x in layers]
    leaves = [x.requires_grad_() for x in given]
    operator = torch.ops.bahdanau_fast.attend_location.default
    opcheck(operator, leaves, seen, traced=dtype in (torch.float32, torch.bfloat16))


def gradients_of_steps(backend, frozen, again):
    """Gradients after three steps on one memory; one input may ask for none."""
    module, (keys, values, queries, location) = made(inputs=2)
    inputs = {"keys": keys, "values": values, "queries": queries, "location": location}
    inputs = {name: x.double().requires_grad_(name != frozen) for name, x in inputs.items()}
    torch.manual_seed(3)
    with bf.backends.use(backend):
        memory = module.memory(inputs["keys"], inputs["values"], LENS)
        context, weights = followed(module, memory, inputs["queries"], inputs["location"])
        if again:
            context[:, :1].sum().backward(retain_graph=True)
            context[:, 1:].square().sum().backward(retain_graph=True)
        (context.square().sum() + weights.square().sum()).backward()
    return {n: x.grad for n, x in [*inputs.items(), *module.named_parameters()] if x.requires_grad}


@pytest.mark.skipif("cpu" not in BACKENDS, reason="operators of the C++ backend")
@pytest.mark.parametrize("again", [False, True], ids=["one backward", "three"])
@pytest.mark.parametrize("frozen", [None, "keys", "values", "location"])
def test_gradients_of_steps_add_up(frozen, again):
    ours = gradients_of_steps("cpu", frozen, again)
    for name, exact in gradients_of_steps("reference", frozen, again).items():
        # Some hundred roundings of fp64.
        assert parity.error(ours[name], exact) <= 2.0**-44 * float(exact.abs().max()), name


@pytest.mark.skipif("cpu" not in BACKENDS, reason="operators of the C++ backend")
def test_dropout():
    module, (keys, values, queries, location) = made(dropout=0.5)
    values = values.double().requires_grad_()
    memory = module.memory(keys.double(), values)
    context = module.attend(queries[0].double(), memory, location.double())
    gradient = torch.autograd.grad(context.sum(), values)[0]
    # The context is linear in the values.
    assert parity.error((gradient * values).sum(1, keepdim=True), context) <= 2.0**-48
    found = []
    for training in (True, True, False):
        module.train(training)
        torch.manual_seed(3)
        found.append(module.attend(queries[0].double(), memory, location.double()))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


@pytest.mark.skipif("cpu" not in BACKENDS, reason="operators of the C++ backend")
def test_steps_add_no_gradient_of_the_size_of_the_keys():
    def large(steps):
        module, (keys, values, queries, location) = made(batch=2, keys_len=50, num_hiddens=64)
        keys, values = keys.double().requires_grad_(), values.double().requires_grad_()
        memory = module.memory(keys, values)
        each = [q.double() for q in queries.repeat(2, 1, 1, 1)[:steps]]
        contexts = [module.attend(q, memory, location.double()) for q in each]
        loss = torch.cat(contexts, 1).sum()
        return sum(size >= 8 * 2 * 50 * 64 for size in allocated(loss.backward))

    assert 1 <= large(2) == large(5)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="operators of the C++ backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps", [1, 7, 101])
def test_gradients_of_the_convolution(taps, dtype):
    torch.manual_seed(0)
    location, w = torch.randn(3, 2, 37).to(dtype), torch.randn(5, 2, taps).to(dtype)
    grad = torch.randn(3, 37, 5).to(dtype)
    backward = torch.ops.bahdanau_fast.convolution_backward.default
    opcheck(backward, (grad, location, w, 3), traced=taps == 7)

    def theirs(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (location, w)]
        features = torch.conv1d(*inputs, padding=taps // 2).transpose(1, 2)
        return torch.autograd.grad(features, inputs, grad.to(dtype))

    found = backward(grad, location, w, 3)
    for ours, eager, exact in zip(found, theirs(dtype), theirs(torch.float64), strict=True):
        # fp64 is its own oracle: the roundings of as many terms as there are.
        slack = 2.0**-45 * float(exact.abs().max()) if dtype == torch.float64 else 0.0
        most = parity.allowed(parity.error(eager, exact), float(exact.abs().max()), dtype)
        assert parity.error(ours, exact) <= most + slack


@pytest.mark.skipif("cpu" not in BACKENDS, reason="operators of the C++ backend")
def test_no_channel_has_no_gradient():
    location, nan = torch.ones(2, 3, 17), float("nan")
    for channels in (1, 0):  # the first leaves NaN in what the second may take for its sums
        grad, w = torch.full((2, 17, channels), nan), torch.full((channels, 3, 5), nan)
        found = torch.ops.bahdanau_fast.convolution_backward(grad, location, w, 1)[0]
    assert not found.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_autocast(backend):
    torch.manual_seed(0)
    module = bf.LocationAttention(5, 7, 6, 3, 9)
    inputs = [torch.randn(s) for s in ((2, 1, 7), (2, 21, 5), (2, 21, 4), (2, 1, 21))]

    def attended(attention):
        return attention.attend(
            inputs[0], attention.memory(*inputs[1:3], None, mask=None), inputs[3]
        )

    with torch.autocast("cpu", torch.bfloat16):
        eager = attended(Plain(module))
        with bf.backends.use(backend):
            ours = attended(module)
    exact = module.double()(*(x.double() for x in inputs))
    as_exact([ours], [eager.to(ours.dtype)], [exact], torch.bfloat16)
    assert ours.dtype == torch.bfloat16

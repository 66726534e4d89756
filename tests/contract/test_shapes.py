"""Decoder states, any number of batch dimensions, lists as lengths."""

import pytest
import torch

import bahdanau_fast as bf
from bahdanau_fast import checks
from bahdanau_fast.memory.key_cache import KeyCache

B, TQ, TK, D, H, DV = 6, 4, 13, 5, 7, 3
LENS = [2, 13, 0, 7, 1, 20]
MASK = torch.arange(B * TK).reshape(B, TK) % 3 != 1
PER_QUERY = torch.arange(B * TQ * TK).reshape(B, TQ, TK) % 5 != 2


def kinds():
    torch.manual_seed(0)
    additive = bf.AdditiveAttention(D, D, H, bias=True)
    weights = [layer.weight for layer in (additive.W_q, additive.W_k, additive.w_v)]

    def function(queries, keys, values, lens=None, mask=None):
        return bf.additive_attention(
            queries, keys, values, *weights, lens, mask=mask, bias=additive.bias
        )

    def called(module):
        def call(*inputs, **options):
            return module(*inputs, **options), module.attention_weights

        return call

    return {
        "function": function,
        "module": called(additive),
        "mlp": called(bf.MLPAttention(H, D)),
        "dot": called(bf.DotProductAttention()),
    }


@pytest.fixture(params=["function", "module", "mlp", "dot"])
def call(request):
    return kinds()[request.param]


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    shapes = (B, TQ, D), (B, TK, D), (B, TK, DV)
    return [torch.randn(s, generator=generator) for s in shapes]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


LOOKS = [
    {},
    {"lens": torch.tensor(LENS)},
    {"lens": torch.tensor(LENS).unsqueeze(1).expand(B, TQ)},
    {"mask": MASK},
    {"mask": PER_QUERY},
    {"lens": torch.tensor(LENS), "mask": MASK.unsqueeze(1)},
]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("batch", [(6,), (2, 3), (3, 1, 2)])
def test_any_number_of_batch_dimensions(call, inputs, batch, look):
    def shaped(x):
        return x.reshape(*batch, *x.shape[1:])

    lens, mask = look.get("lens"), look.get("mask")
    context, weights = call(*inputs, lens, mask=mask)
    lens, mask = (None if x is None else shaped(x) for x in (lens, mask))
    got = call(*map(shaped, inputs), lens, mask=mask)
    for ours, want in zip(got, (context, weights), strict=True):
        close(ours, shaped(want))


@pytest.mark.parametrize("look", [*LOOKS[:2], LOOKS[3], LOOKS[5]])
@pytest.mark.parametrize("batch", [(6,), (2, 3)])
def test_a_decoder_state(call, inputs, batch, look):
    def shaped(x):
        return x.reshape(*batch, *x.shape[1:])

    queries, keys, values = inputs
    lens, mask = look.get("lens"), look.get("mask")
    context, weights = call(queries[:, :1], keys, values, lens, mask=mask)
    lens, mask = (None if x is None else shaped(x) for x in (lens, mask))
    got = call(*map(shaped, (queries[:, 0], keys, values)), lens, mask=mask)
    for ours, want in zip(got, (context, weights), strict=True):
        close(ours, shaped(want.squeeze(1)))


def test_without_a_batch(call, inputs):
    context, weights = call(*inputs, torch.tensor(LENS), mask=MASK)
    for row in range(B):
        q, k, v = (x[row] for x in inputs)
        for got, i in (
            (call(q, k, v, torch.tensor(LENS[row]), mask=MASK[row]), slice(None)),
            (call(q[1], k, v, torch.tensor(LENS[row]), mask=MASK[row]), 1),
        ):
            close(got[0], context[row, i])
            close(got[1], weights[row, i])


@pytest.mark.parametrize("lens", [LENS, tuple(LENS), [[x + y for y in range(TQ)] for x in LENS]])
def test_lists_as_lengths(call, inputs, lens):
    for got, want in zip(call(*inputs, lens), call(*inputs, torch.tensor(lens)), strict=True):
        assert torch.equal(got, want)
    scores = torch.randn(B, TQ, TK)
    assert torch.equal(
        bf.masked_softmax(scores, lens), bf.masked_softmax(scores, torch.tensor(lens))
    )


@pytest.mark.parametrize("dtype", [*checks.INTEGER, *checks.FLOATING], ids=str)
def test_lengths_of_every_dtype(call, inputs, dtype):
    lens, scores = torch.tensor(LENS), torch.randn(B, TQ, TK)
    for got, want in zip(call(*inputs, lens.to(dtype)), call(*inputs, lens), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(bf.masked_softmax(scores, lens.to(dtype)), bf.masked_softmax(scores, lens))


@pytest.mark.parametrize("kind", [lambda: bf.AdditiveAttention(H), bf.DotProductAttention])
def test_a_state_and_a_memory(inputs, kind):
    attention = kind()
    queries, keys, values = inputs
    masked = attention.memory(keys, values, LENS, mask=MASK)
    memory = attention.memory(keys, values, LENS)
    want = attention.attend(queries, memory), attention.attention_weights
    for i in range(TQ):
        close(attention.attend(queries[:, i], memory), want[0][:, i])
        close(attention.attention_weights, want[1][:, i])
    want = attention(queries[:, :1], keys, values, LENS, mask=MASK)[:, 0]
    for of in (memory, masked):
        close(attention.attend(queries[:, 0], of, mask=MASK), want)
    close(attention.attend(queries[:, 0], masked), want)


@pytest.mark.skipif("cpu" not in bf.backends.available(), reason="the C++ operators remember keys")
def test_a_loop_over_states_projects_the_keys_once(monkeypatch):
    attention, stored, store = bf.AdditiveAttention(D, D, H), [], KeyCache._store
    monkeypatch.setattr(KeyCache, "_store", lambda *args: stored.append(args) or store(*args))
    queries, keys = torch.randn(B, TQ, D), torch.randn(B, 5000, D, requires_grad=True)
    leaves = [keys, attention.W_k.weight]
    steps = torch.stack([attention(queries[:, i], keys, keys) for i in range(TQ)], 1)
    assert len(stored) == 1
    got = torch.autograd.grad(steps.square().sum(), leaves)
    want = torch.autograd.grad(attention(queries, keys, keys).square().sum(), leaves)
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_features_of_any_batch():
    torch.manual_seed(0)
    q, k, v, f = (torch.randn(B, n, d) for n, d in ((TQ, D), (TK, D), (TK, DV), (TK, 2)))
    w_q, w_k, w_v, w_f = (torch.randn(s) for s in ((H, D), (H, D), (H,), (H, 2)))
    options = {"w_f": w_f, "activation": "relu"}

    def call(q, k, v, f):
        results = bf.additive_attention(q, k, v, w_q, w_k, w_v, features=f, **options)
        return *results, bf.additive_scores(q, k, w_q, w_k, w_v, features=f, clip=2.0, **options)

    want = call(q, k, v, f)
    rows = [x.unflatten(0, (2, 3)) for x in (q, k, v, f)]
    for ours, exact in zip(call(*rows), want, strict=True):
        close(ours, exact.unflatten(0, (2, 3)))
    for i, state in enumerate(rows[0].unbind(2)):
        for ours, exact in zip(call(state, *rows[1:]), want, strict=True):
            close(ours, exact[:, i].unflatten(0, (2, 3)))
    for ours, exact in zip(call(q[1, 2], k[1], v[1], f[1]), want, strict=True):  # without a batch
        close(ours, exact[1, 2])


@pytest.mark.parametrize("function", [bf.additive_scores, bf.additive_attention])
def test_features_that_do_not_fit_the_batch(function):
    ones = torch.ones
    values = (ones(2, 3, TK, DV),) if function is bf.additive_attention else ()
    weights = ones(H, D), ones(H, D), ones(H)
    with pytest.raises(ValueError, match=r"features must have .*got \(3, 2, 13, 2\)"):
        function(
            *(ones(2, 3, D), ones(2, 3, TK, D), *values, *weights),
            features=ones(3, 2, TK, 2),
            w_f=ones(H, 2),
        )


def test_batches_that_differ(inputs):
    attention = bf.AdditiveAttention(D, D, H)
    q, k, v = (x.unflatten(0, (2, 3)) for x in inputs)
    other = [x.transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"queries must have the batch dimensions of keys, \(2, 3"):
        attention(other[0], k, v)
    with pytest.raises(ValueError, match=r"values must have the batch dimensions of keys, \(2, 3"):
        attention(q, k, other[2])
    with pytest.raises(ValueError, match=r"valid_lens must have shape \(2, 3\) or \(2, 3, 4\)"):
        attention(q, k, v, torch.tensor(LENS))
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 3, 13\) or \(2, 3, 1, 13\)"):
        attention(q, k, v, mask=MASK)
    with pytest.raises(ValueError, match=r"values must have 3 dimensions"):
        attention(inputs[0], inputs[1], v)

"""torch.func, forward mode, second derivatives: right, or an error; never a tangent lost."""

from functools import partial

import pytest
import torch
from beside import close, formula
from threads import one_thread  # noqa: F401  a fixture
from torch.autograd import forward_ad

import bahdanau_fast as bf

SIZES = {"one operator": 8, "three operators": 640}  # hidden units


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def module(hidden, **more):
    torch.manual_seed(0)
    return bf.AdditiveAttention(3, 4, hidden, **more).double()


def call(attention, queries, keys, values, lens=None):
    return attention(queries, keys, values, lens)


def attend(attention, queries, keys, values, lens=None):
    return attention.attend(queries, attention.memory(keys, values, lens))


def function(attention, queries, keys, values, lens=None):
    layers = attention.W_q, attention.W_k, attention.w_v
    weights = (layer.weight for layer in layers)
    return bf.additive_attention(queries, keys, values, *weights, lens)[0]


def plain(attention, queries, keys, values, lens=None):
    return formula(attention, queries, keys, values, lens)[0]


ways = pytest.mark.parametrize("way", [call, attend, function])
sizes = pytest.mark.parametrize("hidden", SIZES.values(), ids=SIZES)
SAMPLES = tensors((5, 2, 3, 4), (5, 2, 6, 3), (5, 2, 6, 2))
FIRST = tuple(x[0] for x in SAMPLES)


class Squared(torch.nn.Module):
    def __init__(self, attention, way):
        super().__init__()
        self.attention, self.way = attention, way

    def forward(self, *inputs):
        return self.way(self.attention, *inputs).square().sum()


def by_vmap(attention, way):
    lens = torch.arange(10).reshape(5, 2) - 2
    return torch.func.vmap(partial(way, attention))(*SAMPLES, lens)


def gradients_per_sample(attention, way):
    model = Squared(attention, way)

    def loss(parameters, *inputs):
        return torch.func.functional_call(model, parameters, inputs)

    of_each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))
    return of_each(dict(model.named_parameters()), *SAMPLES)


def by_jvp(attention, way):
    return torch.func.jvp(partial(way, attention), FIRST, tuple(x.cos() for x in FIRST))


def by_hessian(attention, way):
    queries, *rest = FIRST
    return torch.func.hessian(lambda x: way(attention, x, *rest).sum())(queries)


def forward_mode(attention, way):
    queries, keys, values = FIRST
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(keys, keys.cos())
        context = way(attention, queries, dual, values, torch.tensor([4, 0]))
        tangent = forward_ad.unpack_dual(context).tangent
    assert float(tangent.detach().abs().max()) > 1e-3
    return tangent


def forward_mode_of_constants(attention, way):
    return forward_mode(attention.requires_grad_(False), way)


TRANSFORMS = (
    by_vmap, gradients_per_sample, by_jvp, by_hessian, forward_mode, forward_mode_of_constants,
)  # fmt: skip


@sizes
def test_vmap_over_queries_of_a_memory_from_outside(hidden):
    attention = module(hidden)
    q, k = tensors((5, 2, 3, 4), (2, 6, 3))
    memory = attention.memory(k.requires_grad_())

    def one(queries):
        return attention.attend(queries, memory), attention.scores(queries, memory)

    got, want = torch.func.vmap(one)(q), [torch.stack(x) for x in zip(*map(one, q), strict=True)]
    close(got, want)
    got, want = (torch.autograd.grad(sum(x.cos().sum() for x in y), k) for y in (got, want))
    close(got, want)


@ways
@sizes
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform, way, hidden):
    attention = module(hidden)
    close(*(transform(attention, one) for one in (way, plain)))
    close(*(one(attention, *FIRST) for one in (way, plain)))  # and then again


@pytest.mark.parametrize("derivative", ["jacobian", "hessian"])
@pytest.mark.parametrize(("keys_len", "hidden"), [(5, 8), (300, 40)], ids=["small", "remembered"])
def test_vectorized_derivatives(derivative, keys_len, hidden):
    """With respect to keys that two calls project once."""
    attention = module(hidden)
    q, k, v = tensors((2, 1, 4), (2, keys_len, 3), (2, keys_len, 2))

    of = getattr(torch.autograd.functional, derivative)
    found = []
    for one in (call, plain):

        def twice(some, one=one):
            keys = torch.cat([some, k[:, 4:]], 1)
            context = one(attention, q, keys, v) + one(attention, 2 * q, keys, v)
            return context.sin().sum((1, 2) if derivative == "jacobian" else None)

        found.append(of(twice, k[:, :4], vectorize=True))
    close(*found)


def test_forward_mode_through_onednns_projection():
    # Sizes where an eager call multiplies by oneDNN, which knows no tangents.
    attention = bf.AdditiveAttention(256, 256, 256).requires_grad_(False)
    q, k, tangent = (x.float() for x in tensors((4, 8, 256), (4, 8, 256), (4, 8, 256)))
    tangents = []
    for one in (call, plain):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(q, tangent)
            tangents.append(forward_ad.unpack_dual(one(attention, dual, k, k)).tangent)
    close(*tangents)


@sizes
def test_a_backend_by_name_refuses_what_it_cannot_transform(hidden):
    attention = module(hidden)
    q, k, v = tensors((1, 2, 4), (1, 6, 3), (1, 6, 2))
    with bf.backends.use("cpu"):
        need = r"backend must be 'reference' .*torch\.func.*, got 'cpu'"
        with pytest.raises(ValueError, match=need):
            torch.func.grad(lambda x: function(attention, x, k, v).sum())(q)
        with pytest.raises(ValueError, match=need):
            torch.func.vmap(lambda x: function(attention, x, k, v))(q[None])
        with forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
            function(attention, forward_ad.make_dual(q, q), k, v)


# ---- second derivatives --------------------------------------------------------------------------


# Which of q, k and v there are, and what attention is asked with.
RELATED = {
    "nothing in common": ("qkv", lambda q, k, v, w: (q, k, v)),
    "values is keys": ("qk", lambda q, k, v, w: (q, k, k)),
    "values made of keys": ("qk", lambda q, k, v, w: (q, k, k.cos())),
    "keys made of values": ("qv", lambda q, k, v, w: (q, v @ w[:2, :3], v)),
    "queries made of keys": ("kv", lambda q, k, v, w: (k[:, :3].sin() @ w, k, v)),
    "keys made of queries": ("qv", lambda q, k, v, w: (q, q.repeat(1, 2, 1)[..., :3].exp(), v)),
}


@ways
@sizes
@pytest.mark.parametrize("related", RELATED)
def test_second_derivatives_where_inputs_come_from_one_another(way, hidden, related):
    attention = module(hidden)
    q, k, v, w = tensors((2, 3, 4), (2, 6, 3), (2, 6, 2), (3, 4))
    names, make = RELATED[related]
    leaves = [x.requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True) if name in names]
    results = []
    for one in (way, plain):
        out = one(attention, *make(q, k, v, w))
        of = (*leaves, attention.W_k.weight)
        first = torch.autograd.grad(out.square().sum(), of, create_graph=True)
        loss = sum(x.square().sum() for x in first)
        second = torch.autograd.grad(loss, [*leaves, *attention.parameters()])
        results.append((*first, *second))
    close(*results)


@ways
def test_a_loop_of_steps_differentiated_twice(way):
    # Each query is the context of the step before: all of it depends on the keys.
    attention = bf.AdditiveAttention(4, 4, 600).double()
    (keys,) = tensors((2, 9, 4))
    keys.requires_grad_()
    results = []
    for one in (way, plain):
        query = keys[:, :1]
        for _ in range(3):
            query = one(attention, query, keys, keys)
        (first,) = torch.autograd.grad(query.square().sum(), keys, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [keys, *attention.parameters()]))
    close(*results)


# ---- under torch.compile -------------------------------------------------------------------------


def test_compiled():
    attention = bf.AdditiveAttention(16, 16, 32)
    q, k = torch.randn(4, 3, 16), torch.randn(4, 7, 16)
    parameters = dict(attention.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(attention, parameters, (q, k, k)).square().sum()

    def rows(q, k):
        return torch.func.vmap(lambda q, k: attention(q[None], k[None], k[None])[0])(q, k)

    torch.compiler.reset()
    for one, args in ((torch.func.grad(loss), (parameters,)), (rows, (q, k))):
        want = one(*args)
        got = torch.compile(one, fullgraph=True, backend="aot_eager")(*args)
        close(got, want)
    torch.compiler.reset()

"""What people leave out or share: values that are the keys, one query for all rows of a batch."""

import pytest
import torch
from contract import scattered

import bahdanau_fast as bf

B, TQ, TK, D, H, DV = 3, 4, 9, 5, 7, 6
LENS = torch.tensor([2, 9, 0])
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


def with_gradients(results, leaves):
    """Results, and gradients of all of them together."""
    grads = torch.autograd.grad(results, leaves, [x.detach().cos() for x in results])
    return [*results, *grads]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@BACKENDS
def test_values_are_the_keys_unless_there_are_some(attention, backend):
    mlp, (q, k) = bf.MLPAttention(H, D).double(), (drawn(B, TQ, D), drawn(B, TK, D))
    with bf.backends.use(backend):
        ways = (
            (attention(q, k, valid_lens=LENS), lambda v: attention(q, k, v, LENS)),
            (attention(q[:, 0], k), lambda v: attention(q[:, 0], k, v)),  # a state
            (mlp(q, k, valid_length=LENS), lambda v: mlp(q, k, v, LENS)),
            (
                bf.additive_attention(q, k, None, *weights_of(attention), LENS)[0],
                lambda v: bf.additive_attention(q, k, v, *weights_of(attention), LENS)[0],
            ),
        )
        for got, call in ways:
            close(with_gradients([got], [q, k]), with_gradients([call(k)], [q, k]))


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
        got, want = (with_gradients(list(results(x)), leaves) for x in (q, rows))
        close(got, want)
        compiled = torch.compile(attention, backend="eager", fullgraph=True)
        close(compiled(q, k, v, LENS, mask=mask), want[0])
        program = torch.export.export(attention, (q, k, v, LENS), {"mask": mask})
        close(program.module()(q, k, v, LENS, mask=mask), want[0])
    several = [x.expand(2, *x.shape) for x in (k, v)]
    of_several = attention(q if q.dim() == 1 else q[None], *several, LENS.expand(2, B))
    close(of_several, attention(rows, k, v, LENS).expand(2, *want[0].shape))


SWAPPED = {
    # queries, keys, the cure in the message
    ((2, B, D), (B, TK, D)): r"queries must have .*, got \(2, 3, 5\): .* is hidden\[-1\]$",
    ((1, B, D), (B, TK, D)): r"hidden\[-1\]; queries of all rows are queries.expand\(3, -1, -1\)$",
    ((B, 1, D), (TK, B, D)): r"the batch comes first, keys.transpose\(0, 1\)$",
    ((1, 1, D), (TK, 1, D)): r"keys.transpose\(0, 1\); .* queries.expand\(9, -1, -1\)$",
    ((B, 1, D), (B, 2, TK, D)): r"image are keys.flatten\(1, 2\)$",
    ((1, 1, D), (B, 2, TK, D)): r"image are keys.flatten\(1, 2\)$",
    ((B, D), (B, 2, TK, D)): r"image are keys.flatten\(1, 2\)$",
    ((1, D), (B, TK, D)): r"batch dimensions of .*\(3,\), and one or two more, got \(1, 5\)$",
    ((2, TQ, D), (B, TK, D)): r"must have the batch size of [^:]*$",
}


@pytest.mark.parametrize(("shapes", "message"), SWAPPED.items())
def test_errors_name_the_cure(attention, shapes, message):
    queries, keys = (drawn(*shape) for shape in shapes)
    ways = (
        lambda: attention(queries, keys),
        lambda: attention.attend(queries, attention.memory(keys)),
        lambda: bf.additive_attention(queries, keys, keys, *weights_of(attention)),
    )
    for way in ways:
        with pytest.raises(ValueError, match=message):
            way()


def test_the_state_of_an_lstm(attention):
    state, keys = (drawn(1, B, D), drawn(1, B, D)), drawn(B, TK, D)
    for call in (
        lambda: attention(state, keys),
        lambda: attention.attend(state, attention.memory(keys)),
        lambda: bf.additive_attention(state, keys, keys, *weights_of(attention)),
    ):
        with pytest.raises(TypeError, match=r"LSTM's state \(h, c\) pass h\[-1\]\), got tuple"):
            call()

"""Masks: a prefix is a length, what is left out is not read, and every way in takes one."""

import time

import pytest
import torch
from beside import and_gradients, close, formula
from contract import operands, places, scattered

import bahdanau_fast as bf

B, TQ, TK, D, H, DV = 3, 4, 70, 9, 37, 11
LENS = torch.tensor([0, 41, 70])
PREFIX = torch.arange(TK) < LENS[:, None]
PER_ROW, PER_QUERY = scattered(B, TK), scattered(B, TQ, TK, seed=1)
PER_QUERY[1, 2] = False
needs_cpu = pytest.mark.skipif(
    "cpu" not in bf.backends.available(), reason="tests the C++ operators"
)


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return bf.AdditiveAttention(D, D, H, bias=True)


def inputs(queries=TQ, **how):
    generator = torch.Generator().manual_seed(1)
    shapes = (B, queries, D), (B, TK, D), (B, TK, DV)
    return [torch.randn(s, generator=generator, **how) for s in shapes]


@needs_cpu
@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize("queries", [1, TQ])
def test_a_prefix_is_a_length_to_the_bit(attention, queries, per_query):
    q, k, v = inputs(queries, requires_grad=True)
    mask = PREFIX.unsqueeze(1).expand(B, queries, TK) if per_query else PREFIX
    leaves = [q, k, v, *attention.parameters()]
    of_lens, of_mask = (
        and_gradients((attention(q, k, v, **how), attention.attention_weights), leaves)
        for how in ({"valid_lens": LENS}, {"mask": mask})
    )
    assert all(map(torch.equal, of_mask, of_lens))


@needs_cpu
@pytest.mark.parametrize("queries", [1, TQ])
@pytest.mark.parametrize("table", [False, True])
def test_blocks_with_nothing_to_look_at_are_not_read(attention, queries, table):
    q, k, v = inputs(queries)
    mask = places(TK, (0, 2), (64, 66)).expand(B, TK)

    def call():
        return (
            attention.attend(q, attention.memory(k, v, mask=mask))
            if table
            else attention(q, k, v, mask=mask)
        )

    want = call()
    k, v = k.clone(), v.clone()
    k[:, 32:64] = 1e-3
    v[:, 32:64] = float("nan")
    close(call(), want)


@pytest.mark.parametrize("queries", [1, TQ])
def test_one_key_before_the_last_is_seen_wherever_it_is(attention, queries):
    """Keys are looked at in tiles, and a tile is skipped that has none."""
    generator = torch.Generator().manual_seed(2)
    shapes = (TK, queries, D), (TK, TK, D), (TK, TK, DV)
    drawn = [torch.randn(s, generator=generator) for s in shapes]
    mask = torch.eye(TK, dtype=torch.bool)
    mask[:, -1] = True
    with torch.no_grad():
        close(attention(*drawn, mask=mask), formula(attention, *drawn, mask=mask)[0])


INSIDE = {"features": {"C": 3}, "relu": {"activation": 1}}


@needs_cpu
@pytest.mark.parametrize("form", INSIDE)
@pytest.mark.parametrize("queries", [1, TQ])
def test_keys_that_no_query_sees_are_not_scored(form, queries):
    tensors, inside = operands(torch.float32, B=B, Tq=queries, Tk=TK, H=H, **INSIDE[form])
    leaves = [*tensors, *(x for x in inside.values() if isinstance(x, torch.Tensor))]
    mask = places(TK, (17, 20), (41, 46)).expand(B, 1, TK)

    def call():
        return torch.ops.bahdanau_fast.attention(*tensors, mask=mask, **inside)[:2]

    want = and_gradients(call(), leaves)
    with torch.no_grad():
        for first, end in ((0, 16), (24, 40), (48, TK)):  # whole tiles of eight
            tensors[1][:, first:end] = float("nan")
    assert all(map(torch.equal, and_gradients(call(), leaves), want))


@needs_cpu
@pytest.mark.parametrize("form", INSIDE)
def test_a_prefix_is_a_length_to_the_bit_inside(form):
    tensors, inside = operands(torch.float32, B=B, Tq=TQ, Tk=TK, H=H, **INSIDE[form])
    leaves = [*tensors, *(x for x in inside.values() if isinstance(x, torch.Tensor))]
    attention = torch.ops.bahdanau_fast.attention
    of_lens, of_mask = (
        and_gradients(attention(*tensors, **seen, **inside)[:2], leaves)
        for seen in ({"valid_lens": LENS}, {"mask": PREFIX.unsqueeze(1)})
    )
    assert all(map(torch.equal, of_mask, of_lens))


@needs_cpu
@torch.no_grad()  # the formula of compiled code takes longer than the few keys
def test_keys_that_no_query_sees_cost_little(threads):
    """Of 4096 keys 64 are looked at: their scores take a 64th of the time that all take."""
    threads(1)  # others would wait for work in loops, which takes processor time too
    tensors, inside = operands(torch.float32, B=1, Tq=4, Tk=4096, H=256, activation=1)

    def seconds(mask):
        before = time.process_time()
        torch.ops.bahdanau_fast.attention(*tensors, mask=mask, **inside)
        return time.process_time() - before

    few, most = (places(4096, seen).view(1, 1, -1) for seen in ((4000, 4064), (1, 4096)))
    assert min(seconds(most) for _ in range(7)) > 3 * min(seconds(few) for _ in range(7))


SPREAD = {
    "(1,Tq,Tk)": PER_QUERY[:1],
    "(Tq,Tk)": PER_QUERY[0],
    "(1,1,Tk)": PER_ROW[:1, None],
    "(1,Tk)": PER_ROW[:1],
    "(B,1,1)": torch.tensor([True, False, True])[:, None, None],
    "(B,Tq,1)": scattered(B, TQ, 1, seed=2),
    "(1,Tq,1)": scattered(1, TQ, 1, seed=3),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("mask", SPREAD.values(), ids=SPREAD)
def test_masks_broadcast(attention, mask, backend):
    torch.compiler.reset()
    q, k, v = inputs(requires_grad=True)
    full = torch.broadcast_to(mask, (B, TQ, TK))
    leaves, weights = [q, k, v, *attention.parameters()], [attention.W_q, attention.W_k]
    weights = [*(layer.weight for layer in weights), attention.w_v.weight]
    options = {"mask": mask, "bias": attention.bias}
    ways = [
        lambda: bf.additive_attention(q, k, v, *weights, **options),
        lambda: (attention(q, k, v, mask=mask), attention.attention_weights),
        lambda: (attention.attend(q, attention.memory(k, v), mask=mask),),
        lambda: (bf.masked_softmax(attention.scores(q, attention.memory(k)), mask=mask) @ v,),
        lambda: (torch.compile(attention, backend="eager", fullgraph=True)(q, k, v, mask=mask),),
    ]
    if mask.dim() == 3:  # a memory does not know how many queries come
        ways.append(lambda: (attention.attend(q, attention.memory(k, v, mask=mask)),))
    with bf.backends.use(backend):
        for way in ways:
            got = and_gradients(way(), leaves)
            count = len(got) - len(leaves)
            want = and_gradients(formula(attention, q, k, v, mask=full)[:count], leaves)
            close(got, want)
    close(
        bf.DotProductAttention()(q, k, v, mask=mask), bf.DotProductAttention()(q, k, v, mask=full)
    )


def test_a_mask_of_two_dimensions_is_of_the_batch_where_it_may_be(attention):
    q, k, v = (x[:, :B] for x in inputs())
    square = torch.eye(B, dtype=torch.bool)
    close(attention(q, k, v, mask=square), attention(q, k, v, mask=square[:, None]))
    several = [x.expand(2, *x.shape) for x in (q, k, v)]
    want = attention(q, k, v, mask=square[None])
    for mask in (square, square[None, None], square.expand(1, B, B, B)):
        close(attention(*several, mask=mask), want.expand(2, *want.shape))


def test_masked_softmax(attention):
    scores = torch.randn(B, TQ, TK)
    want = torch.softmax(scores.masked_fill(~PER_QUERY, -1e30), -1)
    close(bf.masked_softmax(scores, mask=PER_QUERY), want)
    both = bf.masked_softmax(scores, LENS, mask=PER_ROW)
    close(both, bf.masked_softmax(scores, mask=PER_ROW & PREFIX))


SOME = scattered(B, TK, seed=7, share=0.8).unsqueeze(1)


@pytest.mark.parametrize("form", ["memory", "memory with a mask", "course"])
def test_gradients_left_to_the_last_step_know_the_masks(attention, form):
    """A mask of its own for each step, lengths for another, nothing for a third."""
    q, k, v = inputs(6, requires_grad=True)
    looks = PER_ROW.unsqueeze(1), PER_QUERY[:, 1:2], PER_QUERY[:, 2:3], None, None, PREFIX[:, None]
    leaves = [q, k, v, *attention.parameters()]
    lens, mask = (LENS, SOME) if form == "memory with a mask" else (None, None)
    memory, got, want = attention.memory(k, v, lens, mask=mask), [], []
    for query, look in zip(q.split(1, 1), looks, strict=True):
        if form == "course":
            got.append(attention(query, k, v, mask=look))
        else:
            got.append(attention.attend(query, memory, mask=look))
        seen = look if mask is None else mask if look is None else mask & look
        want.append(formula(attention, query, k, v, lens, seen)[0])
    close(*(and_gradients(results, leaves) for results in (got, want)))


OF_QUERIES = LENS.unsqueeze(1) * torch.arange(TQ) / 2


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("lens", [None, LENS, OF_QUERIES], ids=["no lens", "lens", "per query"])
@pytest.mark.parametrize("mask", [None, PER_ROW, PER_QUERY], ids=["no mask", "mask", "per query"])
def test_dot_product_attention(mask, lens, need_weights):
    dot = bf.DotProductAttention(0.3, need_weights=need_weights).eval()
    q, k, v = leaves = inputs(requires_grad=True)
    seen = torch.ones(B, TQ, TK, dtype=torch.bool)
    if lens is not None:
        seen &= torch.arange(TK) < lens.view(B, -1, 1)
    if mask is not None:
        seen &= mask.view(B, -1, TK)

    def plain():
        scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill(~seen, float("-inf"))
        weights = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0).softmax(-1)
        return [weights @ v, *[weights] * need_weights]

    want = and_gradients(plain(), leaves)
    memories = dot.memory(k, v, lens, mask=mask), dot.memory(k, v, lens)
    for call in (
        lambda: dot(q, k, v, lens, mask=mask),
        lambda: dot(queries=q, keys=k, values=v, valid_lens=lens, mask=mask),
        lambda: dot(query=q, key=k, value=v, valid_length=lens, mask=mask),  # the first names
        lambda: dot.attend(q, memories[0]),
        lambda: dot.attend(q, memories[0], mask=mask),
        lambda: dot.attend(q, memories[1], mask=mask),
    ):
        context = call()
        close(and_gradients([context, *[dot.attention_weights] * need_weights], leaves), want)
        assert need_weights == (dot.attention_weights is not None)


def test_dropout_drops_what_is_seen(attention):
    attention.dropout.p = 0.5
    q, k, _ = inputs()
    torch.manual_seed(3)
    context = attention(q, k, torch.eye(TK).expand(B, TK, TK), mask=PER_ROW)
    weights = attention.attention_weights
    kept = context != 0
    close(context[kept], 2 * weights[kept])
    assert not kept[~PER_ROW.unsqueeze(1).expand(B, TQ, TK)].any()
    assert 0.4 < kept.sum() / (weights > 0).sum() < 0.6


def test_under_torch_func(attention):
    q, k, v = inputs()
    want = torch.stack([attention(q, k, v, mask=mask) for mask in (PER_ROW, ~PER_ROW)])
    masks = torch.stack([PER_ROW, ~PER_ROW])
    close(torch.func.vmap(lambda mask: attention(q, k, v, mask=mask))(masks), want)


def test_the_reason_is_told(attention):
    q, k, _ = inputs()
    memory = attention.memory(k, mask=PER_ROW)
    of_cpu = attention.explain(q, attention.memory(k))
    assert attention.explain(q, memory) == attention.explain(q, memory, mask=PER_ROW) == of_cpu


def test_scores_call_a_layer_that_is_more_than_its_weight(attention):
    q, k, _ = inputs()
    want = attention.scores(q, attention.memory(k))
    attention.w_v.register_forward_hook(lambda layer, given, result: 2 * result)
    close(attention.scores(q, attention.memory(k)), 2 * want)

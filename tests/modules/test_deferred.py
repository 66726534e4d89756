"""What decoder steps leave to the shared node: the same gradients, computed once per backward."""

import gc
import weakref

import parity
import pytest
import torch
from profiled import counts
from threads import at_once
from torch.utils.checkpoint import checkpoint

import bahdanau_fast as bf
from bahdanau_fast.backends.cpu import TABLE_ELEMENTS

B, TK, D, H, STEPS = 3, 53, 17, 19, 6
# Smaller sources have no memory worth sharing.
assert min(B * TK * D, B * TK * H) >= TABLE_ELEMENTS


def step_by_step(inputs, lens):
    """A memory and one query after the other."""
    module = parity.module_of(inputs)
    memory = module.memory(inputs["keys"], inputs["values"], lens)
    assert memory.projected.shared is not None
    results = [
        (module.attend(query, memory), module.attention_weights)
        for query in inputs["queries"].split(1, 1)
    ]
    return [torch.cat(parts, 1) for parts in zip(*results, strict=True)]


CASES = {
    "plain": {},
    "lens": {"lens": torch.tensor([3, 53, 0])},
    "context": {"grads": "context", "lens": torch.tensor([9, 1, 40])},
    "weights": {"grads": "weights"},
    "keys are values": {"tied": True, "lens": torch.tensor([53, 52, 51])},
    "large": {"scale": {"keys": 1e3, "queries": 1e2}},
    "small": {"scale": dict.fromkeys(parity.INPUTS, 1e-4)},
    "laid out": {"layout": {"keys": "batch_last", "values": "strided", "queries": "sliced"}},
    "many units": {"H": 300, "Tq": 12, "B": 17, "Tk": 70},
    "long": {"B": 1, "Tk": 400, "H": 150},
}


@pytest.mark.parametrize("dtype", parity.DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_parity(name, dtype):
    sizes = {"B": B, "Tq": STEPS, "Tk": TK, "H": H, "Dq": 5, "Dk": D, "Dv": 11, **CASES[name]}
    parity.check(parity.Case(**sizes), dtype, step_by_step)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return bf.AdditiveAttention(D, D, H)


@pytest.fixture
def keys():
    return torch.randn(B, TK, D, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.fixture
def queries():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(STEPS, B, 1, D, generator=generator, requires_grad=True)


LENS = torch.tensor([5, TK, 30])


def inputs_of(module, keys, queries):
    return [keys, queries, *module.parameters()]


def attend(module, keys, queries):
    memory = module.memory(keys, valid_lens=LENS)
    return [module.attend(query, memory) for query in queries]


def in_course_form(module, keys, queries):
    return [module(query, keys, keys, LENS) for query in queries]


def apart(module, keys, queries):
    """The reference, which shares nothing."""
    weights = (module.W_q.weight, module.W_k.weight, module.w_v.weight)
    return [bf.reference.additive_attention(q, keys, keys, *weights, LENS)[0] for q in queries]


def loss(contexts):
    return sum((1 + i) * context.square().sum() for i, context in enumerate(contexts))


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [attend, in_course_form])
def test_sums_are_made_once(module, keys, queries, form):
    value = loss(form(module, keys, queries))
    calls = counts(value.backward)
    apart_calls = 0 if form is attend else 1  # the first call does not know of the others yet
    assert calls["attend_backward_keys"] == 1
    assert calls["attend_backward_queries"] == STEPS - apart_calls
    assert calls.get("attention_backward", 0) == apart_calls
    inputs = inputs_of(module, keys, queries)
    want = torch.autograd.grad(loss(apart(module, keys, queries)), inputs)
    same([x.grad for x in inputs], want)


def test_dropout_is_that_of_each_step(keys, queries):
    module = bf.AdditiveAttention(D, D, H, dropout=0.4)

    def gradients(**how):
        torch.manual_seed(5)
        memory = module.memory(keys, valid_lens=LENS)
        if how.get("apart"):
            unshared = memory.projected._replace(shared=None)
            memory = bf.Memory(unshared, memory.values, memory.valid_lens)
        value = loss([module.attend(query, memory) for query in queries])
        return torch.autograd.grad(value, inputs_of(module, keys, queries))

    same(gradients(), gradients(apart=True))


@pytest.mark.parametrize("form", [attend, in_course_form])
def test_backward_over_some_steps_and_over_all(module, keys, queries, form):
    inputs = inputs_of(module, keys, queries)
    contexts, others = form(module, keys, queries), apart(module, keys, queries)
    for part in (slice(0, 2), slice(1, 5), slice(0, STEPS), slice(5, 6)):
        got = torch.autograd.grad(loss(contexts[part]), inputs, retain_graph=True)
        want = torch.autograd.grad(loss(others[part]), inputs, retain_graph=True)
        same(got, want)


def test_a_backward_that_stops_at_the_queries_leaves_nothing(module, keys, queries):
    contexts, others = attend(module, keys, queries), apart(module, keys, queries)
    got = torch.autograd.grad(loss(contexts), queries, retain_graph=True)
    same(got, torch.autograd.grad(loss(others), queries, retain_graph=True))
    inputs = inputs_of(module, keys, queries)
    same(torch.autograd.grad(loss(contexts), inputs), torch.autograd.grad(loss(others), inputs))


def test_an_interrupted_backward_leaves_nothing(module, keys, queries):
    contexts = attend(module, keys, queries)
    handle = contexts[2].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(contexts).backward(retain_graph=True)
    handle.remove()
    inputs = inputs_of(module, keys, queries)
    want = torch.autograd.grad(loss(apart(module, keys, queries)), inputs)
    same(torch.autograd.grad(loss(contexts), inputs), want)


def test_differentiated_again(module, keys, queries):
    def second(form):
        inputs = inputs_of(module, keys, queries)
        first = torch.autograd.grad(loss(form(module, keys, queries)), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    torch.testing.assert_close(second(attend), second(apart), rtol=1e-3, atol=1e-3)


def test_checkpointed_steps(module, keys, queries):
    memory = module.memory(keys, valid_lens=LENS)
    contexts = [
        checkpoint(lambda q: module.attend(q, memory), query, use_reentrant=False)
        for query in queries
    ]
    inputs = inputs_of(module, keys, queries)
    want = torch.autograd.grad(loss(apart(module, keys, queries)), inputs)
    same(torch.autograd.grad(loss(contexts), inputs), want)


def test_a_checkpointed_step_before_a_plain_one(module, keys, queries):
    # What is kept of the second is there when the first runs again.
    first = checkpoint(module, queries[0], keys, keys, LENS, use_reentrant=False)
    contexts = [first, module(queries[1], keys, keys, LENS)]
    inputs = inputs_of(module, keys, queries)
    for got, want in zip(contexts, apart(module, keys, queries[:2]), strict=True):
        same(torch.autograd.grad(loss([got]), inputs), torch.autograd.grad(loss([want]), inputs))


@pytest.mark.parametrize("form", [attend, in_course_form])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_loop(module, keys, queries, reentrant, form):
    inputs = inputs_of(module, keys, queries)
    want = torch.autograd.grad(loss(apart(module, keys, queries)), inputs)
    loop = lambda k, q: loss(form(module, k, q))  # noqa: E731
    checkpoint(loop, keys, queries, use_reentrant=reentrant).backward()
    same([x.grad for x in inputs], want)


def test_steps_of_several_sizes_and_lengths(module, keys):
    sizes = (1, 3, 2)
    queries = [torch.randn(B, n, D) for n in sizes]
    lens = [None, torch.tensor([4, 9, 0]), torch.randint(0, TK, (B, 2))]
    weights = (module.W_q.weight, module.W_k.weight, module.w_v.weight)
    inputs = [keys, *module.parameters()]
    calls = list(zip(queries, lens, strict=True))
    others = [bf.reference.additive_attention(q, keys, keys, *weights, n)[0] for q, n in calls]
    module(queries[0], keys, keys)
    contexts = [module(q, keys, keys, n) for q, n in calls]
    value = loss(contexts)
    assert "attention_backward" not in counts(lambda: value.backward(retain_graph=True))
    same(torch.autograd.grad(value, inputs), torch.autograd.grad(loss(others), inputs))


def test_autocast(module, keys, queries):
    def gradients(form):
        with torch.autocast("cpu", torch.bfloat16):
            contexts = form(module, keys, queries)
        return torch.autograd.grad(loss(contexts).float(), inputs_of(module, keys, queries))

    def one_by_one(module, keys, queries):
        memory = module.memory(keys, valid_lens=LENS)
        own = memory.projected._replace(shared=None)
        return [module.attend(q, bf.Memory(own, keys, LENS)) for q in queries]

    for a, b in zip(gradients(attend), gradients(one_by_one), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * b.abs().max().item())


def test_threads_go_over_one_graph(module, keys, queries):
    contexts, inputs = attend(module, keys, queries), inputs_of(module, keys, queries)
    want = torch.autograd.grad(loss(contexts), inputs, retain_graph=True)

    def work(_):
        for _ in range(10):
            same(torch.autograd.grad(loss(contexts), inputs, retain_graph=True), want)

    at_once(work, 4)


def test_nothing_is_held_afterwards(module, queries):
    # By reference counts alone, without the garbage collector.
    gc.disable()
    try:
        keys = torch.randn(B, TK, D, requires_grad=True)
        memory = module.memory(keys, valid_lens=LENS)
        contexts = [module.attend(query, memory) for query in queries]
        loss(contexts).backward()
        watched = [weakref.ref(x) for x in (*memory.projected.shared.results, memory.values)]
        module.attention_weights = None
        del memory, contexts, keys
        assert [ref() for ref in watched] == [None] * 4
    finally:
        gc.enable()


def test_the_gradient_of_a_memory(module, keys, queries):
    memory = module.memory(keys, valid_lens=LENS)
    value = loss([module.attend(query, memory) for query in queries])
    (of_memory,) = torch.autograd.grad(value, memory.projected.keys, retain_graph=True)
    (of_weight,) = torch.autograd.grad(value, module.W_k.weight)
    torch.testing.assert_close(of_memory.flatten(0, 1).T @ keys.flatten(0, 1), of_weight)

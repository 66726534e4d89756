"""What decoder steps leave to the shared node: the same gradients, computed once per backward."""

import copy
import gc
import weakref

import pytest
import torch
from beside import as_exact, formula
from profiled import allocated, counts
from threads import at_once
from torch.utils.checkpoint import checkpoint

import bahdanau_fast as bf
from bahdanau_fast.backends.cpu import TABLE_ELEMENTS

B, TK, D, H, STEPS = 3, 53, 17, 19, 6
# Smaller sources have no memory worth sharing.
assert min(B * TK * D, B * TK * H) >= TABLE_ELEMENTS


@pytest.fixture(params=["tanh", "leaky_relu"])
def module(request):
    torch.manual_seed(0)
    return bf.AdditiveAttention(D, D, H, dtype=torch.float64, activation=request.param)


@pytest.fixture
def keys():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, TK, D, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def queries():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(STEPS, B, 1, D, generator=generator, dtype=torch.float64, requires_grad=True)


LENS = torch.tensor([5, TK, 30])
of_tanh = pytest.mark.parametrize("module", ["tanh"], indirect=True)  # has operators of its own
same = torch.testing.assert_close


def inputs_of(module, keys, queries):
    return [keys, queries, *module.parameters()]


def attend(module, keys, queries):
    memory = module.memory(keys, valid_lens=LENS)
    return [module.attend(query, memory) for query in queries]


def in_course_form(module, keys, queries):
    return [module(query, keys, keys, LENS) for query in queries]


def apart(module, keys, queries):
    """The reference, which shares nothing."""
    return [formula(module, query, keys, keys, LENS)[0] for query in queries]


def unshared(module, keys, queries):
    """Ours, where it shares nothing."""
    own = module.memory(keys, valid_lens=LENS).projected._replace(shared=None)
    return [module.attend(query, bf.Memory(own, keys, LENS)) for query in queries]


def checkpointed_steps(module, keys, queries):
    memory = module.memory(keys, valid_lens=LENS)
    return [checkpoint(module.attend, query, memory, use_reentrant=False) for query in queries]


def a_checkpointed_step_first(module, keys, queries):
    """What is kept of the second is there when the first runs again."""
    first = checkpoint(module, queries[0], keys, keys, LENS, use_reentrant=False)
    return [first, *in_course_form(module, keys, queries[1:])]


def a_checkpointed_loop(form, reentrant):
    def run(module, keys, queries):
        loop = lambda k, q: tuple(form(module, k, q))  # noqa: E731
        return checkpoint(loop, keys, queries, use_reentrant=reentrant)

    return run


def loss(contexts):
    return sum((1 + i) * context.square().sum() for i, context in enumerate(contexts))


def all_steps(contexts, inputs):
    """By ``backward``, which a reentrant checkpoint asks for."""
    for x in inputs:
        x.grad = None
    loss(contexts).backward()
    return [x.grad for x in inputs]


def parts(*slices):
    def grads(contexts, inputs):
        each = (loss(contexts[part]) for part in slices)
        return [torch.autograd.grad(x, inputs, retain_graph=True) for x in each]

    return grads


def the_queries_alone_first(contexts, inputs):
    of_queries = torch.autograd.grad(loss(contexts), inputs[1], retain_graph=True)
    return of_queries, torch.autograd.grad(loss(contexts), inputs)


def after_an_interruption(contexts, inputs):
    handle = contexts[2].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(contexts).backward(retain_graph=True)
    handle.remove()
    return torch.autograd.grad(loss(contexts), inputs)


def twice(contexts, inputs):
    first = torch.autograd.grad(loss(contexts), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)


BACKWARDS = (
    all_steps,
    parts(slice(0, 2), slice(1, 5), slice(0, STEPS), slice(5, 6)),
    *(the_queries_alone_first, after_an_interruption, twice),
)
FORMS = attend, in_course_form
RUNS = [(form, backward) for form in FORMS for backward in BACKWARDS]
RUNS += [(checkpointed_steps, all_steps)]
RUNS += [(a_checkpointed_step_first, parts(slice(0, 1), slice(1, 2)))]
RUNS += [(a_checkpointed_loop(f, again), all_steps) for f in FORMS for again in (True, False)]


@pytest.mark.parametrize(("form", "backward"), RUNS)
def test_gradients_are_those_of_steps_apart(module, keys, queries, form, backward):
    inputs = inputs_of(module, keys, queries)
    found, want = (backward(f(module, keys, queries), inputs) for f in (form, apart))
    same(found, want)


@of_tanh
@pytest.mark.parametrize("form", FORMS)
def test_sums_are_made_once(module, keys, queries, form):
    calls = counts(loss(form(module, keys, queries)).backward)
    apart_calls = 0 if form is attend else 1  # the first call does not know of the others yet
    assert calls["attend_backward_keys"] == 1
    assert calls["attend_backward_queries"] == STEPS - apart_calls
    assert calls.get("attention_backward", 0) == apart_calls


@pytest.mark.parametrize("form", FORMS)
def test_steps_add_no_gradient_of_the_size_of_the_keys(module, keys, queries, form):
    def large(steps):
        value = loss(form(module, keys, queries[:steps]))
        return sum(size >= 8 * B * TK * H for size in allocated(value.backward))

    assert 1 <= large(2) == large(STEPS)


def test_dropout_is_that_of_each_step(keys, queries):
    module = bf.AdditiveAttention(D, D, H, dropout=0.4, dtype=torch.float64)
    found = []
    for form in (attend, unshared):
        torch.manual_seed(5)
        value = loss(form(module, keys, queries))
        found.append(torch.autograd.grad(value, inputs_of(module, keys, queries)))
    same(*found)


@of_tanh
def test_steps_of_several_sizes_and_lengths(module, keys):
    lens = [None, torch.tensor([4, 9, 0]), torch.randint(0, TK, (B, 2))]
    queries = [torch.randn(B, n, D, dtype=torch.float64) for n in (1, 3, 2)]
    calls, inputs = list(zip(queries, lens, strict=True)), [keys, *module.parameters()]
    others = [formula(module, query, keys, keys, each)[0] for query, each in calls]
    module(queries[0], keys, keys)
    value = loss([module(query, keys, keys, each) for query, each in calls])
    assert "attention_backward" not in counts(lambda: value.backward(retain_graph=True))
    same(torch.autograd.grad(value, inputs), torch.autograd.grad(loss(others), inputs))


def test_autocast(module, keys, queries):
    """The parity rule, with steps that share nothing as eager."""

    def gradients(form, dtype, autocast):
        own, *given = (copy.deepcopy(module).to(dtype), keys.to(dtype), queries.to(dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            contexts = form(own, *given)
        return torch.autograd.grad(loss(contexts).to(dtype), inputs_of(own, *given))

    exact = gradients(apart, torch.float64, False)
    ours, eager = (gradients(form, torch.float32, True) for form in (attend, unshared))
    as_exact(ours, eager, exact, torch.bfloat16)


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
        keys = torch.randn(B, TK, D, dtype=torch.float64, requires_grad=True)
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

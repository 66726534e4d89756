"""What a remembered projection saves, holds alive and refuses.

That results and gradients are those of code that remembers nothing, whatever changes between two
calls, is test_ways.py and test_sequences.py; here is what no way of theirs draws.
"""

import copy
import gc
import weakref

import pytest
import torch
from beside import formula
from course import CourseAttention
from profiled import projections
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast.backends.route import REUSE_ELEMENTS
from bahdanau_fast.memory import ProjectedKeys

B, TQ, TK, DK, DQ, H = 3, 1, 53, 17, 5, 19
# Keys that are faster projected than remembered are not in question here.
assert min(B * TK * DK, B * TK * H) >= REUSE_ELEMENTS


def held(module):
    """The projection that is remembered, or None."""
    entry = module._cache._entry
    if entry is None or entry.projected() is None:
        return None
    return ProjectedKeys(entry.projected(), entry.table, entry.keys_max)


def truth(module, query, keys):
    return formula(module, query, keys, keys)[0]


def agrees(module, query, keys):
    torch.testing.assert_close(module(query, keys, keys), truth(module, query, keys))


@pytest.fixture(params=["tanh"])
def module(request):
    torch.manual_seed(0)
    return bf.AdditiveAttention(DK, DQ, H, activation=request.param)


@pytest.fixture
def keys():
    return torch.randn(B, TK, DK, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def query():
    return torch.randn(B, TQ, DQ, generator=torch.Generator().manual_seed(2))


# ---- when keys are projected ---------------------------------------------------------------------


@pytest.mark.parametrize("module", ["tanh", "relu"], indirect=True)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_keys_are_projected_once(module, keys, query, mode):
    def loop():
        for step in range(10):  # a query, or a state
            module(query + step if step % 2 else query[:, 0] + step, keys, keys)

    def on_a_memory():
        memory = module.memory(keys)
        for step in range(10):
            module.attend(query + step, memory)

    with mode():
        keys = keys.clone()
        assert projections(on_a_memory, keys.shape) == 1
        assert projections(loop, keys.shape) == 1
        first = held(module)
        agrees(module, query, keys)
        assert held(module).keys is first.keys
        module.cache_keys = False
        assert projections(loop, keys.shape) == 10


def test_keys_that_come_once_are_not_remembered(module, query):
    def seen(keys, calls=1):
        for _ in range(calls):
            agrees(module, query, keys)
        entry = module._cache._entry
        return entry is not None and entry.storage() is keys.untyped_storage()

    sources = [torch.randn(B, TK, DK) for _ in range(6)]
    assert seen(sources[0], calls=3)
    assert seen(sources[1])  # in a loop, as the keys before them
    assert not seen(sources[2])
    assert not seen(sources[3])
    assert seen(sources[3])  # a loop again
    loop = lambda: [module(query, sources[3], sources[3]) for _ in range(5)]  # noqa: E731
    assert projections(loop, sources[3].shape) == 0
    assert seen(sources[4])


@pytest.mark.parametrize("changed", ["keys", "W_k"])
def test_keys_that_come_once_a_step_of_training_are_not_remembered(module, keys, query, changed):
    def step():
        agrees(module, query, keys)
        with torch.no_grad():
            {"keys": keys, "W_k": module.W_k.weight}[changed].mul_(0.9)
        entry = module._cache._entry
        return entry is not None and entry.state

    first = step()
    assert first
    assert step() is step() is first  # no fingerprint was taken again
    assert [agrees(module, query, keys) for _ in range(2)]
    assert module._cache._entry.state is not first  # a loop


def test_cache_keys_is_checked():
    with pytest.raises(ValueError, match="cache_keys must be True or False, got 'trust'"):
        bf.AdditiveAttention(DK, DQ, H, cache_keys="trust")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_autocast_begins_or_ends(module, keys, query, first, grad):
    def called_in(dtype, attention):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return attention(query, keys, keys)

    then = torch.float32 if first == torch.bfloat16 else torch.bfloat16
    with torch.set_grad_enabled(grad):
        want = called_in(then, copy.deepcopy(module))
        for _ in range(2):
            called_in(first, module)
        got = called_in(then, module)
    assert got.dtype == then
    assert torch.equal(got, want)


# ---- fingerprints --------------------------------------------------------------------------------


def fingerprint(keys):
    return torch.ops.bahdanau_fast.fingerprint(keys, None, None)


def test_one_byte_in_many():
    """Every element of the keys counts, the last of a block and of the tensor too."""
    keys = torch.randn(2, 1100, DK)
    bits = keys.view(torch.int32).flatten()
    marks = set()
    for at in [0, 1, 1023, 1024, 16383, 16384, len(bits) - 2, len(bits) - 1]:
        bits[at] ^= 1
        marks.add(fingerprint(keys))
        bits[at] ^= 1
    marks.add(fingerprint(keys))
    assert len(marks) == 9
    assert fingerprint(keys) in marks


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1),
    "columns": lambda x: x[..., ::2],
    "rows": lambda x: x[:, 1::3],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "turned": lambda x: x.transpose(1, 2),
    "empty": lambda x: x[:, :0],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_fingerprints_read_what_a_view_shows(name, dtype):
    whole = torch.randn(4, 60, 70).to(dtype)
    view = LAYOUTS[name](whole)
    mark = fingerprint(view)
    shown = LAYOUTS[name](torch.arange(whole.numel()).view(whole.shape))
    outside = torch.ones(whole.numel(), dtype=torch.bool)
    outside[shown.flatten()] = False
    whole[outside.view(whole.shape)] += 1
    assert fingerprint(view) == mark
    if view.numel():
        view[-1, -1, -1] += 1
        assert fingerprint(view) != mark


# ---- backward ------------------------------------------------------------------------------------


def called(module, query, keys):
    return module(query, keys, keys)


def grads_of(run, module):
    module.zero_grad()
    run()
    return [p.grad for p in module.parameters() if p.grad is not None]


same = torch.testing.assert_close


def same_gradients(module, steps):
    """Of steps by the module and by the formula: results, and gradients of the module."""
    same(*(grads_of(lambda by=by: steps(by), module) for by in (called, truth)))


@pytest.mark.parametrize("together", [True, False])
def test_nothing_is_held_after_the_last_backward(module, keys, query, together):
    def steps(by):
        losses = [by(module, query + i, keys).square().sum() for i in range(4)]
        for loss in [sum(losses)] if together else losses:
            loss.backward()

    same_gradients(module, steps)
    called(module, query, keys).sum().backward()
    assert held(module) is None


def test_a_second_backward_needs_the_graph(module, keys, query):
    loss = sum(module(query + i, keys, keys).sum() for i in range(3))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("tk", [2, TK])  # small calls are one operator
def test_inputs_changed_in_place_before_backward(module, query, tk):
    """As plain code: an error where a gradient needs the value, else none."""
    keys = torch.randn(B, tk, DK)

    def run(by, at):
        tensors = [query.clone(), keys.clone()]
        out = by(module, *tensors)
        tensors[at].add_(1)
        out.square().sum().backward()

    for at in (0, 1):
        for by in (called, truth):
            with pytest.raises(RuntimeError, match="inplace operation"):
                run(by, at)
    module.W_q.requires_grad_(False)
    same_gradients(module, lambda by: run(by, 0))


@pytest.mark.parametrize("changed", ["query", "W_q"])
def test_a_graph_of_gradients_needs_inputs_as_they_were(module, query, changed):
    """Of those too whose own gradient nobody asks for: it is made of all of them."""
    keys = torch.randn(B, 2, DK, requires_grad=True)  # so few that a call is one operator

    def grad(by, change):
        inputs = {"query": query.clone().requires_grad_(), "W_q": module.W_q.weight}
        loss = by(module, inputs["query"], keys).square().sum()
        if change:
            inputs[changed].detach().add_(1.0)
        return torch.autograd.grad(loss, keys, create_graph=True)

    same(grad(called, change=False), grad(truth, change=False))
    with pytest.raises(RuntimeError, match="inplace operation"):
        grad(called, change=True)


@pytest.mark.parametrize("tk", [2, TK])
@pytest.mark.parametrize("changed", ["query", "keys", "values", "W_q", "W_k", "w_v"])
def test_the_versions_that_an_error_names(module, query, changed, tk):
    inputs = {"query": query, "keys": torch.randn(B, tk, DK), "values": torch.randn(B, tk, 4)}
    layers = {name: getattr(module, name).weight for name in ("W_q", "W_k", "w_v")}
    for number, x in enumerate([*inputs.values(), *layers.values()]):  # no two versions alike
        for _ in range(10 * number):
            x.detach().mul_(1.0)
        x.requires_grad_()
    context = module(*inputs.values())
    x = (inputs | layers)[changed]
    before = x._version
    x.detach().add_(1.0)
    said = rf"at version {before + 1}[,;] expected version {before}\b"  # autograd's has a ;
    with pytest.raises(RuntimeError, match=said):
        context.square().sum().backward()


@pytest.mark.parametrize("of", ["keys and values", "values"])
def test_a_history_that_is_cut(module, keys, query, of):
    """Same bytes, same tensor, another node of the graph."""
    encoder, source = nn.Linear(4, DK), torch.randn(B, TK, 4)
    plain = CourseAttention(DK, DQ, H)
    plain.load_state_dict(module.state_dict())

    def run(attention, values_of):
        encoder.zero_grad()
        h = encoder(source) * 1
        used = h if of == "keys and values" else keys
        first = sum(attention(query + i, used, values_of(h), None) for i in range(2))
        h.detach_().requires_grad_()
        attention(query, used, h, None).square().sum().backward()
        first.sum().backward()
        return [encoder.weight.grad, h.grad]

    # The course's bmm keeps its values for backward, and would not have them cut.
    same(run(module, lambda h: h), run(plain, lambda h: h.view_as(h)))


# ---- what lives, and for how long ----------------------------------------------------------------


@pytest.mark.parametrize(("grad", "mode"), [(True, True), (False, True), (False, False)])
def test_keys_can_die(module, query, grad, mode):
    keys = torch.randn(B, TK, DK, requires_grad=grad)
    with torch.set_grad_enabled(mode):
        agrees(module, query, keys)
        agrees(module, query, keys)  # the second time there is a table too
    module.attention_weights = None
    projected, watched = weakref.ref(module._cache._entry.table), weakref.ref(keys)
    assert projected() is not None
    del keys
    gc.collect()
    assert watched() is None
    assert held(module) is None
    assert projected() is None


def test_no_cycle_keeps_the_graph(module, query):
    # Without the garbage collector: reference counts alone must free a step.
    gc.disable()
    try:
        keys = torch.randn(B, TK, DK, requires_grad=True)
        module(query, keys, keys).sum().backward()
        module.attention_weights = None
        watched = weakref.ref(keys)
        del keys
        assert watched() is None
    finally:
        gc.enable()


def test_keys_die_after_the_last_backward_though_a_result_lives(module, query):
    encoder, source = nn.Linear(4, DK), torch.randn(B, TK, 4)
    keys = encoder(source)
    context = module(query, keys, source)
    context.sum().backward()
    watched = weakref.ref(keys.untyped_storage())
    del keys
    assert watched() is None
    assert context.grad_fn is not None


def test_the_module_can_die(keys, query):
    module = bf.AdditiveAttention(DK, DQ, H)
    context = module(query, keys, keys)
    watched = weakref.ref(module._cache)
    del module
    gc.collect()
    assert watched() is None
    context.sum().backward()  # the hook finds nobody to tell

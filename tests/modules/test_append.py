"""Attention over a history: a memory that grows is what all its keys at once would be."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from beside import as_exact, with_gradients
from decoders import EXACT, Low
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast.memory.room import Room
from bahdanau_fast.modules.base import Additive

B, T, D, H, DV = 4, 9, 5, 7, 3


def changed(layer):
    module = bf.AdditiveAttention(D, D, H, bias=True)
    setattr(module, layer, Low(getattr(module, layer)))
    return module


KINDS = {
    "additive": lambda: bf.AdditiveAttention(D, D, H),
    "bias": lambda: bf.AdditiveAttention(D, D, H, bias=True),
    "relu": lambda: bf.AdditiveAttention(D, D, H, activation="relu"),
    "another W_k": lambda: changed("W_k"),
    "another w_v": lambda: changed("w_v"),
    "mlp": lambda: bf.MLPAttention(H, D),
    "dot": bf.DotProductAttention,
    "coverage": lambda: bf.LocationAttention(D, D, H, channels=None),
}


def made(kind="bias", dtype=torch.float64):
    torch.manual_seed(0)
    module = KINDS[kind]().to(dtype)
    sizes = {"queries": D, "keys": D, "values": DV}
    return module, {n: torch.randn(B, T, d).to(dtype).requires_grad_() for n, d in sizes.items()}


def located(module, step):
    """The further argument of LocationAttention, of a memory of so many keys."""
    if not isinstance(module, bf.LocationAttention):
        return ()
    like = next(module.parameters())
    return (torch.linspace(0, 1, B * step).view(B, 1, step).to(like),)


def grown(module, inputs, first=1, step=1, backwards=False, select=lambda memory: memory):
    """Contexts and weights of all steps over a memory that grows; last the memory."""
    queries, keys, values = inputs.values()
    memory, results = module.memory(keys[:, :first], values[:, :first]), []
    for end in range(first, T + 1, step):
        if end > first:
            memory = select(memory.append(keys[:, end - step : end], values[:, end - step : end]))
        context = module.attend(queries[:, end - 1], memory, *located(module, end))
        results += [context, module.attention_weights]
        if backwards:
            context.cos().sum().backward()
    return results


def anew(module, inputs, first=1, step=1):
    """The same, where every step projects all keys."""
    queries, keys, values = inputs.values()
    results = []
    for end in range(first, T + 1, step):
        memory = module.memory(keys[:, :end], values[:, :end])
        results += [module.attend(queries[:, end - 1], memory, *located(module, end))]
        results += [module.attention_weights]
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (0, 3)])
def test_as_all_keys_anew(kind, sizes):
    module, inputs = made(kind)
    if not sizes[0]:  # a memory without keys to begin with
        empty = module.memory(inputs["keys"][:, :0], inputs["values"][:, :0])
        whole = empty.append(inputs["keys"], inputs["values"])
        got = [module.attend(inputs["queries"][:, -1], whole, *located(module, T))]
        want = anew(module, inputs, T)[:1]
    else:
        got, want = grown(module, inputs, *sizes), anew(module, inputs, *sizes)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            now = grown(module, inputs, *(sizes if sizes[0] else (T, 1)))[: len(want)]
        torch.testing.assert_close(now, [x.detach() for x in want], **EXACT)
    got, want = (with_gradients(x, module, inputs) for x in (got, want))
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_parity_rule(dtype, autocast):
    module, inputs = made(dtype=torch.float32 if autocast else dtype)
    exact = copy.deepcopy(module).double()
    doubled = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    want = with_gradients(anew(exact, doubled), exact, doubled)
    with torch.autocast("cpu", dtype, enabled=autocast and dtype is not torch.float32):
        ours = with_gradients(grown(module, inputs), module, inputs)
        with bf.backends.use("reference"):
            eager = with_gradients(anew(module, inputs), module, inputs)
            ours_eager = with_gradients(grown(module, inputs), module, inputs)
    as_exact(ours, eager, want, dtype)
    as_exact(ours_eager, eager, want, dtype)


@pytest.mark.parametrize("grad", [False, True])
def test_rows_are_projected_and_copied_once(grad, monkeypatch):
    projected, rooms = [], []
    own, begin = Additive._keys, Room.__init__
    monkeypatch.setattr(
        Additive, "_keys", lambda m, keys, *a: projected.append(keys.shape[1]) or own(m, keys, *a)
    )
    monkeypatch.setattr(Room, "__init__", lambda *a: rooms.append(a[2]) or begin(*a))
    attention, states = bf.AdditiveAttention(D, D, H), torch.randn(200, B, D)
    with torch.set_grad_enabled(grad):
        memory = attention.memory(states[0].unsqueeze(1))
        for state in states[1:]:
            memory = memory.append(state)
    assert projected == [1] * 200
    assert rooms == [4, 10, 22, 46, 94, 190, 382]
    assert torch.equal(memory.values, states.transpose(0, 1))


@pytest.mark.parametrize("grad", [False, True])
def test_two_that_grow_from_one(grad):
    module, inputs = made()
    queries, keys, values = inputs.values()

    def both(memory_of):
        old = memory_of(slice(0, 3))
        found = [module.attend(queries[:, 0], old)]
        first = old.append(keys[:, 3], values[:, 3])
        second = old.append(keys[:, 4:6], values[:, 4:6])
        third = first.append(keys[:, 6], values[:, 6])
        again = first.append(keys[:, 7], values[:, 7])
        memories = old, first, second, third, again
        return found + [module.attend(queries[:, 1], memory) for memory in memories]

    rows = [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 1, 2, 3, 6], [0, 1, 2, 3, 7]
    with torch.set_grad_enabled(grad):
        for start in (
            module.memory,
            lambda *a: module.memory(a[0][:, :1], a[1][:, :1]).append(a[0][:, 1:], a[1][:, 1:]),
        ):
            got = both(lambda at, start=start: start(keys[:, at], values[:, at]))
            want = [module.attend(queries[:, 0], module.memory(keys[:, :3], values[:, :3]))]
            for of in rows:
                memory = module.memory(keys[:, of], values[:, of])
                want.append(module.attend(queries[:, 1], memory))
            if grad:
                got, want = (with_gradients(x, module, inputs) for x in (got, want))
            torch.testing.assert_close(got, want, **EXACT)


def test_modes_take_turns():
    """Buffers of inference mode are not written to outside; nor does a write disturb a graph."""
    module, inputs = made()
    queries, keys, values = inputs["queries"], inputs["keys"].detach(), inputs["values"].detach()
    with torch.inference_mode():
        memory = module.memory(keys[:, :1], values[:, :1]).append(keys[:, 1], values[:, 1])
    got, want = [], []
    modes = torch.no_grad, torch.enable_grad, torch.no_grad, torch.inference_mode, torch.no_grad
    for step, mode in enumerate(modes, 2):
        with mode():
            memory = memory.append(keys[:, step], values[:, step])
        if mode is not torch.inference_mode:  # whose tensors no graph takes
            got.append(module.attend(queries[:, step], memory))
            upto = slice(step + 1)
            want.append(
                module.attend(queries[:, step], module.memory(keys[:, upto], values[:, upto]))
            )
    torch.testing.assert_close(got, want, **EXACT)
    of = [queries, module.W_q.weight, module.w_v.weight]
    got, want = (torch.autograd.grad(torch.stack(x).cos().sum(), of) for x in (got, want))
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("kind", ["bias", "another W_k", "dot", "coverage"])
def test_a_backward_for_each_step(kind):
    """As plain code may run it, which projects at every step; torch's own nodes keep nothing."""
    module, inputs = made(kind)
    if kind == "another W_k":
        with pytest.raises(RuntimeError, match="second time"):
            grown(module, inputs, backwards=True)
        return
    grown(module, inputs, backwards=True)
    leaves = [*inputs.values(), *module.parameters()]
    loss = sum(x.cos().sum() for x in anew(module, inputs)[::2])
    torch.testing.assert_close(
        [x.grad for x in leaves], list(torch.autograd.grad(loss, leaves)), **EXACT
    )


def test_gradients_by_finite_differences():
    module, inputs = made()

    def function(*tensors):
        return tuple(grown(module, dict(zip(inputs, tensors, strict=True)), 2, 3))

    leaves = tuple(inputs.values())
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    # Differences of gradients, of errors some 1e4 larger than of values.
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True, atol=1e-4)


def test_masks_beams_batches_and_rows():
    module, inputs = made()
    queries, keys, values = (x.detach() for x in inputs.values())
    mask = torch.arange(4) < torch.tensor([[2], [4], [0], [1]])
    memory = module.memory(keys[:, :4], values[:, :4], mask=mask)
    longer = memory.append(keys[:, 4:], values[:, 4:])
    seen = torch.cat((mask, torch.ones(B, T - 4, dtype=torch.bool)), 1)
    want = module(queries, keys, values, mask=seen)  # of T beams
    torch.testing.assert_close(module.attend(queries, longer), want, **EXACT)
    rows = [2, 0]
    again = memory.append(keys[:, 4], values[:, 4])[rows].append(keys[rows, 5:], values[rows, 5:])
    at = [0, 1, 2, 3, 4, *range(5, T)]
    want = module(queries[rows], keys[rows][:, at], values[rows][:, at], mask=seen[rows])
    torch.testing.assert_close(module.attend(queries[rows], again), want, **EXACT)
    nested = module.memory(*(x[:, :4].unflatten(0, (2, 2)) for x in (keys, values)))
    state = nested.append(*(x[:, 4].unflatten(0, (2, 2)) for x in (keys, values)))
    want = module(queries, keys[:, :5], values[:, :5]).unflatten(0, (2, 2))
    torch.testing.assert_close(module.attend(queries.unflatten(0, (2, 2)), state), want, **EXACT)
    alone = module.memory(keys[0, :4]).append(keys[0, 4])
    want = module(queries[:1], keys[:1, :5], keys[:1, :5])[0]
    torch.testing.assert_close(module.attend(queries[0], alone), want, **EXACT)


def test_compiled_in_one_graph():
    backend = "aot_eager"
    module, inputs = made()
    compiled = torch.compile(partial(grown, module), fullgraph=True, backend=backend)
    got, want = compiled(inputs, 5, 2), grown(module, inputs, 5, 2)
    got, want = (with_gradients(x, module, inputs) for x in (got, want))
    torch.testing.assert_close(got, want, **EXACT)
    memory = module.memory(inputs["keys"], inputs["values"])
    more = inputs["keys"][:, 0], inputs["values"][:, 0]
    step = torch.compile(lambda m: m.append(*more).values * 1, fullgraph=True, backend=backend)
    torch.testing.assert_close(step(memory), memory.append(*more).values)


class Steps(nn.Module):
    def __init__(self, attention, way=grown):
        super().__init__()
        self.attention, self.way = attention, way

    def forward(self, queries, keys, values):
        inputs = {"queries": queries, "keys": keys, "values": values}
        return tuple(self.way(self.attention, inputs, 3, 2)[::2])


def test_exported_traced_and_transformed():
    module, inputs = made()
    steps, tensors = Steps(module), tuple(x.detach() for x in inputs.values())
    want = steps(*tensors)
    torch.testing.assert_close(torch.export.export(steps, tensors).module()(*tensors), want)
    with warnings.catch_warnings():  # of sizes that become constants
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(steps, tensors)
    torch.testing.assert_close(traced(*tensors), want)
    twice = torch.vmap(steps)(*(torch.stack([x, x + 1]) for x in tensors))
    torch.testing.assert_close([x[1] for x in twice], list(steps(*(x + 1 for x in tensors))))
    tangents = tuple(x.cos() for x in tensors)
    both = (torch.func.jvp(of, tensors, tangents) for of in (steps, Steps(module, anew)))
    torch.testing.assert_close(*both)


def test_a_recurrent_layer_over_what_has_grown():
    torch.manual_seed(0)
    layer = bf.AttentionGRU(3, D, num_hiddens=H, dtype=torch.float64)
    inputs, keys = torch.randn(6, B, 3).double(), torch.randn(B, T, D).double().requires_grad_()
    found = []
    for memory in (
        layer.attention.memory(keys),
        layer.attention.memory(keys[:, :4]).append(keys[:, 4:6]).append(keys[:, 6:]),
    ):
        outputs, _ = layer(inputs, memory=memory)
        leaves = [keys, *layer.parameters()]
        found.append([outputs, *torch.autograd.grad(outputs.cos().sum(), leaves)])
    torch.testing.assert_close(*found, **EXACT)


def test_copies():
    module, inputs = made()
    queries, keys, values = inputs.values()
    module.history = module.memory(keys[:, :4], values[:, :4]).append(keys[:, 4:], values[:, 4:])
    want = module.attend(queries, module.history)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin.attend(queries, twin.history), want, **EXACT)
        with pytest.raises(ValueError, match="memory must be of a module, to be appended to, got"):
            twin.history.append(keys, values)
    of_another = copy.deepcopy(module.history)  # alone: of the same module
    torch.testing.assert_close(
        module.attend(queries, of_another.append(keys, values)),
        module.attend(queries, module.history.append(keys, values)),
        **EXACT,
    )

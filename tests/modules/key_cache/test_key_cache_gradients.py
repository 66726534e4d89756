"""Calls that share a projection of the keys have the gradients of calls that share nothing."""

import pytest
import torch
from course import CourseAttention
from remembered import DK, DQ, TK, TQ, B, H, agrees, held, truth
from torch import nn

import bahdanau_fast as bf


def grads_of(run, module):
    module.zero_grad()
    run()
    return [p.grad.clone() for p in module.parameters()]


def same_gradients(module, ours, plain):
    for a, b in zip(grads_of(ours, module), grads_of(plain, module), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_two_backwards_over_the_same_keys(module, keys, query):
    def steps(function):
        for i in range(2):  # no optimizer step in between: gradients add up
            function(module, query + i, keys).square().sum().backward()

    def ours(module, query, keys):
        return module(query, keys, keys)

    same_gradients(module, lambda: steps(ours), lambda: steps(truth))
    module(query, keys, keys).sum().backward()
    assert held(module) is None


def test_calls_have_a_backward_each(module, keys, query):
    def run(function):
        calls = [function(module, query + i, keys) for i in range(4)]
        for i, call in enumerate(calls):
            ((i + 1) * call.square()).sum().backward()

    same_gradients(module, lambda: run(lambda m, q, k: m(q, k, k)), lambda: run(truth))
    assert held(module) is None


def test_gradients_step_by_step(module, keys, query):
    keys.requires_grad_()

    def run(function):
        calls = [function(module, query + i, keys) for i in range(4)]
        inputs = [keys, module.W_k.weight, module.w_v.weight]
        return [g for call in calls for g in torch.autograd.grad(call.square().sum(), inputs)]

    ours, plain = run(lambda m, q, k: m(q, k, k)), run(truth)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_second_backward_needs_the_graph(module, keys, query):
    loss = sum(module(query + i, keys, keys).sum() for i in range(3))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives_of_a_loop(module, keys, query):
    keys.requires_grad_()

    def run(function):
        loss = sum(function(module, query + i, keys).square().sum() for i in range(3))
        (grad,) = torch.autograd.grad(loss, keys, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [keys, module.W_k.weight])

    for a, b in zip(run(lambda m, q, k: m(q, k, k)), run(truth), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_lengths_counted_up_between_steps(module, keys, query):
    def run(function):
        lens = torch.tensor([1, 20, 50])
        calls = []
        for i in range(4):
            calls.append(function(query + i, lens))
            lens.add_(1)
        torch.cat(calls, 1).square().sum().backward()

    same_gradients(
        module,
        lambda: run(lambda q, lens: module(q, keys, keys, lens)),
        lambda: run(lambda q, lens: truth(module, q, keys, lens)),
    )


@pytest.mark.parametrize("tk", [2, TK])  # small calls are one operator
def test_inputs_changed_in_place_before_backward(module, query, tk):
    """As plain code: an error where a gradient needs the value, else none."""
    keys = torch.randn(B, tk, DK)

    def run(function, change):
        module.zero_grad()
        tensors = [query.clone(), keys.clone()]
        out = function(module, *tensors)
        change(tensors)
        out.square().sum().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    def ours(m, q, k):
        return m(q, k, k)

    for at in (0, 1):
        for function in (ours, truth):
            with pytest.raises(RuntimeError, match="inplace operation"):
                run(function, lambda tensors, at=at: tensors[at].add_(1))
    module.W_q.requires_grad_(False)
    got = run(ours, lambda tensors: tensors[0].add_(1))
    want = run(truth, lambda tensors: tensors[0].add_(1))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


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


def test_a_history_that_is_cut(module, query):
    """Same bytes, same tensor, another node of the graph."""
    encoder, source = nn.Linear(4, DK), torch.randn(B, TK, 4)
    plain = CourseAttention(DK, DQ, H)
    plain.load_state_dict(module.state_dict())

    def run(attention, values_of):
        encoder.zero_grad()
        h = encoder(source) * 1
        first = sum(attention(query + i, h, values_of(h), None) for i in range(2))
        h.detach_().requires_grad_()
        attention(query, h, h, None).square().sum().backward()
        first.sum().backward()
        return [encoder.weight.grad, h.grad]

    # The course's bmm keeps its values for backward, and would not have them cut.
    cut, kept = run(module, lambda h: h), run(plain, lambda h: h.view_as(h))
    for a, b in zip(cut, kept, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_parameters_swapped(module, keys, query):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad():  # a graph holds w_v, ours or plain, and refuses the swap
            agrees(module, query, keys)
            module.load_state_dict(bf.AdditiveAttention(DK, DQ, H).state_dict())
            agrees(module, query, keys)
            torch.utils.swap_tensors(keys, -keys)
            agrees(module, query, keys)
            assert module.double()(query.double(), *[keys.double()] * 2).dtype == torch.float64
            agrees(module.float(), query, keys)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_retain_graph(module, keys, query):
    def run(function):
        loss = function(module, query, keys).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        function(module, query, keys).sum().backward()

    same_gradients(module, lambda: run(lambda m, q, k: m(q, k, k)), lambda: run(truth))


def test_truncated_backpropagation(module, keys, query):
    # Encoder outputs used for several windows, each with a backward of its own.
    encoder = nn.Linear(4, DK)
    source = torch.randn(B, TK, 4)

    def windows(function):
        encoder.zero_grad()
        keys = encoder(source)
        for i in range(3):
            steps = [function(module, query + i + 0.1 * s, keys) for s in range(4)]
            torch.cat(steps, 1).square().sum().backward(retain_graph=True)
        return encoder.weight.grad.clone()

    got = windows(lambda m, q, k: m(q, k, k))
    torch.testing.assert_close(got, windows(truth), rtol=1e-4, atol=1e-5)
    same_gradients(module, lambda: windows(lambda m, q, k: m(q, k, k)), lambda: windows(truth))


def test_a_backward_that_stops_before_the_keys(module, keys, query):
    values = keys.clone().requires_grad_()
    torch.autograd.grad(module(query, keys, values).sum(), values)
    same_gradients(
        module,
        lambda: module(query, keys, keys).sum().backward(),
        lambda: truth(module, query, keys).sum().backward(),
    )


def test_an_unchanged_loop_of_fifty_steps(module, keys):
    keys.requires_grad_()
    lens = torch.tensor([3, 53, 0])
    queries = torch.randn(50, B, TQ, DQ)

    def loop(function):
        keys.grad = None
        steps = [function(q) for q in queries]
        torch.cat(steps, 1).square().sum().backward()
        return torch.cat(steps, 1).detach(), keys.grad.clone()

    ours = loop(lambda q: module(q, keys, keys, lens))
    plain = loop(lambda q: truth(module, q, keys, lens))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    same_gradients(
        module,
        lambda: loop(lambda q: module(q, keys, keys, lens)),
        lambda: loop(lambda q: truth(module, q, keys, lens)),
    )
    assert held(module) is None

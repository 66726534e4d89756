"""``attention_weights`` stand between queries and context in the graph, as the course's do."""

import pytest
import torch
from course import CourseAttention

import bahdanau_fast as bf
from bahdanau_fast.ops.dropout import dropout_factors

DQ, DK, DV, H = 6, 5, 4, 8


def data(B=3, Tk=9, Tq=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, Tq, DQ), (B, Tk, DK), (B, Tk, DV)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in drawn], torch.tensor([Tk, 2, 5])


def pair(dtype=torch.float64):
    torch.manual_seed(0)
    ours = bf.AdditiveAttention(DK, DQ, H).to(dtype)
    plain = CourseAttention(DK, DQ, H).to(dtype)
    plain.W_q, plain.W_k, plain.w_v = ours.W_q, ours.W_k, ours.w_v
    return ours, plain


def called(module, queries, keys, values, lens):
    return module(queries, keys, values, lens), module.attention_weights


def looped(module, queries, keys, values, lens):
    """A decoder's loop: keys are projected once, and share a node of the graph."""
    for _ in range(3):
        context = module(queries, keys, values, lens)
    return context, module.attention_weights


def on_a_memory(module, queries, keys, values, lens):
    if not hasattr(module, "memory"):
        return called(module, queries, keys, values, lens)
    memory = module.memory(keys, values, lens)
    return module.attend(queries, memory), module.attention_weights


LARGE = {"B": 3, "Tk": 200}
WAYS = {
    "one operator": (called, {}),
    "projected": (called, LARGE),
    "a loop": (looped, LARGE),
    "a memory": (on_a_memory, LARGE),
}


def results(module, way, look):
    """What a look at the weights finds, and the gradients of everything."""
    attend, sizes = WAYS[way]
    inputs, lens = data(**sizes)
    context, weights = attend(module, *inputs, lens)
    found = look(context.sin().sum(), weights)
    gradients = [x.grad for x in (*inputs, *module.parameters())]
    module.zero_grad()
    return [*found, *(g.clone() for g in gradients if g is not None)]


def retained(loss, weights):
    weights.retain_grad()
    loss.backward()
    return [weights.grad]


def asked_for(loss, weights):
    return torch.autograd.grad(loss, [weights], retain_graph=True)


def asked_for_before_backward(loss, weights):
    found = torch.autograd.grad(loss, [weights], retain_graph=True)
    loss.backward()
    return found


def hooked(loss, weights):
    found = []
    weights.register_hook(found.append)
    loss.backward()
    return found


def changed(loss, weights):
    weights.register_hook(lambda grad: 3 * grad)
    loss.backward()
    return []


def used_twice(loss, weights):
    """By a term of its own beside the context."""
    weights.retain_grad()
    (loss + weights.square().sum()).backward()
    return [weights.grad]


def differentiated_again(loss, weights):
    (grad,) = torch.autograd.grad(loss, weights, create_graph=True)
    (grad * weights).square().sum().backward()
    return [grad.detach()]


LOOKS = (
    retained, asked_for, asked_for_before_backward, hooked, changed, used_twice,
    differentiated_again,
)  # fmt: skip


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_as_the_courses_module(way, look):
    ours, plain = (results(module, way, look) for module in pair())
    assert len(ours) == len(plain) >= 1
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("Tk", [9, 200])
def test_through_dropout(Tk):
    """The mask is that of the forward pass; second derivatives go through it, too."""
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        inputs, lens = data(Tk=Tk)
        module = bf.AdditiveAttention(DK, DQ, H, dropout=0.5).double()
        torch.manual_seed(7)
        context = module(*inputs, lens)
        weights = module.attention_weights
        if not ours:
            torch.manual_seed(7)
            seed = torch.randint(2**62, (1,))
            factors = dropout_factors(seed, tuple(weights.shape), 0.5)
            assert set(factors.unique().tolist()) == {0.0, 2.0}
            again = torch.bmm(weights * factors, inputs[2])
            torch.testing.assert_close(again, context)
            context = again
        (grad,) = torch.autograd.grad(context.sin().sum(), weights, create_graph=True)
        (grad * weights).square().sum().backward()
        found.append([grad, *(x.grad for x in inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_in_half_precision():
    inputs, lens = data(Tk=200)
    exact = results(pair()[1], "projected", retained)[0]
    ours, plain = pair(torch.bfloat16)
    errors = []
    for module in (ours, plain):
        halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
        context = module(*halves, lens)
        module.attention_weights.retain_grad()
        context.sin().sum().backward()
        errors.append((module.attention_weights.grad - exact).abs().max())
    assert errors[0] <= 2 * errors[1] + 2.0**-7 * exact.abs().max()


@pytest.mark.parametrize("channels", [3, None])
def test_with_a_location(channels):
    inputs, _ = data(Tq=1)
    module = bf.LocationAttention(DK, DQ, H, channels, 5).double()
    location = torch.rand(3, 1, 9, dtype=torch.float64, requires_grad=True)
    context = module(*inputs, location)
    weights = module.attention_weights
    (found,) = torch.autograd.grad(context.sum(), weights, retain_graph=True)
    torch.testing.assert_close(found[:, 0], inputs[2].sum(2))
    (whole,) = torch.autograd.grad(context.sum(), location, retain_graph=True)
    (by_weights,) = torch.autograd.grad(weights, location, found)
    torch.testing.assert_close(by_weights, whole)


def test_of_a_decoder_state():
    (queries, keys, values), lens = data(Tq=1)
    module, _ = pair()
    context = module(queries[:, 0], keys, values, lens)
    (found,) = torch.autograd.grad(context.sum(), module.attention_weights)
    torch.testing.assert_close(found, values.sum(2))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_of_the_function(activation):
    (queries, keys, values), lens = data()
    weights_given = (
        torch.randn(H, DQ).double(),
        torch.randn(H, DK).double(),
        torch.randn(H).double(),
    )
    context, weights = bf.additive_attention(
        queries, keys, values, *weights_given, lens, activation=activation
    )
    (found,) = torch.autograd.grad(context.sum(), weights)
    torch.testing.assert_close(found, values.sum(2).unsqueeze(1).expand_as(found))

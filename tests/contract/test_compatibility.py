"""The lines of docs/compatibility.md that no other file holds."""

import copy

import pytest
import torch
from beside import as_exact, close
from course import CourseAttention
from torch._subclasses import FakeTensorMode

import bahdanau_fast as bf
from bahdanau_fast import checks


def data(dtype=torch.float32, hidden=8):
    torch.manual_seed(0)
    course = CourseAttention(3, 4, hidden)
    ours = bf.AdditiveAttention(3, 4, hidden)
    ours.load_state_dict(course.state_dict())
    inputs = [torch.randn(s).to(dtype) for s in ((20, 3, 4), (20, 6, 3), (20, 6, 2))]
    return course.to(dtype), ours.to(dtype), inputs


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("hidden", [8, 300])
def test_autocast_gives_the_dtypes_of_the_course_code(kind, given, hidden):
    course, ours, inputs = data(given, hidden)
    exact = copy.deepcopy(course).double()(*(x.double() for x in inputs), None)
    with torch.autocast("cpu", kind or torch.bfloat16, enabled=kind is not None):
        want = course(*inputs, None)
        weights = [layer.weight for layer in (ours.W_q, ours.W_k, ours.w_v)]
        calls = {
            "module": lambda: (ours(*inputs), ours.attention_weights),
            "memory": lambda: (ours.attend(inputs[0], ours.memory(*inputs[1:])), None),
            "function": lambda: bf.additive_attention(*inputs, *weights),
        }
        for name, call in calls.items():
            context, attention = call()
            assert context.dtype == want.dtype, name
            if want.dtype is torch.float64:
                close(context, want)
            else:
                as_exact([context], [want], [exact], want.dtype)
            if attention is not None:
                assert attention.dtype == course.attention_weights.dtype, name
        context.sum().backward()
    assert all(weight.grad.dtype == given for weight in weights)


def test_autocast_takes_inputs_of_two_dtypes_as_linear_does():
    _, ours, (q, k, v) = data()
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(q.bfloat16(), k, v.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="keys must have the dtype of queries"):
        ours(q.bfloat16(), k, v)


def test_softmax_under_autocast_is_fp32_on_gpus_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert not checks.softmax_in_fp32(torch.device("cpu"))
        assert torch.softmax(torch.ones(2, 3).bfloat16(), -1).dtype == torch.bfloat16
    gpu = torch.device("cuda")
    assert not checks.softmax_in_fp32(gpu)
    torch.set_autocast_enabled("cuda", True)  # the flag can be set without a GPU
    try:
        assert checks.softmax_in_fp32(gpu)
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("Tk", [6, 500])  # keys to work on anew, and keys to remember
@pytest.mark.parametrize("hidden", [2, 300])
def test_meta_and_fake_tensors(hidden, Tk):
    def run(module, device):
        shapes = (2, 3, 4), (2, Tk, 3), (2, Tk, 5)
        q, k, v = (torch.randn(s, device=device) for s in shapes)
        lens = torch.ones(2, device=device)
        for out in (module(q, k, v, lens), module.attend(q, module.memory(k, v, lens))):
            assert (out.shape, out.device.type) == ((2, 3, 5), device)
            assert module.attention_weights.shape == (2, 3, Tk)
            out.sum().backward()
        for parameter in module.parameters():
            assert parameter.grad.shape == parameter.shape

    run(bf.AdditiveAttention(3, 4, hidden, device="meta"), "meta")
    with torch.device("meta"):
        lazy = bf.AdditiveAttention(hidden)
    run(lazy, "meta")
    with FakeTensorMode():
        run(bf.AdditiveAttention(3, 4, hidden), "cpu")
    real = bf.AdditiveAttention(3, 4, hidden, device="meta").to_empty(device="cpu")
    assert real.W_q.weight.device.type == "cpu"
    q = torch.randn(2, 3, 4, device="meta")
    with pytest.raises(TypeError, match="keys must have the dtype of queries"):
        lazy(q, torch.zeros(2, 3, 3, device="meta", dtype=torch.float64), q)


class Nested(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        return self.layer(*inputs)


def compiled(layer, *inputs):
    """The result of the first call, None where torch.compile cannot make it."""
    torch._dynamo.reset()
    try:
        model = Nested(layer)
        return torch.compile(model, backend="eager", fullgraph=True, dynamic=True)(*inputs)
    except torch._dynamo.exc.InternalTorchDynamoError:
        return None


def test_compiled_for_any_sizes_before_they_are_known():
    """No more than PyTorch's own lazy layer can, and all is well after a call."""
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    own = compiled(torch.nn.LazyLinear(8), q)
    lazy = bf.AdditiveAttention(8)
    got = compiled(lazy, q, k, v)
    assert (got is None) == (own is None)
    want = lazy(q, k, v)
    torch.testing.assert_close(compiled(lazy, q, k, v), want)


def test_compiled_where_dynamo_cannot_ask_what_autocast_knows(monkeypatch):
    """As that of torch 2.11: the question ends a graph."""
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    layer = bf.AdditiveAttention(3, 4, 8)
    want = layer(q, k, v)

    def refuse(_):
        torch._dynamo.graph_break()

    monkeypatch.setattr(torch.amp, "is_autocast_available", refuse)
    torch.testing.assert_close(compiled(layer, q, k, v), want)

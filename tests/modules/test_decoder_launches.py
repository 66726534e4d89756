"""What decides how a decoder takes its steps, and what it launches where launches do nothing."""

import re
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from decoders import CELLS, call, given, layer, results
from host_only import routed
from mock_cuda import kernel_of, launches, mock
from torch.profiler import profile
from torch.utils._pytree import tree_map_only

import bahdanau_fast as bf
from bahdanau_fast.backends.route import DecoderFacts, route_decoder
from bahdanau_fast.ops.operator import operators

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERATORS = "decode", "decode_backward", "attend_backward_keys"
STEP = "decode_forward"  # the attention of a single step


@contextmanager
def autocast(dtype):
    """As ``torch.autocast`` for "cuda", which is off where there is no GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or before)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def launched(function):
    """What a function gives, and the kernels that it launches."""
    mock().calls()
    mock().note(True)
    found = function()
    mock().note(False)
    return found, [kernel_of(launch) for launch in launches(mock().calls())]


def noted(ran, name, run, *args):
    ran.append((name, args, run(*args)))
    return ran[-1][2]


@pytest.mark.parametrize(
    ("dtype", "precision"), [(BF16, None), (FP16, None), (FP32, BF16), (FP32, FP16)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("cls", CELLS)
def test_the_number_of_steps_does_not_matter(cls, dropout, dtype, precision):
    module, calls, kernels = layer(cls, dtype=dtype, attention_dropout=dropout), [], []
    for T in (7, 40):
        tensors = given(cls, dtype=dtype, T=T)
        with profile() as record, routed("cuda"), autocast(precision):
            outputs, forward = launched(lambda x=tensors: call(module, x))
            loss = sum(x.float().sum() for x in outputs)
            grads, backward = launched(
                lambda x=tensors, y=loss: torch.autograd.grad(
                    y, [*x.values(), *module.parameters()]
                )
            )
        assert forward == ["persistent_forward"]
        assert backward[0] == "persistent_backward"
        assert len(backward) <= 6
        assert all(grad.dtype == dtype for grad in grads)
        kernels.append(backward)
        calls.append(sum(event.count for event in record.key_averages()))
    assert kernels[0] == kernels[1]
    assert calls[0] == calls[1]


# Operators of torch that are a launch each on a GPU, whatever they call on a CPU.
LAUNCHES = {
    f"aten::{name}"
    for name in (
        "_foreach_copy_", "add", "add_", "addmm", "bmm", "cat", "clone", "copy_", "fill_", "mm",
        "mul", "sum", "zero_",
    )
}  # fmt: skip


def launches_of_torch(record):
    def within(event):
        parent = event.cpu_parent
        return parent is not None and (parent.name in LAUNCHES or within(parent))

    return sum(event.name in LAUNCHES and not within(event) for event in record.events())


@pytest.mark.parametrize(("dtype", "precision", "most"), [(BF16, None, 25), (FP32, BF16, 30)])
@pytest.mark.parametrize("cls", CELLS)
def test_the_launches_of_a_training_step(cls, dtype, precision, most):
    """Of which the decoder's two need another each, which zeroes what their blocks meet at."""
    decoder = cls(64, 64, dtype=dtype)
    shapes = (50, 4, 64), (4, 7, 64)
    inputs, keys = (torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes)
    with profile() as record, routed("cuda"), autocast(precision):
        (outputs, _), forward = launched(lambda: decoder(inputs, None, keys))
        grad = outputs.detach()
        _, backward = launched(lambda: outputs.backward(grad))
    assert {"persistent_forward", "persistent_backward"} < {*forward, *backward}
    assert launches_of_torch(record) + len(forward) + len(backward) + 2 <= most


@pytest.mark.parametrize("cls", CELLS)
def test_without_gradients(cls):
    module, tensors = layer(cls, dtype=BF16), given(cls, dtype=BF16)
    with routed("cuda"), torch.no_grad():
        outputs, kernels = launched(lambda: call(module, tensors))
        assert "one launch" in of(module, tensors)
    assert kernels == ["persistent_forward"]
    assert [x.dtype for x in outputs] == [BF16] * len(outputs)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("cls", CELLS)
def test_the_operators_give_what_compiled_code_expects(cls, dropout):
    module, tensors = layer(cls, dtype=BF16, attention_dropout=dropout), given(cls, dtype=BF16)
    ran = []
    with routed("cuda"), pytest.MonkeyPatch.context() as patch:
        for name in OPERATORS:
            run = partial(noted, ran, name, operators[name].now)
            patch.setattr(operators[name], "now", run)
        results(module, tensors)
        with torch.no_grad():
            call(module, tensors)
    assert [name for name, *_ in ran] == [*OPERATORS, "decode"]
    for name, args, found in ran:
        on_meta = tree_map_only(torch.Tensor, lambda x: x.to("meta"), args)
        expected = operators[name].overload(*on_meta)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected], name


def of(module, tensors):
    """What explains a call without hidden state."""
    return module.explain(tensors["inputs"], None, tensors["keys"], tensors["values"])


@pytest.mark.parametrize(
    ("layers", "dtype", "Tk", "why"),
    [
        (1, FP32, 11, "no torch.float32"),
        (2, BF16, 11, "one layer, not 2"),
        (1, BF16, 30_000, "not one launch: "),
    ],
)
@pytest.mark.parametrize("cls", CELLS)
def test_what_does_not_fit_goes_to_the_loop(cls, layers, dtype, Tk, why):
    module = layer(cls, layers, dtype)
    tensors = given(cls, layers, dtype, T=2, Tk=Tk)
    with routed("cuda"), torch.no_grad():
        said = of(module, tensors)
        _, kernels = launched(lambda: call(module, tensors, None))
    assert said.startswith("cuda: a loop of launches")
    assert why in said
    assert set(kernels) - {"combine_splits"} == {STEP}


@pytest.mark.parametrize("units", [6, 32])
def test_tokens_are_written_in_one_launch(units):
    """What the operator is given: launches that do nothing would leave it no number of steps."""
    decoder = bf.seq2seq.Seq2SeqAttentionDecoder(7, 4, units, 1).to(BF16).eval()
    outputs, hidden = (torch.randn(n, 2, units, dtype=BF16) for n in (9, 1))
    with routed("cuda"), torch.no_grad():
        memory = decoder.memory(decoder.init_state((outputs, hidden), None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operators["decode_greedy"], "now", lambda *args: (args, None))
            (*_, w_dense, bias, left_out, _, _, _, steps), _ = decoder.write(hidden, memory, [2], 3)
    assert w_dense.shape == (16, 32)
    never = torch.isinf(bias).nonzero().flatten().tolist()
    assert never == [2, *range(7, 16)]
    assert (left_out.numel(), steps) == (0, 3)


# ---- what decides

FACTS = DecoderFacts(
    plain=True,
    device="cuda",
    backend="cuda",
    dtypes=frozenset({BF16}),
    autocast=False,
    empty=False,
    traced=False,
    plain_only=False,
    layers=1,
    records=True,
    steps=7,
    batch=2,
    recurrent_weights=1 << 20,
    problem=lambda: None,
)
ON_CPU = {"backend": "cpu", "device": "cpu"}
SHORT = ON_CPU | {"dtypes": {FP32}}


@pytest.mark.parametrize(
    ("change", "loop", "dtype", "why"),
    [
        ({}, None, BF16, "one launch"),
        ({"dtypes": {FP16}, "autocast": True}, None, FP16, "one launch"),
        ({"problem": lambda: "too large"}, "cuda", BF16, "a loop .* not one launch: too large"),
        ({"layers": 2}, "cuda", BF16, "a loop .* one layer, not 2"),
        ({"dtypes": {FP32}}, "cuda", FP32, r"a loop .* no torch\.float32"),
        ({"backend": "triton"}, "triton", BF16, r"a loop .* CUDA C\+\+ alone"),
        ({"backend": "reference"}, None, None, "step by step: .* reference"),
        ({"backend": "triton", "device": "cpu"}, None, None, "step by step: .* cells"),
        ({"dtypes": {FP32, BF16}}, None, None, "step by step: dtypes differ"),
        ({"traced": True}, None, None, "step by step: traced"),
        ({"plain": False}, None, None, "step by step: a layer"),
        (ON_CPU | {"dtypes": {FP32}}, None, FP32, "one operator"),
        (ON_CPU, None, None, "step by step: .*bfloat16 on a CPU"),
        (ON_CPU | {"autocast": True}, None, FP32, "one operator"),
        (SHORT | {"steps": 1}, None, None, "step by step: so few"),
        (SHORT | {"steps": 2}, None, FP32, "one operator"),
        (SHORT | {"steps": 1, "recurrent_weights": 1000}, None, FP32, "one operator"),
        (SHORT | {"steps": 1, "recurrent_weights": 1000, "records": False}, None, None, "step by"),
        (SHORT | {"steps": 3, "records": False}, None, None, "step by step: so few"),
        (SHORT | {"steps": 4, "records": False}, None, FP32, "one operator"),
        (SHORT | {"steps": 7, "batch": 1, "records": False}, None, None, "step by step: so few"),
        (SHORT | {"steps": 3, "recurrent_weights": 1000, "records": False}, None, FP32, "one op"),
        (SHORT | {"steps": 0, "records": False}, None, FP32, "one operator"),
        ({"steps": 1}, None, BF16, "one launch"),
    ],
)
def test_what_decides(change, loop, dtype, why):
    found = route_decoder(FACTS._replace(**change))
    assert (found.loop_backend, found.dtype) == (loop, dtype)
    assert re.match(why, found.reason)


def test_the_extension_is_asked_last():
    def problem():
        raise AssertionError("asked")

    for change in ({"layers": 2}, {"dtypes": {FP32}}, {"backend": "triton"}, ON_CPU):
        route_decoder(FACTS._replace(problem=problem, **change))

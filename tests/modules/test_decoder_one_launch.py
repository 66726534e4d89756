"""All steps of a decoder in one launch on a GPU: what decides, and sizes that are padded."""

import re

import pytest
import torch
from decoders import CELLS, EXACT, LENS, F, H, call, given, layer, results

from bahdanau_fast.backends.route import DecoderFacts, route_decoder
from bahdanau_fast.ops import decode, decode_arguments

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
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


# ---- padded sizes ----


@pytest.mark.parametrize("multiple", [2, 4, 16])
@pytest.mark.parametrize("cls", CELLS)
def test_padded_sizes_change_nothing(cls, multiple, monkeypatch):
    module, tensors = layer(cls, attention_dropout=0.3), given(cls)

    def drawn():
        torch.manual_seed(3)
        return results(module, tensors, LENS)

    want, seen, gates_of = drawn(), [], decode._input_gates
    monkeypatch.setitem(decode_arguments.MULTIPLES, "cpu", multiple)
    monkeypatch.setattr(decode, "_input_gates", lambda a: seen.append(a) or gates_of(a))
    torch.testing.assert_close(drawn(), want, **EXACT)
    with torch.no_grad():
        torch.manual_seed(3)
        outputs = call(module, tensors)
    torch.testing.assert_close(outputs, [x.detach() for x in want[: len(outputs)]], **EXACT)
    for arguments in seen:
        sizes = arguments.keys.shape[2], arguments.values.shape[2], arguments.hidden.shape[2]
        assert all(size % multiple == 0 for size in sizes)
        assert sizes[2] > H or sizes[0] > F
    assert len(seen) == 2

"""A whole decoder in csrc/cuda on a mock of the runtime: how it is cut, launched, and refused."""

import itertools
import re
from contextlib import suppress

import pytest
import torch
from mock_cuda import kernel_of, launches, of

from bahdanau_fast.ops.operator import operators
from ptx_machine import needs_compiler

pytestmark = needs_compiler

BF16 = torch.bfloat16
TOO_LARGE = 720  # more blocks than are resident
GPUS = [(132, 227 << 10), (108, 163 << 10), (128, 99 << 10), (148, 227 << 10)]
B, T, TK, F, DV, H = 3, 2, 5, 64, 32, 96


def tensors(lstm=False, dtype=BF16):
    """The tensors of ``decode`` by the names of its schema."""
    G = (4 if lstm else 3) * H
    shapes = {
        "input_gates": (T, B, G), "hidden": (1, B, H), "cell": (1, B, H), "keys": (B, TK, F),
        "values": (B, TK, DV), "w_query": (F, H), "w_v": (1, F), "w_context": (G, DV),
        "w_input": (0, G, H), "w_hidden": (1, G, H), "bias": (1, 4 * H),
    }  # fmt: skip
    if not lstm:
        del shapes["cell"]
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def decode(gpu, **given):
    return gpu.operator("decode", *operators["decode"].named(dropout_p=0.0, **given).values())


def decode_backward(gpu, states, cells, _, queries, weights, gates, **given):
    del given["input_gates"]
    given |= {"states": states, "cells": cells, "queries": queries, "weights": weights}
    named = operators["decode_backward"].named(dropout_p=0.0, gates=gates, **given)
    return gpu.operator("decode_backward", *named.values())


@pytest.mark.parametrize(("blocks", "shared"), GPUS)
@pytest.mark.parametrize("lstm", [False, True])
def test_every_plan_fits(gpu, lstm, blocks, shared):
    fit = 0
    for backward, units, keys, batch in itertools.product(
        (False, True), (64, 96, 256, 512, 768, 1024), (1, 50, 400, 4000), (1, 2, 64, 100, 1024)
    ):
        sizes = batch, keys, units, 2 * units, units
        plan = gpu.plan(lstm, backward, sizes, blocks, shared)
        if not plan["groups"]:
            continue
        fit += 1
        assert plan["bytes"] <= shared
        assert plan["groups"] * plan["blocks"] <= blocks
        assert plan["groups"] * plan["rows"] >= batch > (plan["groups"] - 1) * plan["rows"]
        assert plan["blocks"] * plan["sentences"] >= plan["rows"]
        for part, whole in (("units", units), ("hidden", units), ("features", 2 * units)):
            assert plan["blocks"] * plan[part] >= whole, part
    assert fit > 40


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((64, 50, 512, 512, 512, 0, 0), None),
        ((64, 50, 512, 512, 512, 10_000, 50), None),
        ((64, 50, 512, 512, 500, 0, 0), "multiples of 32"),
        ((64, 50, 2048, 2048, 2048, 0, 0), "do not fit into the GPU's shared memory"),
        ((1, 4000, 512, 512, 512, 0, 0), "single steps have more of the GPU"),
        ((64, 50, 512, 512, 512, 250_000, 50), "gates of every token"),
        ((64, 50, 512, 512, 512, 100, 100_000), "weights of so many steps"),
    ],
)
def test_why_not(gpu, sizes, why):
    said = gpu.why_not_decode(False, False, *sizes)
    assert said is None if why is None else re.search(why, said)


@pytest.mark.parametrize("lstm", [False, True])
def test_one_cooperative_launch_of_zeroed_counters(gpu, lstm):
    given = tensors(lstm)
    results = decode(gpu, keep=True, **given)
    decode_backward(gpu, *results, **given)
    calls = [c for c in gpu.calls() if c["call"] in ("cudaMemsetAsync", "cudaLaunchKernelEx")]
    assert [c["call"][4:10] for c in calls] == ["Memset", "Launch"] * 2
    assert [kernel_of(c) for c in launches(calls)] == ["persistent_forward", "persistent_backward"]
    for memset, launch in zip(calls[::2], calls[1::2], strict=True):
        assert launch["cooperative"]
        assert launch["grid"] <= 132
        assert memset["bytes"] % 128 == 0
        assert memset["stream"] == launch["stream"]


def test_a_launch_that_is_not_resident_is_an_error(gpu):
    gpu.failing["cudaLaunchKernelEx"] = TOO_LARGE
    with pytest.raises(RuntimeError, match="persistent_forward: "):
        decode(gpu, keep=False, **tensors())
    assert gpu.last_error() == 0


def test_a_green_context_has_fewer_multiprocessors(gpu):
    """A decoder is cut for those, or is no launch; once out of it, for all of them again."""
    given, sizes = tensors(), (64, 50, 512, 512, 512, 0, 0)
    decode(gpu, keep=False, **given)
    with gpu.green_context(2):
        decode(gpu, keep=False, **given)
        assert gpu.why_not_decode(False, False, *sizes) is not None
    assert gpu.why_not_decode(False, False, *sizes) is None
    whole, part = (launch["grid"] for launch in launches(gpu.calls()))
    assert part <= 2 < whole


def test_it_can_be_captured(gpu):
    given = tensors()
    results = decode(gpu, keep=True, **given)
    gpu.calls()
    with gpu.capture(gpu.new_stream()):
        decode(gpu, keep=True, **given)
        decode_backward(gpu, *results, **given)
    assert len(launches(gpu.calls())) == 2


def test_tokens_are_read_back_but_for_a_capture(gpu):
    given = tensors()
    del given["input_gates"]
    V, E, G = 48, 8, 3 * H
    shapes = {"embedding": (V, E), "w_embedded": (G, E), "input_bias": (G,), "w_dense": (V, H)}
    given |= {name: torch.zeros(s, dtype=BF16) for name, s in shapes.items()}
    given |= {"dense_bias": torch.zeros(V, dtype=BF16), "left_out": torch.empty(0).long()}
    named = operators["decode_greedy"].named(first=1, last=2, blank=0, max_steps=4, **given)
    with gpu.capture(gpu.new_stream()):
        tokens, weights = gpu.operator("decode_greedy", *named.values())
    assert (tokens.shape, weights.shape) == ((B, 4), (B, 4, TK))
    calls = gpu.calls()
    assert [kernel_of(launch) for launch in launches(calls)] == ["persistent_forward"]
    assert of(calls, "cudaMemcpyAsync") == of(calls, "cudaStreamSynchronize") == []
    with suppress(RuntimeError):  # the launch did nothing: the number of steps is any
        gpu.operator("decode_greedy", *named.values())
    assert len(of(gpu.calls(), "cudaMemcpyAsync")) == 1


WRONG = {
    "fp32": (tensors(dtype=torch.float32), "16 bits"),
    "two layers": ({"hidden": torch.zeros(2, B, H, dtype=BF16)}, "one layer"),
    "other units": ({"w_query": torch.zeros(F, H + 1, dtype=BF16)}, "w_query must"),
    "other gates": ({"w_context": torch.zeros(4 * H, DV, dtype=BF16)}, "w_context must"),
    "another dtype": ({"w_hidden": torch.zeros(1, 3 * H, H)}, "w_hidden must"),
    "no steps": ({"input_gates": torch.zeros(0, B, 3 * H, dtype=BF16)}, "at least one step"),
    "no keys": ({"keys": torch.zeros(B, 0, F, dtype=BF16)}, "keys must"),
    "a table": ({"table": torch.zeros(B, TK, F)}, "table and keys_max must"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_refused(gpu, wrong):
    change, why = WRONG[wrong]
    with pytest.raises(RuntimeError, match=why):
        decode(gpu, keep=True, **{**tensors(), **change})
    assert launches(gpu.calls()) == []

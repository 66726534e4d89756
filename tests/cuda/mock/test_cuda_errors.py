"""csrc/cuda itself refuses what a call is refused for: nothing in front of it checks a call."""

import re

import entry_points
import pytest
import torch
from mock_cuda import launches
from test_errors import BAD, spoil
from test_operator_errors import PROJECTED, RAW, WRONG, WRONG_PROJECTED, WRONG_RAW

from ptx_machine import needs_compiler

pytestmark = needs_compiler

MISTAKES = [
    *((PROJECTED, wrong) for wrong in (*WRONG, *WRONG_PROJECTED, {"backend": 1})),
    *((RAW, wrong) for wrong in (*WRONG, *WRONG_RAW)),
    *((RAW, {name: spoil(value, RAW.get(name))}) for name, value, *_ in BAD),
]
ALL = (1 << 7) - 1  # gradients


def grads(queries, keys, values, w_v, **_):
    """What backward is given beside the inputs."""
    B, Tq, _, Tk, H = *queries.shape, keys.shape[1], w_v.numel()
    shapes = {
        "weights": (B, Tq, Tk), "grad_weights": (B, Tq, Tk),
        "grad_context": (B, Tq, values.shape[2]),
        "projected_queries": (B, Tq, H), "projected_keys": (B, Tk, H),
    }  # fmt: skip
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def said(gpu, call, *args, **given):
    """What a call is refused with, before it launches anything."""
    with pytest.raises((RuntimeError, TypeError)) as raised:
        call(gpu.operator, *args, **given)
    assert launches(gpu.calls()) == []
    return str(raised.value)


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes(gpu, number):
    right, wrong = MISTAKES[number]
    for call, more in (
        (entry_points.attention, {}),
        (entry_points.attention, {"recorded": True}),
        (entry_points.attention_backward, {**grads(**right), "needs": ALL}),
    ):
        call(gpu.operator, **right, **more)
        assert launches(gpu.calls())
        text = said(gpu, call, **{**right, **wrong, **more})
        assert re.search(r"\w must \w|Expected a value of type", text), text
        # With these the others are what does not fit.
        assert set(wrong) & {*re.findall(r"\w+", text), "queries", "w_q", "w_v", "dropout_p"}, text


@pytest.mark.parametrize("name", grads(**RAW))
def test_what_backward_is_given_belongs_to_the_call(gpu, name):
    given = grads(**RAW)
    right = given[name]
    spoiled = right[:1], right[..., :1], right.half(), right[0], spoil("meta", right)
    for wrong in (*spoiled, spoil("sparse", right)):
        more = {**given, name: wrong, "needs": ALL}
        text = said(gpu, entry_points.attention_backward, **RAW, **more)
        assert re.search(rf"\b{name} must ", text), text

"""What others take: their kernels are right, by the rule for ours, and as short as an expert's."""

import re
from dataclasses import replace

import pytest
import torch
from built import needs_compiler
from driven import needs_nvcc
from gpu_model.counted import Problem, works
from gpu_model.gpus import GPUS
from gpu_model.in_triton import counted
from gpu_model.rivals import RIVALS
from tritoned import TritonPtx

from bahdanau_fast import parity, reference
from benchmarks.gpu import settle

pytestmark = needs_compiler
H100 = GPUS["H100"]
SIZES = {"few queries": (3, 2, 70, 40, 24), "many queries": (2, 37, 33, 130, 16)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("who", RIVALS)
def test_kernels_of_others_are_right(who, sizes, dtype):
    batch, queries_len, keys_len, hidden, features = sizes
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch, queries_len, hidden), (batch, keys_len, hidden),
              (batch, keys_len, features), (1, hidden), (batch, queries_len, features))  # fmt: skip
    *inputs, grad = (torch.randn(s, generator=generator) for s in shapes)
    inputs[3] *= hidden**-0.5  # that of nn.Linear
    *inputs, grad = (x.to(dtype) for x in (*inputs, grad))
    lens = torch.randint(1, keys_len + 1, (batch,), generator=generator)

    def expected(to):
        leaves = [x.to(to).requires_grad_() for x in inputs]
        context, weights = reference.attend(*leaves, lens)
        return (
            context.detach(),
            weights.detach(),
            *torch.autograd.grad(context, leaves, grad.to(to)),
        )

    machine, kernels = TritonPtx("90"), RIVALS[who]
    machine.kind = "triton"
    with machine.here():
        context, weights = kernels.attend(*inputs, lens)
        grads = kernels.backward(weights, grad, *inputs, lens)
    found = zip((context, weights, *grads), expected(dtype), expected(torch.float64), strict=True)
    for theirs, eager, exact in found:
        assert theirs.dtype == dtype
        allowed = parity.allowed(parity.error(eager, exact), float(exact.abs().max()), dtype)
        assert parity.error(theirs, exact) <= allowed


@needs_nvcc
def test_an_expert_takes_six_instructions_an_element():
    p = Problem(2, 64, 64, 512, 64)
    elements = p.batch * p.queries * p.keys * p.hidden
    scores, *_ = works(counted(p, H100, False, RIVALS["expert"]))
    assert 32 * scores.instructions <= 6 * elements
    assert 32 * scores.units["special"] >= elements
    kernels = works(counted(p, H100, True, RIVALS["expert"]))
    gradients = next(work for work in kernels if work.name == "gradients_kernel")
    assert 32 * gradients.instructions <= 11 * elements


@needs_nvcc
def test_kernels_of_others_are_counted():
    p = Problem(3, 2, 40, 100, 50, lens=(40, 7, 1))
    f, s = 3 * 2 * 40 * 100, 3 * 2 * 40
    for who, tanh in (("compiled", 2), ("expert", 1)):  # an exponential and a reciprocal, or one
        scores, softmax, product = works(counted(p, H100, False, RIVALS[who]))
        assert scores.units["special"] * 32 >= tanh * f
        assert scores.moved == 2 * (3 * (2 + 40) * 100 + 100) + 4 * s
        assert softmax.cold == pytest.approx(24, abs=8)  # of the lens: scores are in the L2
        assert product.moved == 2 * 3 * (2 + 40) * 50 + 2 * s
    backward = works(counted(p, H100, True, RIVALS["compiled"]))
    # Two products; softmax; tanh and its gradient, written; the sums over both.
    assert len(backward) == 7
    assert sum(work.written for work in backward) >= 2 * 2 * f
    # One that the L2 does not hold is read from memory.
    large = works(counted(Problem(40, 64, 64, 512, 8), H100, True, RIVALS["compiled"]))
    assert max(work.cold for work in large) >= 2 * 40 * 64 * 64 * 512


@needs_nvcc
def test_ours_in_triton_is_counted():
    p = Problem(3, 1, 40, 64, 48)
    (step,) = works(counted(p, H100, False))
    assert step.written == 3 * (2 * 48 + 4 * 40) + 4 * 3 * 40  # context, weights and scores
    assert step.cold >= 2 * 3 * 40 * (64 + 48)
    three = ["step_values_kernel", "step_keys_kernel", "step_sums_kernel"]
    for few in (p, replace(p, queries=3)):
        assert [work.name for work in works(counted(few, H100, True))] == three


def test_kernels_that_settle_the_model_run():
    waits = []  # for a launch before, which the machine has ended; it has no caches either

    def alone(text):
        text, count = re.subn(r"griddepcontrol\.\w+\s*;", "", text)
        waits.append(count)
        return text.replace(".cg", "")

    machine = TritonPtx("90", change=alone)
    machine.kind, x, out = "triton", torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    following = settle.chain(16, torch.device("cpu"))
    with machine.here():
        settle.one_kernel[(1,)](x, True, launch_pdl=True)
        settle.chase_kernel[(1,)](following, out, 3)
    assert x == 1
    assert waits == [2, 0]
    at = 0
    for _ in range(3):
        at = int(following[at])
    assert out == at

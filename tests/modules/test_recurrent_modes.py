"""Layers that attend at every step, under autocast and compiled: one operator there, too."""

import pytest
import torch
from decoders import CELLS, EXACT, by_steps, call, given, layer, results
from profiled import counts

import bahdanau_fast as bf


def trained(cls, dtype, precision):
    """Losses of 30 steps of training, and the dtypes of the results."""
    module, tensors = layer(cls, 2, dtype, dropout=0.0), given(cls, 2, dtype)
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.2), []
    for _ in range(30):
        with torch.autocast("cpu", precision, enabled=precision is not None):
            found = call(module, tensors)
            loss = sum((x.to(dtype) - 0.5).square().mean() for x in found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), [x.dtype for x in found]


@pytest.mark.parametrize("cls", CELLS)
def test_autocast_is_one_operator_as_exact_as_its_steps(cls):
    losses, dtypes = trained(cls, torch.float32, torch.bfloat16)
    of_steps, same = by_steps(lambda: trained(cls, torch.float32, torch.bfloat16))
    exact, _ = trained(cls, torch.float64, None)
    assert dtypes == same
    assert (losses - exact).abs().max() <= (of_steps - exact).abs().max()
    assert losses[-1] < losses[0] - 0.1, "it learns"
    with torch.autocast("cpu", torch.bfloat16):
        module = layer(cls, dtype=torch.float32)
        assert counts(lambda: call(module, given(cls, dtype=torch.float32)))["decode"] == 1


@pytest.mark.parametrize("cls", CELLS)
def test_autocast_leaves_fp64_alone(cls):
    module, tensors = layer(cls, 2), given(cls, 2)
    want = results(module, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(results(module, tensors), want, rtol=0, atol=0)


def test_backward_under_autocast():
    module, tensors = layer(bf.AttentionGRU, 2, torch.float32), given(bf.AttentionGRU, 2).items()
    tensors = {name: x.detach().float().requires_grad_() for name, x in tensors}
    found = []
    for inside in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(module, tensors)[0].sum()
            if inside:
                found.append(torch.autograd.grad(loss, list(module.parameters())))
        if not inside:
            found.append(torch.autograd.grad(loss, list(module.parameters())))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_compiled_code_calls_one_operator():
    module, tensors = layer(bf.AttentionGRU), given(bf.AttentionGRU)
    want = results(module, tensors)
    compiled = torch.compile(module, backend="eager")
    assert counts(lambda: call(compiled, tensors))["decode"] == 1
    torch.testing.assert_close(results(compiled, tensors), want, **EXACT)

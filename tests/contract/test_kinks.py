"""ReLU and leaky ReLU have the slopes at zero that PyTorch gives them: 0, and the lower one."""

import pytest
import torch
from contract import LARGE

import bahdanau_fast as bf

BACKENDS = [name for name in ("cpu", "reference") if name in bf.backends.available()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("activation", "slope"), [("relu", 0.0), ("leaky_relu", 0.25)])
def test_slopes_at_zero(activation, slope, dtype, backend):
    generator = torch.Generator().manual_seed(0)

    def integers(*shape):  # all sums of them are exact
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    B, Tq, Tk, H = (LARGE[name] for name in ("B", "Tq", "Tk", "H"))
    queries = torch.zeros(B, Tq, 4, dtype=dtype, requires_grad=True)
    keys = torch.zeros(B, Tk, 5, dtype=dtype, requires_grad=True)
    w_q, w_k, w_v, grad = integers(H, 4), integers(H, 5), integers(1, H), integers(B, Tq, Tk)
    scores = bf.additive_scores(
        queries, keys, w_q, w_k, w_v, activation=activation, negative_slope=0.25, backend=backend
    )
    scores.backward(grad)
    assert torch.equal(scores, torch.zeros_like(scores))
    assert torch.equal(queries.grad, slope * grad.sum(2, keepdim=True) * (w_v @ w_q))
    assert torch.equal(keys.grad, slope * grad.sum(1).unsqueeze(2) * (w_v @ w_k))

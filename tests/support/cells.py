"""The cells that torch launches on a GPU, in plain PyTorch for other tensors."""

from contextlib import contextmanager

import torch


def lstm(input_gates, hidden_gates, cell, input_bias=None, hidden_bias=None):
    i, f, g, o = (input_gates + hidden_gates).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat((i, f, g, o), 1)


def lstm_backward(grad_hidden, grad_cell, before, after, space, has_bias):
    i, f, g, o = space.chunk(4, 1)
    grad = grad_cell + grad_hidden * o * (1 - after.tanh() ** 2)
    gates = (
        grad * g * i * (1 - i),
        grad * before * f * (1 - f),
        grad * i * (1 - g**2),
        grad_hidden * after.tanh() * o * (1 - o),
    )
    return torch.cat(gates, 1), grad * f, None


def gru(input_gates, hidden_gates, hidden, input_bias=None, hidden_bias=None):
    (ir, iz, ig), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (ig + r * hn).tanh()
    return n + z * (hidden - n), torch.cat((r, z, n, hidden, hn), 1)


def gru_backward(grad, space, has_bias):
    r, z, n, hidden, hn = space.chunk(5, 1)
    new = grad * (1 - z) * (1 - n**2)
    reset, update = new * hn * r * (1 - r), grad * (hidden - n) * z * (1 - z)
    return torch.cat((reset, update, new), 1), torch.cat((reset, update, new * r), 1), grad * z


@contextmanager
def on_the_cpu(key="CPU"):
    """Have them for CPU tensors, or those of another dispatch key, which torch itself has not."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_thnn_fused_lstm_cell": lstm,
        "_thnn_fused_lstm_cell_backward_impl": lstm_backward,
        "_thnn_fused_gru_cell": gru,
        "_thnn_fused_gru_cell_backward": lambda *args: (*gru_backward(*args), None, None),
    }.items():
        library.impl(name, function, key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()

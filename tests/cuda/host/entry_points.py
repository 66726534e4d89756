"""The entry points of csrc/cuda: what the tests know of the names and arguments of operators.

``call(name, *arguments)`` runs an operator: :func:`on_gpu`, or ``operator`` of a mock.
"""

import torch

FORWARD, BACKWARD, STEP = "attend_cuda", "attend_backward_cuda", "attend_step_cuda"
# Operators of every backend with the same arguments.
GENERAL = {FORWARD: "attend", BACKWARD: "attend_backward"}


def on_gpu(name, *arguments):
    return getattr(torch.ops.bahdanau_fast, name)(*arguments)


def attend(call, queries, keys, values, w_v, lens=None, seed=None, dropout_p=0.0, name=FORWARD):
    """Context and weights of projected queries and keys."""
    return call(name, queries, keys, None, None, values, w_v, lens, seed, dropout_p, True)


def attend_backward(call, queries, keys, values, w_v, lens, context, weights):
    """All four gradients, those of context and weights being themselves."""
    inputs = queries, keys, None, None, values, w_v, lens, None, 0.0
    return call(BACKWARD, *inputs, weights, context, weights, 15)


def step(call, queries, w_q, keys, w_k, bias, values, w_v, lens=None):
    """Context and weights of queries, and keys if ``w_k`` is given, that the launch projects."""
    return call(STEP, queries, w_q, keys, w_k, bias, values, w_v, lens, True)

"""The entry points of csrc/cuda: what the tests know of the names and arguments of operators.

``call(name, *arguments)`` runs an operator: :func:`on_gpu`, or ``operator`` of a mock.
"""

from bahdanau_fast.ops.operator import operators

FORWARD, COUNTED, BACKWARD, STEP = "attend", "attend.counted", "attend_backward", "attend_step"


def on_gpu(name, *arguments):
    return operators[name].overload(*arguments)


def attend(
    call, queries, keys, values, w_v, lens=None, seed=None, dropout_p=0.0, need_weights=True,
    mask=None, narrow=False, counted=False,
):  # fmt: skip
    """Context and weights of projected queries and keys; ``counted``, and what lengths leave."""
    inputs = _arguments(queries, keys, values, w_v, lens, mask, seed, dropout_p)
    return call(COUNTED if counted else FORWARD, *inputs, need_weights, True, 0, narrow)


def attend_backward(
    call, queries, keys, values, w_v, lens, weights, *grads, needs=15, dropout=(None, 0.0),
    mask=None,
):  # fmt: skip
    """The gradients that ``needs`` has a bit for, all four unless given.

    ``grads`` are those of context and weights, None if zero; ``dropout``: seed and probability.
    """
    inputs = _arguments(queries, keys, values, w_v, lens, mask, *dropout)
    return call(BACKWARD, weights, *grads, needs, *inputs, 0)[:4]


def _arguments(queries, keys, values, w_v, lens, mask, seed, dropout_p):
    """Without features and table, and with tanh."""
    others = None, None, lens, mask, None, None, seed
    return queries, keys, values, w_v, *others, dropout_p, 0, 0.01


def step(call, queries, w_q, keys, w_k, bias, values, w_v, lens=None, mask=None):
    """Context and weights of queries, and keys if ``w_k`` is given, that the launch projects."""
    rest = w_v, lens, mask, None, None, True, True
    return call(STEP, queries, keys, values, w_q, w_k, bias, *rest)

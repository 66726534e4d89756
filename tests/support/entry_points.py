"""The entry points of csrc/cuda: what the tests know of the names and arguments of operators.

``call(name, *arguments)`` runs an operator: :func:`dispatched`, or ``operator`` of a mock.
"""

from bahdanau_fast.ops.operator import operators

FORWARD, RECORDED, BACKWARD = "attention", "attention.recorded", "attention_backward"


def dispatched(name, *arguments):
    return operators[name].overload(*arguments)


def attention(call, *inputs, recorded=False, **given):
    """Context and weights; of a ``recorded`` call all five results. Arguments as in the schema."""
    name = RECORDED if recorded else FORWARD
    return call(name, *operators[name].named(*inputs, **given).values())


def attention_backward(call, **given):
    """All nine gradients, those that ``needs`` has no bit for without elements."""
    return call(BACKWARD, *operators[BACKWARD].named(**given).values())


def attend(call, *inputs, counted=False, **given):
    """Context and weights of projected queries and keys; ``counted``, and what lengths leave."""
    return attention(call, *inputs, recorded=counted, **given)[: 2 + counted]


def attend_backward(call, queries, keys, values, w_v, weights, *grads, needs=15, **given):
    """The gradients that ``needs`` has a bit for; ``grads``: of context and weights, None if zero.

    Others are arguments of the forward: ``valid_lens``, ``mask``, ``seed`` and ``dropout_p``.
    """
    given |= {"queries": queries, "keys": keys, "values": values, "w_v": w_v, "weights": weights}
    given |= dict(zip(("grad_context", "grad_weights"), grads, strict=True))
    return attention_backward(call, needs=needs, **given)[:4]


def step(call, queries, w_q, keys, w_k, bias, values, w_v, lens=None, mask=None):
    """Context and weights of queries, and keys if ``w_k`` is given, that are projected inside."""
    given = {"w_q": w_q, "w_k": w_k, "bias": bias, "valid_lens": lens, "mask": mask}
    return attention(call, queries, keys, values, w_v, **given, narrow=True)

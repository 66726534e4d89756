"""The entry points of csrc/cuda: what the tests know of the names and arguments of operators.

``call(name, *arguments)`` runs an operator: :func:`on_gpu`, or ``operator`` of a mock.
"""

from bahdanau_fast.ops.operator import operators

FORWARD, RECORDED, BACKWARD = "attention", "attention.recorded", "attention_backward"


def on_gpu(name, *arguments):
    return operators[name].overload(*arguments)


def attention(call, *inputs, recorded=False, **given):
    """Context and weights; of a ``recorded`` call all five results. Arguments as in the schema."""
    name = RECORDED if recorded else FORWARD
    return call(name, *operators[name].named(*inputs, **given).values())


def attention_backward(call, **given):
    """All nine gradients, those that ``needs`` has no bit for without elements."""
    return call(BACKWARD, *operators[BACKWARD].named(**given).values())


def attend(
    call, queries, keys, values, w_v, lens=None, seed=None, dropout_p=0.0, need_weights=True,
    mask=None, narrow=False, counted=False,
):  # fmt: skip
    """Context and weights of projected queries and keys; ``counted``, and what lengths leave."""
    given = {"valid_lens": lens, "mask": mask, "seed": seed, "dropout_p": dropout_p}
    given |= {"need_weights": need_weights, "narrow": narrow}
    return attention(call, queries, keys, values, w_v, recorded=counted, **given)[: 2 + counted]


def attend_backward(
    call, queries, keys, values, w_v, lens, weights, *grads, needs=15, dropout=(None, 0.0),
    mask=None,
):  # fmt: skip
    """The gradients that ``needs`` has a bit for, all four unless given.

    ``grads`` are those of context and weights, None if zero; ``dropout``: seed and probability.
    """
    given = {"queries": queries, "keys": keys, "values": values, "w_v": w_v, "valid_lens": lens}
    given |= dict(zip(("grad_context", "grad_weights"), grads, strict=True))
    given |= dict(zip(("seed", "dropout_p"), dropout, strict=True))
    return attention_backward(call, weights=weights, needs=needs, mask=mask, **given)[:4]


def step(call, queries, w_q, keys, w_k, bias, values, w_v, lens=None, mask=None):
    """Context and weights of queries, and keys if ``w_k`` is given, that are projected inside."""
    given = {"w_q": w_q, "w_k": w_k, "bias": bias, "valid_lens": lens, "mask": mask}
    return attention(call, queries, keys, values, w_v, **given, narrow=True)

"""What one module gives, beside what another gives."""

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from bahdanau_fast import parity, reference

# Of the largest value of a tensor, or of one; none sums more than some thousand products.
SHARES = {
    **{torch.float64: 2.0**-36, torch.float32: 2.0**-16},
    **{torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7},
}


def same(got, want, share=None):
    """Tensors and other values, in whatever containers; their types, too."""
    (ours, our_form), (theirs, form) = map(tree_flatten_with_path, (got, want))
    assert our_form == form
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        at = keystr(path)
        assert type(a) is type(b), at
        if not isinstance(b, torch.Tensor):
            assert a == b, at
            continue
        facts = [(x.shape, x.dtype, x.device, x.requires_grad, x.is_inference()) for x in (a, b)]
        assert facts[0] == facts[1], at
        _near(a, b, SHARES.get(b.dtype, 0.0) if share is None else share, at)


def close(got, want):
    """The numbers alone, of tensors in whatever containers."""
    for a, b in zip(*map(tree_leaves, (got, want)), strict=True):
        assert a.shape == b.shape
        _near(a, b, SHARES[b.dtype])


def _near(a, b, share, at=""):
    if b.is_meta or not b.numel():
        return
    limit = share and share * max(1.0, float(b.detach().nan_to_num().abs().max()))
    torch.testing.assert_close(a, b, rtol=0, atol=limit, equal_nan=True, msg=lambda m: f"{at}: {m}")


def as_exact(ours, eager, exact, dtype):
    """The parity rule for each of some results; dtypes are those of eager."""
    detached = ([x.detach() for x in each] for each in (ours, eager, exact))
    for a, b, c in zip(*detached, strict=True):
        assert a.dtype == b.dtype
        limit = parity.allowed(parity.error(b, c), float(c.abs().max()), dtype)
        assert parity.error(a, c) <= limit


def results(call, leaves, module):
    """Tensors of a call, and gradients of leaves and parameters, None where there is none."""
    outputs = [x for x in tree_leaves(call()) if isinstance(x, torch.Tensor)]
    recorded = [x for x in outputs if x.requires_grad]
    asked = [x for x in (*leaves, *module.parameters()) if x.requires_grad]
    seeds = [torch.cos(torch.arange(x.numel())).to(x).view(x.shape) for x in recorded]
    grads = torch.autograd.grad(recorded, asked, seeds, allow_unused=True) if recorded else ()
    return [x.detach() for x in outputs], list(grads)


def with_gradients(results, module, inputs, zeros=False):
    """Results, and gradients of inputs and parameters; None, or ``zeros``, where there is none."""
    leaves = [x for x in (*inputs.values(), *module.parameters()) if x.requires_grad]
    loss, more = sum(x.cos().sum() for x in results), {"materialize_grads": zeros}
    return [*results, *torch.autograd.grad(loss, leaves, allow_unused=True, **more)]


def and_gradients(results, leaves):
    """Results, and gradients of all of them together."""
    grads = torch.autograd.grad(results, leaves, [x.detach().cos() for x in results])
    return [*results, *grads]


def formula(module, queries, keys, values, lens=None, mask=None):
    """Context and weights by the reference, of AdditiveAttention's layers."""
    weights = [layer.weight for layer in (module.W_q, module.W_k, module.w_v)]
    inside = {name: getattr(module, name) for name in ("bias", "activation", "negative_slope")}
    given = queries, keys, values, *weights, lens
    return reference.additive_attention(*given, mask=mask, **inside)


def ran(report):
    """How often the operator ran."""
    return sum(record.fused for record in report._records)

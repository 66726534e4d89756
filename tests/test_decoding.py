"""The operators that decode a whole sequence."""

import pytest
import torch
from decoders import CELLS, EXACT, B, H, T, call, given, layer, same

from bahdanau_fast import decoding

ops = torch.ops.bahdanau_fast


def arguments(cls, layers=2, dtype=torch.float32, masks=False, p=0.0, table=False):
    """Arguments of the operator, as the layer makes them."""
    module, tensors = layer(cls, layers, dtype), given(cls, layers, dtype)
    caught = []

    def catch(arguments, rest):
        caught.append((arguments, rest))
        return decoding.by_steps(arguments, rest)

    original, decoding.decode = decoding.decode, catch
    try:
        call(module, tensors)
    finally:
        decoding.decode = original
    ((made, rest),) = caught
    keys = made.keys.detach()
    entries = ops.exp_keys(keys) if table else (None, None)
    mask = torch.rand(layers - 1, T, B, H).to(dtype) if masks else None
    seed = torch.tensor([3]) if p else None
    detached = decoding.Arguments(*(x if x is None else x.detach() for x in made))
    return detached, decoding.Rest(*entries, rest.valid_lens, mask, seed, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"masks": True, "p": 0.5, "table": True}, {"layers": 1}], ids=str
)
@pytest.mark.parametrize("cls", CELLS)
def test_opcheck(cls, options, dtype):
    made, rest = arguments(cls, dtype=dtype, **options)
    inputs = decoding._in_order(made, rest)
    input_gates = decoding._input_gates(made)
    for keep in (True, False):
        torch.library.opcheck(ops.decode.default, (input_gates, *inputs, keep))
    states, cells, _, queries, weights, gates = ops.decode(input_gates, *inputs)
    saved = (states, cells, queries, weights, gates)
    grads = (torch.randn_like(states[-1, 1:]), None, None, torch.randn_like(weights))
    torch.library.opcheck(ops.decode_backward.default, (*inputs, *saved, *grads))


@pytest.mark.parametrize("cls", CELLS)
def test_masks_between_layers(cls):
    made, rest = arguments(cls, 3, torch.float64, masks=True)
    made = decoding.Arguments(*(x if x is None else x.requires_grad_() for x in made))
    used = [x for x in made if x is not None]

    def all_of(function):
        out = function(made, rest)
        loss = sum((i + 1) * x.square().sum() for i, x in enumerate(out))
        return [*out, *torch.autograd.grad(loss, used)]

    same(all_of(decoding.decode), all_of(decoding.by_steps), **EXACT)

"""The operators that decode a whole sequence."""

import pytest
import torch
from decoders import CELLS, EXACT, B, H, T, call, given, layer
from decoding import in_order
from opchecked import opcheck

from bahdanau_fast.ops import decode

ops = torch.ops.bahdanau_fast


def inputs_of(cls, layers=2, dtype=torch.float32, masks=False, p=0.0, table=False):
    """What all steps take, as the layer makes it."""
    module, tensors = layer(cls, layers, dtype), given(cls, layers, dtype)
    caught = []

    def catch(of, rest, *_):
        caught.append((of, rest))
        return by_steps(of, rest)

    original, decode.decode = decode.decode, catch
    try:
        call(module, tensors)
    finally:
        decode.decode = original
    ((of, rest),) = caught
    keys = of.keys.detach()
    entries = ops.exp_keys(keys) if table else (None, None)
    mask = torch.rand(layers - 1, T, B, H).to(dtype) if masks else None
    seed = torch.tensor([3]) if p else None
    made = {"table": entries[0], "keys_max": entries[1], "valid_lens": rest.valid_lens}
    return each(of, torch.Tensor.detach), decode.NonDifferentiable(
        **made, masks=mask, seed=seed, dropout_p=p
    )


def each(of, change):
    """The same inputs, changed one by one."""
    changed = (x if x is None else change(x) for x in of.flat())
    return decode.DecoderInputs.from_flat(changed, len(of.layers))


def by_steps(of, rest):
    return decode.by_steps(decode.operator_arguments(of, of.keys.dtype), rest)


def by_operator(of, rest):
    return decode.decode(of, rest, decode.Dtypes(*[of.keys.dtype] * 3))


def arguments(cls, layers=2, dtype=torch.float32, **options):
    """Arguments of the operator, as the layer makes them."""
    of, rest = inputs_of(cls, layers, dtype, **options)
    return decode.operator_arguments(of, dtype), rest


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float64),
        ({"masks": True, "p": 0.5, "table": True}, torch.float32),
        ({"layers": 1}, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", CELLS)
def test_opcheck(cls, options, dtype):
    made, rest = arguments(cls, dtype=dtype, **options)
    inputs = in_order(made, rest)
    input_gates = decode._input_gates(made)
    for keep in (True, False):
        args = (input_gates, *inputs, keep)
        opcheck(ops.decode.default, args, traced=keep or not options)
    states, cells, _, queries, weights, gates = ops.decode(input_gates, *inputs)
    saved = (states, cells, queries, weights, gates)
    grads = (torch.randn_like(states[-1, 1:]), None, None, torch.randn_like(weights))
    opcheck(ops.decode_backward.default, (*inputs, *saved, *grads))


def same_with_gradients(of, rest):
    """That the operator gives what steps give."""
    of = each(of, lambda x: x.detach().requires_grad_())
    found = []
    for function in (by_operator, by_steps):
        out = function(of, rest)
        loss = sum((i + 1) * x.square().sum() for i, x in enumerate(out))
        used = [x for x in of.flat() if x is not None]
        found.append([*out, *torch.autograd.grad(loss, used, materialize_grads=True)])
    torch.testing.assert_close(*found, **EXACT)


@pytest.mark.parametrize("cls", CELLS)
def test_masks_between_layers(cls):
    same_with_gradients(*inputs_of(cls, 3, torch.float64, masks=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", CELLS)
def test_gates_of_any_size(cls, dtype):
    # exp(-gate) overflows for some of them, and is zero for others.
    of, rest = inputs_of(cls, 1, dtype)
    of = of._replace(inputs=1e3 * of.inputs)
    assert float(decode._input_gates(decode.operator_arguments(of, dtype)).abs().max()) > 800
    got, expected = by_operator(of, rest), by_steps(of, rest)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("cls", CELLS)
def test_no_steps(cls):
    of, rest = inputs_of(cls, 2, torch.float64)
    of = of._replace(inputs=of.inputs[:0], hidden=of.hidden.requires_grad_())
    got = by_operator(of, rest)
    assert torch.equal(got.hidden, of.hidden)
    assert got.weights.numel() == got.features.numel() == 0
    (of_hidden,) = torch.autograd.grad(got.hidden.square().sum(), of.hidden)
    assert torch.equal(of_hidden, 2 * of.hidden)


WRONG = {
    "keys": (lambda x: x[0], "keys must have 3 dimensions"),
    "hidden": (lambda x: x[0], "hidden must have 3 dimensions"),
    "w_query": (lambda x: x[:-1], "w_query must be contiguous and have the size"),
    "w_hidden": (lambda x: x.mT, "w_hidden must be contiguous"),
    "bias": (lambda x: x.float(), "bias must be contiguous and have the size and dtype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    made, rest = arguments(CELLS[0], dtype=torch.float64)
    gates = decode._input_gates(made)
    change, message = WRONG[name]
    made = made._replace(**{name: change(getattr(made, name))})
    with pytest.raises(RuntimeError, match=message):
        ops.decode(gates, *in_order(made, rest))
    with pytest.raises(RuntimeError, match="input_gates must have 3 dimensions"):
        ops.decode(gates[0], *in_order(*arguments(CELLS[0], dtype=torch.float64)))


@pytest.mark.parametrize("of_keys", [torch.float32, torch.float64], ids=str)
def test_states_and_keys_of_two_dtypes_are_refused(of_keys):
    # One of the two would be read or written past its end.
    made, rest = arguments(CELLS[1], dtype=torch.float32)
    other = torch.float64 if of_keys == torch.float32 else torch.float32
    named = {
        n: None if x is None else x.to(of_keys if n in ("keys", "values", "w_v") else other)
        for n, x in made._asdict().items()
    }
    made = decode.Arguments(**named)
    inputs, nothing = in_order(made, rest), made.hidden.new_zeros(T, B, 0)
    with pytest.raises(RuntimeError, match="keys must have the dtype of hidden"):
        ops.decode(decode._input_gates(made), *inputs)
    with pytest.raises(RuntimeError, match="keys must have the dtype of hidden"):
        ops.decode_backward(*inputs, *[nothing] * 5, None, None, None, None)

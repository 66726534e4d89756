"""Recurrent layers whose attention comes after the cell, against the formula step by step."""

import copy

import pytest
import torch
from beside import as_exact
from decoders import CELLS, DV, EXACT, LENS, TK, B, E, H, T, given, layer
from profiled import counts
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import bahdanau_fast as bf

MASK = torch.arange(TK) % 4 != 1
BOTH = pytest.mark.parametrize("cls", CELLS)
FEEDING = pytest.mark.parametrize("feeding", [True, False], ids=["fed", "not fed"])


def drawn(cls, layers=1, feeding=True, dtype=torch.float64, **options):
    module = layer(cls, layers, dtype, attention_first=False, input_feeding=feeding, **options)
    tensors = given(cls, layers, dtype)
    if feeding:
        generator = torch.Generator().manual_seed(3)
        context = torch.randn(B, DV, generator=generator, dtype=torch.float64)
        tensors["context"] = context.to(dtype).requires_grad_()
    return module, tensors


def states_of(tensors):
    return (tensors["hidden"], tensors["cell"]) if "cell" in tensors else tensors["hidden"]


def called(module, tensors, **more):
    source = {"keys": tensors["keys"], "values": tensors["values"], "valid_lens": LENS}
    source |= {"mask": MASK.expand(B, TK), "context": tensors.get("context"), **more}
    outputs, last = module(tensors["inputs"], states_of(tensors), **source)
    return [outputs, *(last if isinstance(last, tuple) else (last,)), module.attention_weights]


def by_hand(module, tensors):
    """The formula in plain PyTorch."""
    attention, context = module.attention, tensors.get("context")
    keys, values, state = tensors["keys"], tensors["values"], states_of(tensors)
    seen = (torch.arange(TK) < LENS[:, None]) & MASK
    outputs, weights = [], []
    for x in tensors["inputs"]:
        below = x if context is None else torch.cat((context, x), 1)
        top, state = module.rnn(below.unsqueeze(0), state)
        sums = attention.W_q(top[0]).unsqueeze(1) + attention.W_k(keys)
        scores = attention.w_v(torch.tanh(sums)).squeeze(2).masked_fill(~seen, -torch.inf)
        p = scores.masked_fill(~seen.any(1, keepdim=True), 0.0).softmax(1)
        looked = torch.bmm(p.unsqueeze(1), values).squeeze(1)
        context = None if context is None else looked
        outputs.append(torch.cat((top[0], looked), 1))
        weights.append(p)
    last = state if isinstance(state, tuple) else (state,)
    return [torch.stack(outputs), *last, torch.stack(weights, 1)]


def with_gradients(results, module, tensors):
    leaves = [*tensors.values(), *module.parameters()]
    return [*results, *torch.autograd.grad(sum(x.cos().sum() for x in results), leaves)]


@BOTH
@FEEDING
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_formula(cls, feeding, layers, backend):
    if backend not in bf.backends.available():
        pytest.skip("no C++")
    module, tensors = drawn(cls, layers, feeding)
    with bf.backends.use(backend):
        got = with_gradients(called(module, tensors), module, tensors)
        with torch.no_grad():
            again = called(module, tensors)
    want = with_gradients(by_hand(module, tensors), module, tensors)
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(again, [x.detach() for x in want[: len(again)]], **EXACT)


@BOTH
@FEEDING
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.bfloat16, True),
    ],
)
def test_the_parity_rule(cls, feeding, dtype, autocast):
    module, tensors = drawn(cls, 1, feeding, torch.float32 if autocast else dtype)
    doubled = {n: x.detach().double().requires_grad_() for n, x in tensors.items()}
    twin = copy.deepcopy(module).double()
    exact = with_gradients(by_hand(twin, doubled), twin, doubled)
    with torch.autocast("cpu", dtype, enabled=autocast):
        ours = with_gradients(called(module, tensors), module, tensors)
        with bf.backends.use("reference"):
            eager = with_gradients(called(module, tensors), module, tensors)
    as_exact(ours, eager, exact, dtype)


@BOTH
def test_the_other_order_begins_with_the_context_of_the_first_state(cls):
    """Then both are one recurrence, which the operator of all steps computes in the other order."""
    module, tensors = drawn(cls, 2)
    first = layer(cls, 2)
    first.load_state_dict(module.state_dict())
    del tensors["context"]
    memory = module.attention.memory(tensors["keys"], tensors["values"])
    context = module.attention.attend(tensors["hidden"][-1], memory)
    source = {"keys": tensors["keys"], "values": tensors["values"]}
    got, _ = module(tensors["inputs"], states_of(tensors), **source, context=context)
    want, _ = first(tensors["inputs"], states_of(tensors), **source)
    torch.testing.assert_close(got[..., :H], want, **EXACT)
    torch.testing.assert_close(module.attention_weights[:, :-1], first.attention_weights[:, 1:])


@BOTH
@FEEDING
def test_in_two_parts_and_batch_first(cls, feeding):
    module, tensors = drawn(cls, 1, feeding)
    whole, *last, _ = called(module, tensors)
    module.batch_first = True
    memory = module.attention.memory(
        tensors["keys"], tensors["values"], LENS[:, None], mask=MASK.expand(B, TK)
    )
    inputs, state, outputs = tensors["inputs"].transpose(0, 1), states_of(tensors), []
    more = {"context": tensors["context"]} if feeding else {}
    for part in inputs.split([2, T - 2], 1):
        output, state = module(part, state, memory=memory, **more)
        outputs.append(output)
        more = {"context": output[:, -1, H:]} if feeding else {}
    state = state if isinstance(state, tuple) else (state,)
    got = [torch.cat(outputs, 1).transpose(0, 1), *state]
    torch.testing.assert_close(got, [whole, *last], **EXACT)


@BOTH
@FEEDING
def test_packed(cls, feeding):
    """As every sequence alone; unpadded sequences are computed in runs."""
    module, tensors = drawn(cls, 2, feeding)
    lengths = [2, T, 1, 5, 2]
    packed = pack_padded_sequence(tensors["inputs"], lengths, enforce_sorted=False)
    outputs, *last, weights = called(module, {**tensors, "inputs": packed})
    padded, _ = pad_packed_sequence(outputs)
    whole, *_, all_weights = called(module, tensors)
    real = torch.arange(T)[:, None] < torch.tensor(lengths)
    torch.testing.assert_close(padded, whole * real[..., None], **EXACT)
    torch.testing.assert_close(weights, all_weights * real.t()[..., None], **EXACT)
    for row, n in enumerate(lengths):
        _, *of_row, _ = called(module, {**tensors, "inputs": tensors["inputs"][:n]})
        torch.testing.assert_close([x[:, row] for x in last], [x[:, row] for x in of_row], **EXACT)


def explained(feeding):
    if not feeding:
        return "all steps of the layer, then one call of the attention"
    if "cpu" in bf.backends.available():
        return "cpu: one operator: its C++ takes all steps"
    return "step by step: one step, dropped weights, or layers that no operator takes"


@pytest.mark.skipif("cpu" not in bf.backends.available(), reason="counts the C++ operator")
def test_when_all_steps_but_one_are_an_operator():
    module, tensors = drawn(bf.AttentionGRU, attention_dropout=0.5)
    assert "decode" not in counts(lambda: called(module, tensors))
    assert counts(lambda: called(module.eval(), tensors))["decode"] == 1
    one = {**tensors, "inputs": tensors["inputs"][:1]}
    assert "decode" not in counts(lambda: called(module, one))
    module.attention.register_forward_hook(lambda *_: None)
    assert "decode" not in counts(lambda: called(module, tensors))


@FEEDING
def test_hooks_defaults_and_words(feeding):
    module, tensors = drawn(bf.AttentionGRU, 1, feeding)
    del tensors["hidden"]
    tensors.pop("context", None)
    plain = {n: tensors[n] for n in ("inputs", "keys", "values")}
    want = module(**plain)
    zeros = {"context": torch.zeros(B, DV).double()} if feeding else {}
    torch.testing.assert_close(module(**plain, **zeros), want)
    said = module.explain(**plain)
    assert said == explained(feeding)
    seen = []
    module.attention.register_forward_hook(
        lambda m, inputs, y: seen.append(inputs[0].shape) or 0 * y
    )
    outputs, _ = module(**plain)
    assert seen == ([(B, 1, H)] * T if feeding else [(B, T, H)])
    assert not outputs[..., H:].any()
    assert feeding or (type(module.rnn), module.rnn.input_size) == (nn.GRU, E)


@FEEDING
def test_dropout(feeding):
    module, tensors = drawn(bf.AttentionLSTM, 2, feeding, attention_dropout=0.5, dropout=0.5)
    torch.manual_seed(5)
    first = called(module, tensors)[0]
    assert not torch.equal(called(module, tensors)[0], first)
    torch.manual_seed(5)
    assert torch.equal(called(module, tensors)[0], first)
    module.eval()
    want = called(module, tensors)
    torch.testing.assert_close(want, by_hand(module, tensors), **EXACT)


def test_gradients_by_finite_differences():
    module, tensors = drawn(bf.AttentionGRU, num_hiddens=3)
    names = ["inputs", "keys", "values", "hidden", "context"]

    def function(*leaves):
        return tuple(called(module, dict(zip(names, leaves, strict=True))))

    assert torch.autograd.gradcheck(function, [tensors[n] for n in names], fast_mode=True)

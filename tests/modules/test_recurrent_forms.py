"""Recurrent layers in each of their forms, against the formula step by step."""

import copy
from functools import partial

import beside
import pytest
import torch
from decoders import CELLS, DV, EXACT, LENS, TK, B, E, H, T, given, layer
from profiled import counts
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import bahdanau_fast as bf

with_gradients = partial(beside.with_gradients, zeros=True)
MASK = torch.arange(TK) % 4 != 1
BOTH = pytest.mark.parametrize("cls", CELLS)
FORMS = {
    "before the cell": {},
    "after it": {"attention_first": False},
    "after it, not fed": {"attention_first": False, "input_feeding": False},
}
LOCATIONS = {
    "last weights": {"channels": 3, "kernel_size": 5},
    "and their sum": {"channels": 3, "kernel_size": 5, "inputs": 2, "bias": False},
    "coverage": {"channels": None},
    "forward": {"channels": 2, "kernel_size": 3, "normalize": "forward"},
}
WITH_LOCATION = {
    f"{name}, {form}": {**FORMS[form], "location": location}
    for name, location in LOCATIONS.items()
    for form in list(FORMS)[:2]
}
EVERY = FORMS | WITH_LOCATION


def drawn(cls, layers=1, form="after it", dtype=torch.float64, **options):
    module = layer(cls, layers, dtype, **EVERY[form], **options)
    tensors = given(cls, layers, dtype)
    if not module.attention_first and module.input_feeding:
        generator = torch.Generator().manual_seed(3)
        context = torch.randn(B, DV, generator=generator, dtype=torch.float64)
        tensors["context"] = context.to(dtype).requires_grad_()
    return module, tensors


def states_of(tensors):
    return (tensors["hidden"], tensors["cell"]) if "cell" in tensors else tensors["hidden"]


def listed(state):
    return list(state) if isinstance(state, tuple) else [state]


def called(module, tensors, rows=slice(None), **more):
    source = {"keys": tensors["keys"][rows], "values": tensors["values"][rows]}
    source |= {"valid_lens": LENS[rows], "mask": MASK.expand(B, TK)[rows], **more}
    if "context" in tensors:
        source["context"] = tensors["context"][rows]
    states = [x[:, rows] for x in listed(states_of(tensors))]
    hidden = tuple(states) if len(states) > 1 else states[0]
    outputs, last = module(tensors["inputs"], hidden, **source)
    return [outputs, *listed(last), module.attention_weights]


def looking(attention, keys, values):
    """What gives context and weights of a state, in plain PyTorch but for a location's step."""
    if isinstance(attention, bf.LocationAttention):
        return looking_where(attention, keys, values)
    seen = (torch.arange(TK) < LENS[:, None]) & MASK

    def look(state):
        sums = attention.W_q(state).unsqueeze(1) + attention.W_k(keys)
        scores = attention.w_v(torch.tanh(sums)).squeeze(2).masked_fill(~seen, -torch.inf)
        p = scores.masked_fill(~seen.any(1, keepdim=True), 0.0).softmax(1)
        return torch.bmm(p.unsqueeze(1), values).squeeze(1), p

    return look


def looking_where(attention, keys, values):
    memory = attention.memory(keys, values, LENS, mask=MASK.expand(B, TK))
    last, total = None, keys.new_zeros(B, 1, TK)

    def look(state):
        nonlocal last, total
        where = total if last is None or attention.conv is None else last
        if attention.conv is not None and attention.conv.in_channels == 2:
            where = torch.cat((where, total), 1)
        context = attention.attend(state.unsqueeze(1), memory, where, previous=last).squeeze(1)
        last = attention.attention_weights
        total = total + last
        return context, last.squeeze(1)

    return look


def by_hand(module, tensors):
    """The loop that users write."""
    look = looking(module.attention, tensors["keys"], tensors["values"])
    state, context = states_of(tensors), tensors.get("context")
    outputs, weights = [], []
    for x in tensors["inputs"]:
        if module.attention_first:
            context, p = look(listed(state)[0][-1])
        below = x if context is None else torch.cat((context, x), 1)
        top, state = module.rnn(below.unsqueeze(0), state)
        output = top[0]
        if not module.attention_first:
            looked, p = look(output)
            context = None if context is None else looked
            output = torch.cat((output, looked), 1)
        outputs.append(output)
        weights.append(p)
    return [torch.stack(outputs), *listed(state), torch.stack(weights, 1)]


@BOTH
@pytest.mark.parametrize("form", EVERY)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_formula(cls, form, layers, backend):
    if backend not in bf.backends.available():
        pytest.skip("no C++")
    module, tensors = drawn(cls, layers, form)
    with bf.backends.use(backend):
        got = with_gradients(called(module, tensors), module, tensors)
        with torch.no_grad():
            again = called(module, tensors)
    want = with_gradients(by_hand(module, tensors), module, tensors)
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(again, [x.detach() for x in want[: len(again)]], **EXACT)


ROWS, LATER = MASK.expand(B, TK), (torch.arange(TK) != 5).expand(B, 1, TK)
SOURCES = {
    "of the memory": lambda memory: {"memory": memory(ROWS)},
    "of the call": lambda memory: {"valid_lens": LENS, "mask": ROWS},
    "for one query": lambda memory: {"valid_lens": LENS, "mask": ROWS.unsqueeze(1)},
    "of both": lambda memory: {"memory": memory(ROWS | ~LATER[:, 0]), "mask": LATER},
}
assert not MASK[5]  # of both: what each of two masks leaves out


@BOTH
@pytest.mark.parametrize("source", SOURCES)
def test_where_a_mask_is_given(cls, source):
    module, tensors = drawn(cls, 1, "before the cell")
    keys_and_values = {n: tensors[n] for n in ("keys", "values")}
    memory = partial(module.attention.memory, **keys_and_values, valid_lens=LENS)
    options = SOURCES[source](lambda mask: memory(mask=mask))
    options |= {} if "memory" in options else keys_and_values
    outputs, last = module(tensors["inputs"], states_of(tensors), **options)
    got = [outputs, *listed(last), module.attention_weights]
    got, want = (with_gradients(x, module, tensors) for x in (got, by_hand(module, tensors)))
    torch.testing.assert_close(got, want, **EXACT)
    explained = (module.explain(tensors["inputs"], **x) for x in (options, {"memory": memory()}))
    assert len({*explained}) == 1


DTYPES = [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
ROUNDED = [(form, *how) for form in (*FORMS, "and their sum, before the cell") for how in DTYPES]
# The first form in fp32: test_as_exact_as_its_steps in test_recurrent.py, for each of its ways.
ROUNDED += [(form, torch.float32, False) for form, *_ in ROUNDED[3::3]]


@BOTH
@pytest.mark.parametrize(("form", "dtype", "autocast"), ROUNDED)
def test_the_parity_rule(cls, form, dtype, autocast):
    module, tensors = drawn(cls, 1, form, torch.float32 if autocast else dtype)
    doubled = {n: x.detach().double().requires_grad_() for n, x in tensors.items()}
    twin = copy.deepcopy(module).double()
    exact = with_gradients(by_hand(twin, doubled), twin, doubled)
    with torch.autocast("cpu", dtype, enabled=autocast):
        ours = with_gradients(called(module, tensors), module, tensors)
        with bf.backends.use("reference"):
            eager = with_gradients(called(module, tensors), module, tensors)
    beside.as_exact(ours, eager, exact, dtype)


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
@pytest.mark.parametrize("form", FORMS)
def test_in_two_parts_and_batch_first(cls, form):
    module, tensors = drawn(cls, 1, form)
    whole, *last, _ = called(module, tensors)
    module.batch_first = True
    memory = module.attention.memory(
        tensors["keys"], tensors["values"], LENS[:, None], mask=MASK.expand(B, TK)
    )
    inputs, state, outputs = tensors["inputs"].transpose(0, 1), states_of(tensors), []
    more = {"context": tensors["context"]} if "context" in tensors else {}
    for part in inputs.split([2, T - 2], 1):
        output, state = module(part, state, memory=memory, **more)
        outputs.append(output)
        more = {"context": output[:, -1, H:]} if more else {}
    got = [torch.cat(outputs, 1).transpose(0, 1), *listed(state)]
    torch.testing.assert_close(got, [whole, *last], **EXACT)


@BOTH
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("lengths", [[T, T, 4, 1, 1], [2, T, 1, 5, 2], [3] * B], ids=str)
def test_packed(cls, form, layers, lengths):
    """As every sequence alone, gradients too; packing has its order, all else the batch's."""
    module, tensors = drawn(cls, layers, form)
    in_order = sorted(lengths, reverse=True) == lengths
    packed = pack_padded_sequence(tensors["inputs"], lengths, enforce_sorted=in_order)
    outputs, *last, weights = called(module, {**tensors, "inputs": packed})
    assert isinstance(outputs, PackedSequence)
    padded, ends = pad_packed_sequence(outputs)
    assert ends.tolist() == lengths
    most, alone = max(lengths), []
    for i, n in enumerate(lengths):
        of_row = {**tensors, "inputs": tensors["inputs"][:n, i : i + 1]}
        output, *states, p = called(module, of_row, slice(i, i + 1))
        output = nn.functional.pad(output, (0, 0, 0, 0, 0, most - n))
        alone.append([output, *states, nn.functional.pad(p, (0, 0, 0, most - n))])
    *want, of_weights = zip(*alone, strict=True)
    want = [*(torch.cat(parts, 1) for parts in want), torch.cat(of_weights)]
    got = with_gradients([padded, *last, weights], module, tensors)
    torch.testing.assert_close(got, with_gradients(want, module, tensors), **EXACT)


def test_packed_inputs_compiled_and_on_a_memory():
    module, tensors = drawn(bf.AttentionGRU, 2, "before the cell")
    packed = pack_padded_sequence(tensors["inputs"], [2, T, 1, 5, 2], enforce_sorted=False)
    source = {name: tensors[name] for name in ("keys", "values")}
    (want, *_), memory = module(packed, **source), module.attention.memory(**source)
    found = torch.compile(module, backend="eager")(packed, **source), module(packed, memory=memory)
    assert module.explain(packed, memory=memory).count("cpu") == 1
    want = with_gradients([want.data], module, source)
    for got, _ in found:
        torch.testing.assert_close(with_gradients([got.data], module, source), want, **EXACT)


SAID = {
    "after it": "the first step alone, then cpu: one operator: its C++ takes all steps",
    "after it, not fed": "all steps of the layer, then one call of the attention",
}
if "cpu" not in bf.backends.available():
    SAID["after it"] = "step by step: one step, dropped weights, or layers that no operator takes"


@pytest.mark.skipif("cpu" not in bf.backends.available(), reason="counts the C++ operator")
def test_when_all_steps_but_one_are_an_operator():
    module, tensors = drawn(bf.AttentionGRU, attention_dropout=0.5)
    assert "decode" not in counts(lambda: called(module, tensors))
    assert counts(lambda: called(module.eval(), tensors))["decode"] == 1
    one = {**tensors, "inputs": tensors["inputs"][:1]}
    assert "decode" not in counts(lambda: called(module, one))
    module.attention.register_forward_hook(lambda *_: None)
    assert "decode" not in counts(lambda: called(module, tensors))


@pytest.mark.parametrize("form", SAID)
def test_hooks_defaults_and_words(form):
    module, tensors = drawn(bf.AttentionGRU, 1, form)
    fed = "context" in tensors
    plain = {n: tensors[n] for n in ("inputs", "keys", "values")}
    want = module(**plain)
    zeros = {"hidden": torch.zeros(1, B, H).double()}
    zeros |= {"context": torch.zeros(B, DV).double()} if fed else {}
    torch.testing.assert_close(module(**plain, **zeros), want)
    assert module.explain(**plain) == SAID[form]
    seen = []
    module.attention.register_forward_hook(
        lambda m, inputs, y: seen.append(inputs[0].shape) or 0 * y
    )
    outputs, _ = module(**plain)
    assert seen == ([(B, 1, H)] * T if fed else [(B, T, H)])
    assert not outputs[..., H:].any()
    assert fed or (type(module.rnn), module.rnn.input_size) == (nn.GRU, E)


@pytest.mark.skipif("cpu" not in bf.backends.available(), reason="counts the C++ operator")
def test_every_run_of_packed_inputs_is_explained():
    module, tensors = drawn(bf.AttentionGRU)
    packed = pack_padded_sequence(tensors["inputs"], [T, T, T - 1, T - 1, T - 1])
    said = module.explain(packed, keys=tensors["keys"], values=tensors["values"])
    assert (
        said == f"{SAID['after it']}; step by step: one step, dropped weights, or layers that "
        "no operator takes"
    )


@pytest.mark.parametrize("form", WITH_LOCATION)
def test_a_location_is_explained(form):
    module, tensors = drawn(bf.AttentionGRU, 1, form)
    plain = {n: tensors[n] for n in ("inputs", "keys", "values")}
    assert "step by step" in module.explain(**plain)


@pytest.mark.parametrize("form", SAID)
def test_dropout(form):
    module, tensors = drawn(bf.AttentionLSTM, 2, form, attention_dropout=0.5, dropout=0.5)
    torch.manual_seed(5)
    first = called(module, tensors)[0]
    assert not torch.equal(called(module, tensors)[0], first)
    torch.manual_seed(5)
    assert torch.equal(called(module, tensors)[0], first)
    want = by_hand(module.eval(), tensors)
    torch.testing.assert_close(called(module, tensors), want, **EXACT)

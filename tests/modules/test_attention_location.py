"""AttentionGRU and AttentionLSTM whose attention sees where the steps before looked."""

import pytest
import torch

import bahdanau_fast as bf

T, B, TK, E, D, H = 5, 3, 11, 4, 6, 8
LENS = torch.tensor([11, 4, 7])
FORMS = {
    "last weights": {"channels": 3, "kernel_size": 5},
    "and their sum": {"channels": 3, "kernel_size": 5, "inputs": 2, "bias": False},
    "coverage": {"channels": None},
    "forward": {"channels": 2, "kernel_size": 3, "normalize": "forward"},
}


def made(cell, form, dtype=torch.float64, **options):
    torch.manual_seed(0)
    module = cell(E, H, 2, key_size=D, location=FORMS[form], dtype=dtype, **options)
    return module, torch.randn(T, B, E, dtype=dtype), torch.randn(B, TK, D, dtype=dtype)


def by_hand(module, inputs, keys):
    """The loop that users write."""
    attention, memory, hidden = module.attention, module.attention.memory(keys, None, LENS), None
    zeros = inputs.new_zeros(1, B, H).expand(2, B, H)
    hidden = (zeros, zeros) if isinstance(module, bf.AttentionLSTM) else zeros
    context, last = inputs.new_zeros(B, D), None
    total = inputs.new_zeros(B, 1, TK)
    outputs, weights = [], []
    two = attention.conv is not None and attention.conv.in_channels == 2

    def look(state):
        location = total if last is None or attention.conv is None else last
        location = torch.cat((location, total), 1) if two else location
        return attention.attend(state[:, None], memory, location, previous=last).squeeze(1)

    for step in inputs:
        if module.attention_first:
            context = look((hidden[0] if isinstance(hidden, tuple) else hidden)[-1])
            last = attention.attention_weights
            total = total + last
        features, hidden = module.rnn(torch.cat((context, step), 1)[None], hidden)
        if not module.attention_first:
            context = look(features[0])
            last = attention.attention_weights
            total = total + last
            features = torch.cat((features, context[None]), 2)
        outputs.append(features)
        weights.append(last)
    return torch.cat(outputs), torch.cat(weights, 1)


@pytest.mark.parametrize("first", [True, False], ids=["before the cell", "after it"])
@pytest.mark.parametrize("cell", [bf.AttentionGRU, bf.AttentionLSTM])
@pytest.mark.parametrize("form", FORMS)
def test_as_by_hand(form, cell, first):
    module, inputs, keys = made(cell, form, attention_first=first)
    leaves = [inputs.requires_grad_(), keys.requires_grad_(), *module.parameters()]
    found = []
    for call in (lambda: module(inputs, keys=keys, valid_lens=LENS)[0], None):
        if call is None:
            outputs, weights = by_hand(module, inputs, keys)
        else:
            outputs, weights = call(), module.attention_weights
        loss = outputs.cos().sum() + weights.square().sum()
        found.append([outputs, weights, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    module, inputs, keys = made(bf.AttentionGRU, "and their sum", dtype)
    outputs, _ = module(inputs, keys=keys)
    assert outputs.dtype == dtype
    assert module.attention_weights.shape == (B, T, TK)
    assert module.explain(inputs, keys=keys).split(": ")[1].startswith("step by step")

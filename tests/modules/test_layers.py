"""Layers that other code has changed are called: each kind of change, on each of the layers."""

import copy
import pickle
import warnings

import pytest
import torch
from changed import (
    EXACT,
    LARGE,
    LAYERS,
    LENS,
    SMALL,
    changed,
    inputs,
    mlp_pair,
    pair,
    same_decoding,
    same_results,
    same_training,
)
from decoders import counts
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, prune
from translators import STEPS, model, sources

import bahdanau_fast as bf
from bahdanau_fast.modules import base
from bahdanau_fast.seq2seq import greedy


class LowRank(nn.Module):
    """LoRA written by hand: the layer and an adapter beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        kind = {"dtype": base.weight.dtype, "bias": False}
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, **kind)
        self.up = nn.Linear(rank, base.out_features, **kind)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def at(change):
    """A change of a layer as one of the module that holds it."""
    return lambda module, name: change(module.get_submodule(name))


def replaced(make):
    return lambda module, name: setattr(module, name, make(module.get_submodule(name)))


def patched(layer):
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 1.5


def with_bias(layer):
    size = layer.out_features, layer.in_features
    made = nn.Linear(*size[::-1], dtype=layer.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(layer.weight)
    return made


def lazy(layer):
    return nn.LazyLinear(layer.out_features, bias=False, dtype=layer.weight.dtype)


def scaled(_, __, output):
    return output * 1.5


def shifted(_, args):
    return (args[0] * 0.5 + 0.1,)


def half_of_input(_, grad_input, __):
    return (None if grad_input[0] is None else grad_input[0] * 0.5,)


def half_of_output(_, grad_output):
    return (grad_output[0] * 0.5,)


CHANGES = {
    "forward hook": at(lambda layer: layer.register_forward_hook(scaled) and None),
    "forward hook, always called": at(
        lambda layer: layer.register_forward_hook(scaled, always_call=True) and None
    ),
    "forward pre-hook": at(lambda layer: layer.register_forward_pre_hook(shifted) and None),
    "backward hook": at(lambda layer: layer.register_full_backward_hook(half_of_input) and None),
    "backward pre-hook": at(
        lambda layer: layer.register_full_backward_pre_hook(half_of_output) and None
    ),
    "patched forward": at(patched),
    "LoRA by hand": replaced(LowRank),
    "layer with a bias": replaced(with_bias),
    "lazy layer": replaced(lazy),
    "Sequential": replaced(lambda layer: nn.Sequential(layer, nn.Softsign())),
    "old weight_norm": at(lambda layer: nn.utils.weight_norm(layer) and None),
    "old spectral_norm": at(lambda layer: nn.utils.spectral_norm(layer) and None),
    "weight_norm": at(lambda layer: parametrizations.weight_norm(layer) and None),
    "spectral_norm": at(lambda layer: parametrizations.spectral_norm(layer) and None),
    "orthogonal": at(lambda layer: parametrizations.orthogonal(layer) and None),
    "l1 pruning": at(lambda layer: prune.l1_unstructured(layer, "weight", 0.5) and None),
    "random pruning": at(lambda layer: prune.random_unstructured(layer, "weight", 0.4) and None),
}
# A lazy layer draws its weight in the first call.
WITH_WEIGHTS = {name: change for name, change in CHANGES.items() if name != "lazy layer"}
GLOBAL_HOOKS = {
    "forward": (torch_module.register_module_forward_hook, scaled),
    "forward pre": (torch_module.register_module_forward_pre_hook, shifted),
    "backward": (torch_module.register_module_full_backward_hook, half_of_input),
    "backward pre": (torch_module.register_module_full_backward_pre_hook, half_of_output),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.filterwarnings("ignore:Lazy modules"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated"),
]


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_layer_is_called(change, name, sizes):
    given = inputs(sizes)
    ours, plain = (changed(module, change, name) for module in pair(sizes))
    torch.manual_seed(6)  # a lazy layer draws its weight at the first call
    ours(*given, LENS)
    torch.manual_seed(6)
    plain(*given, LENS)
    same_training(ours, plain, given)
    same_results(ours.eval(), plain.eval(), given)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_after_a_call_is_seen(change):
    given = inputs(LARGE, grad=False)
    for name in LAYERS:
        ours, plain = pair(LARGE)
        memory = ours.memory(*given[1:], LENS)
        for _ in range(2):
            ours(*given, LENS)
        ours, plain = (changed(module.eval(), change, name) for module in (ours, plain))
        torch.manual_seed(6)
        want = plain(*given, LENS)
        torch.manual_seed(6)
        torch.testing.assert_close(ours(*given, LENS), want, **EXACT)
        if name != "W_k":  # that one's share of a memory was computed when it was made
            torch.testing.assert_close(ours.attend(given[0], memory), want, **EXACT)


@pytest.mark.parametrize("name", ["W_k", "W_q", "v"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_under_the_oldest_names(change, name):
    given = inputs({**LARGE, "query": LARGE["key"]})
    ours, plain = (changed(module, change, name) for module in mlp_pair(LARGE))
    if change is CHANGES["lazy layer"]:
        for module in (ours, plain):
            torch.manual_seed(6)
            module(*given, LENS)
    same_training(ours, plain, given)
    same_results(ours.eval(), plain.eval(), given)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_hooks_of_all_modules(kind, sizes):
    register, hook = GLOBAL_HOOKS[kind]
    given = inputs(sizes)
    ours, plain = pair(sizes)
    before = ours(*given, LENS)
    handle = register(lambda module, *args: hook(module, *args) if is_linear(module) else None)
    try:
        same_training(ours, plain, given)
        same_results(ours, plain, given)
    finally:
        handle.remove()
    same_training(ours, plain, given)
    assert not torch.equal(ours(*given, LENS), before)


def is_linear(module):
    return type(module) is nn.Linear


@pytest.mark.parametrize("cls", [bf.AttentionGRU, bf.AttentionLSTM])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("change", WITH_WEIGHTS.values(), ids=WITH_WEIGHTS)
def test_a_decoder_takes_single_steps(change, name, cls):
    def in_eval(module, where):
        change(module.eval(), where)

    (ours, got), (plain, want) = same_decoding(cls, in_eval, name, **EXACT)
    ours.zero_grad()
    got.square().sum().backward()
    grads = {n: p.grad for n, p in ours.attention.named_parameters()}
    want.square().sum().backward()
    torch.testing.assert_close(
        grads, {n: p.grad for n, p in plain.named_parameters()}, rtol=1e-8, atol=1e-10
    )


@pytest.mark.parametrize("part", ["attention.W_q", "attention.w_v", "rnn", "dense", "embedding"])
def test_greedy_decoding_takes_single_steps(part):
    translator = model().eval()
    layer = translator.decoder.get_submodule(part)
    forward, calls = layer.forward, []
    before, _ = greedy(translator, *sources(), STEPS)

    def counted(*args, **kwargs):
        calls.append(part)
        return forward(*args, **kwargs)

    layer.forward = counted
    seen = counts(lambda: greedy(translator, *sources(), STEPS))
    assert calls
    assert "decode_greedy" not in seen
    assert torch.equal(greedy(translator, *sources(), STEPS)[0], before)


def test_greedy_decoding_with_lora_on_the_scoring_layer():
    translator = model().eval()
    reference = copy.deepcopy(translator)
    attention = translator.decoder.attention
    attention.w_v = LowRank(attention.w_v)
    with torch.no_grad():  # the same layer, its adapter merged into the weight
        attention.w_v.up.weight.mul_(8.0)
        merged = attention.w_v.up.weight @ attention.w_v.down.weight
        reference.decoder.attention.w_v.weight.add_(merged)
    tokens, weights = greedy(translator, *sources(), STEPS)
    want_tokens, want = greedy(reference, *sources(), STEPS)
    assert torch.equal(tokens, want_tokens)
    torch.testing.assert_close(weights, want, **EXACT)


# Quantized layers know fp32 only.
QUANTIZED = {"rtol": 1e-5, "atol": 1e-6}


def quantized(module, *names):
    from torch.ao.quantization import default_dynamic_qconfig, quantize_dynamic

    which = dict.fromkeys(names, default_dynamic_qconfig) if names else {nn.Linear}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao moves to another package
        return quantize_dynamic(module, which, dtype=torch.qint8)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("names", [(), *((name,) for name in LAYERS)], ids=str)
def test_quantize_dynamic(names, sizes):
    given = inputs(sizes, torch.float32, grad=False)
    ours, plain = (quantized(module.eval(), *names) for module in pair(sizes, torch.float32))
    for name in names or LAYERS:
        assert callable(ours.get_submodule(name).weight)
    with torch.no_grad():
        # The scale of what is quantized is that of a whole call: all queries in one.
        same_results(ours, plain, given, sizes["Tq"], **QUANTIZED)


@pytest.mark.parametrize("cls", [bf.AttentionGRU, bf.AttentionLSTM])
def test_a_quantized_decoder(cls):
    def change(module, _):
        return quantized(module.eval())

    with torch.no_grad():
        (ours, _), _ = same_decoding(cls, change, None, torch.float32, **QUANTIZED)
    assert callable(ours.attention.w_v.weight)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("forward hook", name) for name in LAYERS),
        ("patched forward", "W_q"),
        ("LoRA by hand", "W_k"),
        ("weight_norm", "w_v"),
    ],
)
def test_compiled_whole(kind, name):
    given = inputs(LARGE)
    ours, plain = (changed(module, CHANGES[kind], name) for module in pair(LARGE))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    context, want = compiled(*given, LENS), plain(*given, LENS)
    torch.testing.assert_close(context, want, **EXACT)
    context.square().sum().backward()
    want.square().sum().backward()
    for (_, p), (_, q) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **EXACT)


def test_functional_call_and_copies_of_changed_modules():
    given = inputs(LARGE)
    for how in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        ours, plain = (changed(m, CHANGES["LoRA by hand"], "w_v") for m in pair(LARGE))
        same_training(how(ours), how(plain), given)
    halved = {name: p.detach() * 0.5 for name, p in ours.named_parameters()}
    got = torch.func.functional_call(ours, halved, (*given, LENS))
    want = torch.func.functional_call(plain, halved, (*given, LENS))
    torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("bias", [False, True])
def test_traced_by_jit(sizes, bias):
    ours = pair(sizes, bias=bias)[0].eval()
    given = inputs(sizes, grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of sizes that are checked
        traced = torch.jit.trace(ours, (*given, LENS))
    torch.testing.assert_close(traced(*given, LENS), ours(*given, LENS), **EXACT)
    for lens in (torch.tensor([1, 2, 3]), torch.tensor([7, 0, 5])):
        torch.testing.assert_close(traced(*given, lens), ours(*given, lens), **EXACT)
    other = inputs({**sizes, "Tq": 5, "Tk": 9}, grad=False)
    torch.testing.assert_close(traced(*other, LENS), ours(*other, LENS), **EXACT)
    out = traced(*given, LENS)
    got = torch.autograd.grad(out.square().sum(), list(traced.parameters()))
    want = torch.autograd.grad(ours(*given, LENS).square().sum(), list(ours.parameters()))
    torch.testing.assert_close(got, want, **EXACT)


def test_traced_by_jit_inside_a_decoder():
    decoder = bf.AttentionGRU(3, 6, key_size=5, value_size=4).double().eval()
    steps, hidden, keys, values = (
        torch.randn(s).double() for s in ((4, 3, 3), (1, 3, 6), (3, 7, 5), (3, 7, 4))
    )
    decoder(steps, hidden, keys, values, LENS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(decoder, (steps, hidden, keys, values, LENS))
    for lens in (LENS, torch.tensor([1, 2, 3])):
        want = decoder(steps * 2, hidden, keys + 1, values, lens)
        torch.testing.assert_close(traced(steps * 2, hidden, keys + 1, values, lens), want, **EXACT)


def test_plain_layers_take_the_fast_way():
    ours, _ = pair(LARGE)
    given = inputs(LARGE)
    assert all(base.plain_weight(ours.get_submodule(name)) is not None for name in LAYERS)
    assert counts(lambda: ours(*given, LENS))["attend"] == 1
    handle = ours.w_v.register_forward_hook(scaled)
    assert "attend" not in counts(lambda: ours(*given, LENS))
    handle.remove()
    assert counts(lambda: ours(*given, LENS))["attend"] == 1

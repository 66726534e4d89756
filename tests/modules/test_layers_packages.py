"""PEFT and accelerate, the packages themselves, on each of the layers.

They are imported where they are used: it takes seconds, and every worker collects this file.
"""

import pytest
import torch
from decoders import CELLS, EXACT, call, given, layer
from ways.layers import there, ways
from ways.modes import play, variants
from ways.sides import REMEMBERED, SMALL, Pair

import bahdanau_fast as bf

LAYERS = ("W_k", "W_q", "w_v")
SIZES = pytest.mark.parametrize("size", [SMALL, REMEMBERED], ids=["small", "large"])


def lora(side, targets, **options):
    """The module under PEFT, with adapters that are not zero as LoRA's are at first."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets, **options)
    side.module = peft.get_peft_model(side.module, config)
    with torch.no_grad():
        for name, parameter in side.module.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.5 * side.draw(*parameter.shape))


def tripled(layer):
    """Puts a hook of accelerate's on it that changes what the layer gets and gives."""
    from accelerate import hooks

    class Tripled(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            return (args[0] * 0.5,), kwargs

        def post_forward(self, module, output):
            return output * 3.0

    hooks.add_hook_to_module(layer, Tripled())


WAYS = ways(
    LAYERS,
    {
        "LoRA": lambda side: lora(side, [side.place]),
        "DoRA": lambda side: lora(side, [side.place], use_dora=True),
        "a hook of accelerate's": there(tripled),
    },
    kinds=("additive", "memory"),
)


@pytest.mark.parametrize("mode", ["eager", "trained"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.how)
def test_way(way, mode):
    for name, options in variants(way, mode):
        assert play(way, mode, **options) == [], name


def pair(size=REMEMBERED, **options):
    made = Pair(size=size, kind="memory")
    for side in made.sides:
        lora(side, list(LAYERS), **options)
    return made


@SIZES
def test_lora_of_all_layers_merged_and_taken_out(size):
    made, before = pair(size), []
    trained = [name for name, p in made.ours.module.named_parameters() if p.requires_grad]
    assert {name.split(".lora_")[0].split(".")[-1] for name in trained} == set(LAYERS)
    for method in ("eval", "merge_adapter", "unmerge_adapter", "merge_and_unload"):
        for side in made.sides:
            changed = getattr(side.module, method)()
            side.module = side.module if changed is None else changed
        assert made.do(method, lambda side: side.call())
        before.append(made.ours.call()[0])
        torch.testing.assert_close(before[-1], before[0])
    assert made.wrong == []
    assert isinstance(made.ours.module, bf.AdditiveAttention)


def test_lora_turned_off():
    made = pair()
    with made.sides[0].module.disable_adapter(), made.ours.module.disable_adapter():
        assert made.do("turned off", lambda side: side.call())
    assert made.do("turned on", lambda side: side.call())
    assert made.wrong == []


@pytest.mark.parametrize("name", LAYERS)  # of several layers, each would draw the other's mask
def test_lora_with_dropout(name):
    made = Pair()

    def step(side):
        lora(side, [name], lora_dropout=0.5)
        torch.manual_seed(7)
        return side.call()

    assert made.do("dropped", step)
    assert made.wrong == []


def offload(kind, module, folder):
    import accelerate

    if kind == "cpu_offload":
        return accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    if kind == "disk_offload":
        return accelerate.disk_offload(module, folder, execution_device=torch.device("cpu"))
    accelerate.utils.offload_state_dict(folder, module.state_dict())
    return accelerate.dispatch_model(
        module, {"": "disk"}, main_device="cpu", offload_dir=folder, force_hooks=True
    )


@SIZES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_weights_that_are_there_in_the_call_alone(kind, bias, size, tmp_path):
    made = Pair(size=size, bias=bias)
    ours = made.ours
    with torch.no_grad():
        ours.module = offload(kind, ours.module, tmp_path)
        for _ in range(2):
            assert made.do("offloaded", lambda side: side.call())
        assert all(p.is_meta for p in ours.module.parameters())
        if bias:
            with pytest.raises(ValueError, match="device of the module's bias, meta, got cpu"):
                ours.module.memory(ours.keys, ours.values, ours.lens)
        else:
            memory = ours.module.memory(ours.keys, ours.values, ours.lens)
            got = ours.module.attend(ours.queries, memory)
            torch.testing.assert_close(got, made.sides[0].call()[0], **EXACT)
    assert made.wrong == []


@pytest.mark.parametrize("cls", CELLS)
def test_a_decoder_with_its_weights_offloaded(cls):
    import accelerate

    module, tensors = layer(cls, 2), given(cls, 2)
    with torch.no_grad():
        want = call(module, tensors)
        accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
        torch.testing.assert_close(call(module, tensors), want, **EXACT)

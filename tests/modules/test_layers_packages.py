"""PEFT and accelerate, the packages themselves, on each of the layers."""

import copy

import accelerate
import peft
import pytest
import torch
from accelerate import hooks
from changed import (
    EXACT,
    LARGE,
    LAYERS,
    LENS,
    SMALL,
    changed,
    decoder_inputs,
    decoders,
    inner,
    inputs,
    pair,
    plain_decoder,
    same_decoding,
    same_results,
    same_training,
)

import bahdanau_fast as bf

SIZES = pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
TARGETS = pytest.mark.parametrize("targets", [[name] for name in LAYERS] + [list(LAYERS)], ids=str)
CELLS = pytest.mark.parametrize("cls", [bf.AttentionGRU, bf.AttentionLSTM])


def lora(module, targets, **options):
    """The module under PEFT, with adapters that are not zero as LoRA's are at first."""
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets, **options)
    wrapped = peft.get_peft_model(module, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5)
    return wrapped


@SIZES
@TARGETS
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
def test_lora(targets, sizes, options):
    given = inputs(sizes)
    ours, plain = (changed(module, lora, targets, **options) for module in pair(sizes))
    trained = [name for name, p in ours.named_parameters() if p.requires_grad]
    assert {name.split(".lora_")[0].split(".")[-1] for name in trained} == set(targets)
    for _, _, _, grads in same_training(ours, plain, given):
        assert all(grads[name].abs().max() > 0 for name in trained)
    same_results(ours.eval(), plain.eval(), given)
    with ours.disable_adapter(), plain.disable_adapter():
        same_results(ours, plain, given)


@SIZES
@pytest.mark.parametrize("name", LAYERS)  # of several layers, each would draw the other's mask
def test_lora_with_dropout(name, sizes):
    given = inputs(sizes)
    ours, plain = (changed(module, lora, [name], lora_dropout=0.5) for module in pair(sizes))
    same_training(ours, plain, given)


@SIZES
@TARGETS
def test_lora_merged_and_taken_out(targets, sizes):
    given = inputs(sizes, grad=False)
    ours, plain = (changed(module, lora, targets).eval() for module in pair(sizes))
    before = ours(*given, LENS)
    for module in (ours, plain):
        module.merge_adapter()
    same_results(ours, plain, given)
    for module in (ours, plain):
        module.unmerge_adapter()
    same_results(ours, plain, given)
    ours, plain = ours.merge_and_unload(), plain.merge_and_unload()
    assert isinstance(ours, bf.AdditiveAttention)
    same_results(ours, plain, given)
    torch.testing.assert_close(ours(*given, LENS), before, **EXACT)


@CELLS
@TARGETS
def test_lora_in_a_decoder(targets, cls):
    def change(module, where):
        return lora(module, where).eval().get_base_model()

    (ours, got), (plain, want) = same_decoding(cls, change, targets, **EXACT)
    got.square().sum().backward()
    grads = {name: p.grad for name, p in ours.attention.named_parameters()}
    want.square().sum().backward()
    assert any("lora_" in name and grad is not None for name, grad in grads.items())
    want = {name: p.grad for name, p in plain.named_parameters()}
    # The recurrent layer is shared by both: only the attention's gradients are compared.
    torch.testing.assert_close(grads, want, rtol=1e-8, atol=1e-10)


class Tripled(hooks.ModelHook):
    """A hook of accelerate's that changes what the layer gets and gives."""

    def pre_forward(self, module, *args, **kwargs):
        return (args[0] * 0.5,), kwargs

    def post_forward(self, module, output):
        return output * 3.0


def hooked(module, *names):
    for name in names:
        hooks.add_hook_to_module(module.get_submodule(name), Tripled())


@SIZES
@TARGETS
def test_a_hook_of_accelerate(targets, sizes):
    given = inputs(sizes)
    ours, plain = pair(sizes)
    before = ours(*given, LENS)
    for module in (ours, plain):
        changed(module, hooked, *targets)
    same_training(ours, plain, given)
    same_results(ours, plain, given)
    for module in (ours, plain):
        hooks.remove_hook_from_submodules(module)
    same_training(ours, plain, given)
    assert not torch.equal(ours(*given, LENS), before)


@CELLS
@TARGETS
def test_a_hook_of_accelerate_in_a_decoder(targets, cls):
    def change(module, names):
        hooked(module, *names)

    same_decoding(cls, change, targets, **EXACT)


@SIZES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_weights_that_are_there_in_the_call_alone(kind, bias, sizes, tmp_path):
    given = inputs(sizes, grad=False)
    ours, plain = pair(sizes, bias=bias)
    with torch.no_grad():
        want = plain(*given, LENS)
        offloaded = offload(kind, ours, tmp_path)
        assert all(p.is_meta for p in offloaded.parameters())
        for _ in range(2):
            torch.testing.assert_close(offloaded(*given, LENS), want, **EXACT)
            torch.testing.assert_close(ours.attention_weights, plain.attention_weights, **EXACT)
        assert all(p.is_meta for p in offloaded.parameters())
        if bias:
            with pytest.raises(ValueError, match="device of the module's bias, meta, got cpu"):
                ours.memory(*given[1:], LENS)
        else:
            memory = ours.memory(*given[1:], LENS)
            torch.testing.assert_close(ours.attend(given[0], memory), want, **EXACT)


def offload(kind, module, folder):
    if kind == "cpu_offload":
        return accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    if kind == "disk_offload":
        return accelerate.disk_offload(module, folder, execution_device=torch.device("cpu"))
    accelerate.utils.offload_state_dict(folder, module.state_dict())
    return accelerate.dispatch_model(
        module, {"": "disk"}, main_device="cpu", offload_dir=folder, force_hooks=True
    )


@CELLS
def test_a_decoder_with_its_weights_offloaded(cls):
    ours, plain = decoders(cls)
    rnn = copy.deepcopy(ours.rnn)
    steps, hidden, keys, values = decoder_inputs(cls)
    with torch.no_grad():
        accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
        got, _ = ours(steps, hidden, keys, values, LENS)
        want, weights = plain_decoder(plain, rnn, steps, hidden, keys, values)
    torch.testing.assert_close((got, ours.attention_weights), (want, weights), **EXACT)


@SIZES
def test_training_prepared_by_accelerate(sizes):
    given = inputs(sizes)
    ours, plain = pair(sizes)
    prepared = accelerate.Accelerator(cpu=True).prepare(ours)
    same_training(prepared, plain, given)
    assert inner(prepared) is ours

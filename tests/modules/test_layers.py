"""Layers that other code has changed are called; what a way of test_ways.py cannot draw.

That each kind of change on each layer gives the plain module's results and gradients is
test_ways.py, ``ways/layers.py``.
"""

import warnings

import pytest
import torch
from course import CourseAttention, CourseMLPAttention
from profiled import counts
from torch import nn
from torch.nn.modules import module as torch_module
from ways.modes import play
from ways.sides import DK, DQ, DV, REMEMBERED, SMALL, Pair, Way

import bahdanau_fast as bf
from bahdanau_fast.modules import layers

LAYERS = ("W_k", "W_q", "w_v")
LENS = torch.tensor([4, 0, 7])
SIZES = pytest.mark.parametrize("size", [SMALL, REMEMBERED], ids=["small", "large"])


def inputs(Tq=2, Tk=53, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = (3, Tq, DQ), (3, Tk, DK), (3, Tk, DV)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def made(hidden, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return bf.AdditiveAttention(DK, DQ, hidden, dtype=dtype, **options)


def scaled(_, __, output):
    return output * 1.5


def half_of_input(_, grad_input, __):
    return (None if grad_input[0] is None else grad_input[0] * 0.5,)


GLOBAL_HOOKS = {
    "forward": (torch_module.register_module_forward_hook, scaled),
    "forward pre": (
        torch_module.register_module_forward_pre_hook,
        lambda _, args: (args[0] * 0.5 + 0.1,),
    ),
    "backward": (torch_module.register_module_full_backward_hook, half_of_input),
    "backward pre": (
        torch_module.register_module_full_backward_pre_hook,
        lambda _, grad_output: (grad_output[0] * 0.5,),
    ),
}


@SIZES
@pytest.mark.parametrize("kind", ["additive", "memory", "location"])
@pytest.mark.parametrize("register", GLOBAL_HOOKS)
def test_hooks_of_all_modules(register, kind, size):
    """In training: they change what every layer takes or gives."""
    register, hook = GLOBAL_HOOKS[register]
    seen = []

    def of_layers(module, *args):
        if type(module) is nn.Linear:
            seen.append(module)
            return hook(module, *args)
        return None

    handle = register(of_layers)
    try:
        nothing = Way("layers", "nothing", lambda s: None, moves=False)
        assert play(nothing, "trained", kind=kind, size=size) == []
    finally:
        handle.remove()
    called = {id(module) for module in seen}
    assert len(called) >= 6  # three layers of each side


@pytest.mark.parametrize(("batch", "Tk"), [(0, 5), (3, 0)])
def test_a_called_dropout_of_nothing(batch, Tk):
    module = made(8)
    module.dropout = nn.Dropout(0.1, inplace=True)
    queries, keys, values = (x[:batch] for x in inputs(Tk=Tk))
    assert torch.equal(module(queries, keys, values), queries.new_zeros(batch, 2, DV))


def test_a_memory_made_before_a_change():
    """Its projected keys stay; the other layers are called as they are now."""
    for name in ("W_q", "w_v"):
        module, (queries, keys, values) = made(19), inputs()
        memory = module.memory(keys, values, LENS)
        module.get_submodule(name).register_forward_hook(scaled)
        want = module(queries, keys, values, LENS)
        torch.testing.assert_close(module.attend(queries, memory), want)


@pytest.mark.parametrize("name", ["W_k", "W_q", "v"])
def test_under_the_oldest_names(name):
    ours, plain = bf.MLPAttention(19, DK).double(), CourseMLPAttention(19, DK).double()
    ours.load_state_dict(plain.state_dict())
    query, keys = (torch.randn(3, n, DK).double() for n in (2, 53))
    for module in (ours, plain):
        module.get_submodule(name).register_forward_hook(scaled)
    torch.testing.assert_close(ours(query, keys, keys, LENS), plain(query, keys, keys, LENS))


def quantized(module, *names):
    from torch.ao.quantization import default_dynamic_qconfig, quantize_dynamic

    which = dict.fromkeys(names, default_dynamic_qconfig) if names else {nn.Linear}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao moves to another package
        return quantize_dynamic(module.eval(), which, dtype=torch.qint8)


@SIZES
@pytest.mark.parametrize("names", [(), *((name,) for name in LAYERS)], ids=str)
def test_quantize_dynamic(names, size):
    """Such a layer has no weight, but a method of that name."""
    pair = Pair(size=size, dtype=torch.float32, kind="memory")
    for side in pair.sides:
        side.module = quantized(side.module, *names)
    for name in names or LAYERS:
        assert callable(pair.ours.module.get_submodule(name).weight)
    with torch.no_grad():
        for call in ("first", "second"):
            assert pair.do(call, lambda side: side.call())
    assert pair.wrong == []


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_whole(name):
    """With a hook that is there already: ways have those that come later."""
    given = inputs()
    ours, plain = made(19), CourseAttention(DK, DQ, 19).double()
    plain.load_state_dict(ours.state_dict())
    for module in (ours, plain):
        module.get_submodule(name).register_forward_hook(scaled)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    got, want = compiled(*given, LENS), plain(*given, LENS)
    torch.testing.assert_close(got, want)
    for module, context in ((ours, got), (plain, want)):
        context.square().sum().backward()
        module.grads = [p.grad for p in module.parameters()]
    torch.testing.assert_close(ours.grads, plain.grads)


def traced_by_jit(module, *given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of sizes that are checked
        return torch.jit.trace(module, given)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@SIZES
@pytest.mark.parametrize("bias", [False, True])
def test_traced_by_jit(size, bias):
    _, Tk, hidden = size
    ours, given = made(hidden, bias=bias).eval(), inputs(Tk=Tk)
    traced = traced_by_jit(ours, *given, LENS)
    for lens in (LENS, torch.tensor([1, 2, 3]), torch.tensor([7, 0, 5])):
        torch.testing.assert_close(traced(*given, lens), ours(*given, lens))
    other = inputs(Tq=5, Tk=9)
    torch.testing.assert_close(traced(*other, LENS), ours(*other, LENS))
    out = traced(*given, LENS)
    got = torch.autograd.grad(out.square().sum(), list(traced.parameters()))
    want = torch.autograd.grad(ours(*given, LENS).square().sum(), list(ours.parameters()))
    torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_traced_by_jit_inside_a_decoder():
    decoder = bf.AttentionGRU(3, 6, key_size=5, value_size=4).double().eval()
    steps, hidden, keys, values = (
        torch.randn(s).double() for s in ((4, 3, 3), (1, 3, 6), (3, 7, 5), (3, 7, 4))
    )
    decoder(steps, hidden, keys, values, LENS)
    traced = traced_by_jit(decoder, steps, hidden, keys, values, LENS)
    for lens in (LENS, torch.tensor([1, 2, 3])):
        want = decoder(steps * 2, hidden, keys + 1, values, lens)
        torch.testing.assert_close(traced(steps * 2, hidden, keys + 1, values, lens), want)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(2, 2), bf.MLPAttention(4, 4, 0.0)])

    def forward(self, x: torch.Tensor):
        return self.parts[0](x)


SCRIPTED = {
    "AdditiveAttention": bf.AdditiveAttention(4),
    "LocationAttention": bf.LocationAttention(4, 4, 4),
    "AttentionGRU": bf.AttentionGRU(4, 4),
    "AttentionLSTM": bf.AttentionLSTM(4, 4),
    "DotProductAttention": bf.DotProductAttention(),
    "MLPAttention": Holder(),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripting_says_what_to_do(kind):
    said = rf"cannot compile {kind}: use torch\.export or torch\.jit\.trace"
    with pytest.raises(RuntimeError, match=said):
        torch.jit.script(SCRIPTED[kind])


def test_plain_layers_take_the_fast_way():
    ours, given = made(19), inputs()
    assert all(layers.plain_weight(ours.get_submodule(name)) is not None for name in LAYERS)
    assert counts(lambda: ours(*given, LENS))["attention"] == 1
    handle = ours.w_v.register_forward_hook(scaled)
    assert "attention" not in counts(lambda: ours(*given, LENS))
    handle.remove()
    assert counts(lambda: ours(*given, LENS))["attention"] == 1

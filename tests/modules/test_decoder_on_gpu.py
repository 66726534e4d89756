"""The loop of a decoder on a GPU, with attention and cells for CPU tensors, against its steps."""

import copy

import cells
import pytest
import torch
from decoders import CELLS, EXACT, LENS, by_steps, call, given, layer, operator_of, results

import bahdanau_fast as bf
from bahdanau_fast.modules import decoder_loop
from bahdanau_fast.ops import decode_on_gpu
from bahdanau_fast.seq2seq import Seq2SeqAttentionDecoder


@pytest.fixture(autouse=True)
def loop(monkeypatch):
    """Calls take the loop, with the kernels that CPU tensors have."""
    ran = []
    for name in ("forward", "backward", "write"):
        function = getattr(decode_on_gpu, name)
        monkeypatch.setattr(
            decode_on_gpu, name, lambda *args, f=function, n=name: ran.append(n) or f(*args)
        )
    monkeypatch.setattr(decoder_loop, "_operator", operator_of("cuda"))
    with cells.on_the_cpu():
        yield ran


@pytest.mark.parametrize("cls", CELLS)
def test_the_cells_are_those_of_torch(cls):
    lstm, (B, E, H) = cls is bf.AttentionLSTM, (4, 3, 5)
    torch.manual_seed(0)
    cell = (torch.nn.LSTMCell if lstm else torch.nn.GRUCell)(E, H, dtype=torch.float64)
    x, *before = (torch.randn(B, n, dtype=torch.float64) for n in (E, H, H))
    inputs = torch.nn.functional.linear(x, cell.weight_ih, cell.bias_ih).requires_grad_()
    through = torch.nn.functional.linear(before[0], cell.weight_hh, cell.bias_hh).requires_grad_()
    own = before[1 if lstm else 0].requires_grad_()
    state, *rest = (cells.lstm if lstm else cells.gru)(inputs, through, own)
    want = cell(x, tuple(before) if lstm else before[0])
    torch.testing.assert_close((state, rest[0]) if lstm else state, want)
    grads = [torch.randn(B, H, dtype=torch.float64) for _ in range(1 + lstm)]
    expected = torch.autograd.grad([state, *rest[:-1]], [inputs, through, own], grads)
    if lstm:
        of_gates, of_own, _ = cells.lstm_backward(*grads, own, *rest, False)
        found = of_gates, of_gates, of_own
    else:
        found = cells.gru_backward(*grads, *rest, False)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lens", [None, LENS, LENS.unsqueeze(1)], ids=["none", "lens", "column"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("cls", CELLS)
def test_the_same_as_steps(cls, layers, lens, loop):
    module, tensors = layer(cls, layers), given(cls, layers, T=19)
    got = results(module, tensors, lens)
    assert loop == ["forward", "backward"]
    torch.testing.assert_close(got, by_steps(lambda: results(module, tensors, lens)), **EXACT)


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(-1, None)], ids=str)
@pytest.mark.parametrize("cls", CELLS)
def test_gradients_of_some_results(cls, which):
    module, tensors = layer(cls, 2), given(cls, 2)
    got = results(module, tensors, which=which)
    want = by_steps(lambda: results(module, tensors, which=which))
    filled = [torch.zeros_like(a) if b is None else b for a, b in zip(got, want, strict=True)]
    torch.testing.assert_close(got, filled, **EXACT)


@pytest.mark.parametrize("cls", CELLS)
def test_the_gradient_with_dropout(cls):
    module = layer(cls, 2, dropout=0.5, attention_dropout=0.3)
    tensors = given(cls, 2, T=3, B=2, Tk=4)

    def function(*inputs):
        torch.manual_seed(11)
        return call(module, dict(zip(tensors, inputs, strict=True)), None)[0]

    assert torch.autograd.gradcheck(function, list(tensors.values()), fast_mode=True)


def test_every_step_drops_other_weights():
    module = layer(bf.AttentionGRU, attention_dropout=0.5)
    tensors = {name: torch.zeros_like(x) for name, x in given(bf.AttentionGRU).items()}
    tensors["values"] = torch.eye(11, 4, dtype=torch.float64).expand(5, 11, 4)
    outputs = call(module, tensors, None)[0]
    assert len({tuple(x.flatten().tolist()) for x in outputs}) == len(outputs)


@pytest.mark.parametrize("cls", CELLS)
def test_autocast_is_as_exact_as_its_steps(cls, loop):
    module, tensors = layer(cls, 2, torch.float32), given(cls, 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = results(module, tensors)
        of_steps = by_steps(lambda: results(module, tensors))
    assert loop == ["forward", "backward"]
    doubled = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    exact = by_steps(lambda: results(copy.deepcopy(module).double(), doubled))
    for a, b, c in zip(got, of_steps, exact, strict=True):
        assert a.dtype == b.dtype
        allowed = 2 * (b - c).abs().max() + 2 * torch.finfo(torch.bfloat16).eps * c.abs().max()
        assert (a - c).abs().max() <= allowed


@pytest.mark.parametrize("cls", CELLS)
def test_second_derivatives(cls):
    module, tensors = layer(cls), given(cls, T=2, B=2, Tk=3)

    def function(*inputs):
        return call(module, dict(zip(tensors, inputs, strict=True)), None)[0]

    assert torch.autograd.gradgradcheck(function, list(tensors.values()), fast_mode=True, atol=1e-4)


def test_without_gradients_nothing_is_kept(loop):
    module, tensors = layer(bf.AttentionLSTM, 2), given(bf.AttentionLSTM, 2)
    with torch.no_grad():
        got = call(module, tensors)
    assert loop == ["forward"]
    torch.testing.assert_close(got, by_steps(lambda: call(module, tensors)), **EXACT)


def test_greedy(loop):
    steps_taken = set()
    for seed in range(24):
        torch.manual_seed(seed)
        layers = 1 + seed % 2
        decoder = Seq2SeqAttentionDecoder(7, 4, 6, layers).eval()
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter, std=0.9)
        outputs, hidden = torch.randn(9, 2, 6), torch.randn(layers, 2, 6)
        memory = decoder.memory(decoder.init_state((outputs, hidden), torch.tensor([9, 3])))
        with torch.no_grad():
            never = [0, 1] if seed % 3 else []
            tokens, weights = decoder.write(hidden, memory, never, 20)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(decoder_loop, "_operator", operator_of(None))
                want = decoder.write(hidden, memory, never, 20)
        assert torch.equal(tokens, want[0])
        torch.testing.assert_close(weights, want[1])
        steps_taken.add(tokens.shape[1])
    assert loop == ["write"] * 24
    assert len(steps_taken) > 4, "rows should end at several steps"

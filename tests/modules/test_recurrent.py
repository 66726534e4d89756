"""Layers that attend at every step: the operator over a whole sequence against single steps."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from decoders import (
    CELLS,
    DK,
    DV,
    EXACT,
    LENS,
    TK,
    B,
    E,
    F,
    H,
    T,
    by_steps,
    call,
    given,
    hook,
    layer,
    results,
)
from profiled import counts
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast.modules.decoder_loop import attend_step, decode_given
from bahdanau_fast.seq2seq import Seq2SeqAttentionDecoder


@pytest.mark.parametrize("lens", [None, LENS, LENS.unsqueeze(1)], ids=["none", "lens", "column"])
@pytest.mark.parametrize(("cls", "layers"), list(itertools.product(CELLS, (1, 2, 3))))
def test_the_same_as_steps(cls, layers, lens):
    module, tensors = layer(cls, layers), given(cls, layers)
    want = by_steps(lambda: results(module, tensors, lens))
    torch.testing.assert_close(results(module, tensors, lens), want, **EXACT)


@pytest.mark.parametrize("sizes", [{"T": 1}, {"B": 1}, {"Tk": 1}, {"B": 33, "T": 2, "Tk": 70}])
@pytest.mark.parametrize("cls", CELLS)
def test_sizes(cls, sizes):
    module, tensors = layer(cls, 2, num_hiddens=37), given(cls, 2, **sizes)
    lens = torch.arange(len(tensors["keys"])) % (tensors["keys"].shape[1] + 1)
    want = by_steps(lambda: results(module, tensors, lens))
    torch.testing.assert_close(results(module, tensors, lens), want, **EXACT)


@pytest.mark.parametrize("cls", CELLS)
def test_an_empty_batch_and_no_steps(cls):
    module, tensors = layer(cls, 2), given(cls, 2, B=0)
    outputs, *last, weights = call(module, tensors, None)
    assert (outputs.shape, weights.shape) == ((T, 0, H), (0, T, TK))
    assert {x.shape for x in last} == {(2, 0, H)}
    outputs.sum().backward()
    assert not any(p.grad.any() for p in module.rnn.parameters())
    with pytest.raises(ValueError, match=r"inputs must have at least one step, got \(0, 5, 3\)"):
        call(module, given(cls, 2, T=0))


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(-1, None), slice(0, 2)], ids=str)
@pytest.mark.parametrize("cls", CELLS)
def test_gradients_of_some_results(cls, which):
    module, tensors = layer(cls, 2), given(cls, 2)
    want = by_steps(lambda: results(module, tensors, which=which))
    got = results(module, tensors, which=which)
    filled = [
        torch.zeros_like(a) if a is not None and b is None else b
        for a, b in zip(got, want, strict=True)
    ]
    torch.testing.assert_close(got, filled, **EXACT)


@pytest.mark.parametrize(("cls", "layers"), list(itertools.product(CELLS, (1, 2))))
def test_fp32_is_as_exact_as_steps(cls, layers):
    # The parity rule: not more than twice the error of eager PyTorch, step by step.
    drawn = given(cls, layers, dtype=torch.float32)
    wide = layer(cls, layers)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_(parameter.float())
    doubled = {n: x.detach().double().requires_grad_() for n, x in drawn.items()}
    exact = by_steps(lambda: results(wide, doubled))
    module = layer(cls, layers, torch.float32)
    module.load_state_dict({n: x.float() for n, x in wide.state_dict().items()})
    with bf.backends.use("reference"):
        eager = results(module, drawn)
    ours = results(module, drawn)
    for a, b, c in zip(ours, eager, exact, strict=True):
        atol = 2 * torch.finfo(torch.float32).eps * c.abs().max()
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + atol


@pytest.mark.parametrize("cls", CELLS)
def test_gradcheck(cls):
    module = layer(cls, 2, num_hiddens=3)
    tensors = given(cls, 2, T=3, B=2, Tk=4)
    names = [name for name, _ in module.named_parameters()]

    def function(*inputs):
        parameters = dict(zip(names, inputs[len(tensors) :], strict=True))
        given_ = dict(zip(tensors, inputs, strict=False))
        for name, parameter in parameters.items():
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = parameter
        return tuple(call(module, given_, torch.tensor([4, 2])))

    inputs = [
        *tensors.values(),
        *(p.detach().clone().requires_grad_() for p in module.parameters()),
    ]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("cls", CELLS)
def test_dropout(cls):
    module = layer(cls, 2, dropout=0.5, attention_dropout=0.3)
    tensors = given(cls, 2)

    def seeded():
        torch.manual_seed(11)
        return results(module, tensors)

    first = seeded()
    torch.testing.assert_close(seeded(), first, rtol=0, atol=0)
    assert not torch.equal(first[0], call(module, tensors)[0])
    module.eval()
    still = call(module, tensors)[0]
    assert torch.equal(still, call(module, tensors)[0])
    module.train()
    with torch.no_grad():
        mean = torch.stack([call(module, tensors)[0][0] for _ in range(400)]).mean(0)
    # The first step of the first layer sees dropped-out weights, of the same mean.
    assert (mean - still[0]).abs().mean() < 0.1 * still[0].abs().mean() + 0.05


def test_the_gradient_with_dropout():
    # With the masks held by the seed, finite differences tell.
    module = layer(bf.AttentionGRU, 2, dropout=0.5, attention_dropout=0.3)
    tensors = given(bf.AttentionGRU, 2, T=3, B=2, Tk=4)

    def function(*inputs):
        torch.manual_seed(11)
        return call(module, dict(zip(tensors, inputs, strict=True)), None)[0]

    assert torch.autograd.gradcheck(function, list(tensors.values()), fast_mode=True)


def test_threads_do_not_change_a_bit(threads):
    module, tensors = (
        layer(bf.AttentionGRU, 2, torch.float32),
        given(bf.AttentionGRU, 2, torch.float32, B=37, Tk=70),
    )
    many = results(module, tensors, None)
    threads(1 if torch.get_num_threads() > 1 else 2)
    torch.testing.assert_close(results(module, tensors, None), many, rtol=0, atol=0)


@pytest.mark.parametrize(("cls", "cell"), [(bf.AttentionGRU, "gru"), (bf.AttentionLSTM, "lstm")])
def test_weights_go_to_the_course_decoder_and_back(cls, cell):
    decoder = Seq2SeqAttentionDecoder(10, E, H, 2, cell=cell).eval()
    module = cls(E, H, 2, batch_first=True).eval()
    weights = {
        n: x for n, x in decoder.state_dict().items() if n.split(".")[0] in ("attention", "rnn")
    }
    module.load_state_dict(weights)
    decoder.load_state_dict(module.state_dict(), strict=False)
    X, outputs = torch.randint(10, (B, T)), torch.randn(TK, B, H)
    hidden = torch.randn(2, B, H)
    hidden = (hidden, hidden.flip(0)) if cell == "lstm" else hidden
    logits, _ = decoder(X, decoder.init_state((outputs, hidden), LENS))
    keys = outputs.transpose(0, 1)
    features, _ = module(decoder.embedding(X), hidden, keys, valid_lens=LENS)
    torch.testing.assert_close(decoder.dense(features), logits)
    want = torch.cat(decoder.attention_weights, 1)
    torch.testing.assert_close(module.attention_weights, want)


class Low(nn.Module):
    """A layer with more than one weight."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.more(x)


def halved(module, inputs, outputs):
    return 0.5 * outputs


CHANGES = {
    "a hook on the rnn": lambda m: m.rnn.register_forward_hook(hook),
    "a hook on W_q": lambda m: m.attention.W_q.register_forward_hook(hook),
    "a hook on w_v": lambda m: m.attention.w_v.register_forward_hook(hook),
    "a replaced layer": lambda m: setattr(m.attention, "W_q", Low(m.attention.W_q).double()),
    "a hook on the dropout": lambda m: m.attention.dropout.register_forward_hook(hook),
    "a replaced dropout": lambda m: setattr(m.attention, "dropout", nn.Sequential()),
    "a hook on the attention": lambda m: m.attention.register_forward_hook(hook),
    "another attention": lambda m: (
        setattr(m, "attention", copy.copy(m.attention))
        or setattr(m.attention, "__class__", type("Own", (bf.AdditiveAttention,), {}))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layers_are_stepped(change):
    module, tensors = layer(bf.AttentionGRU), given(bf.AttentionGRU)
    assert counts(lambda: call(module, tensors))["decode"] == 1
    CHANGES[change](module)
    seen = counts(lambda: call(module, tensors))
    assert "decode" not in seen
    # The scores of a w_v that is called are plain PyTorch's.
    assert seen.get("attention", 0) == (0 if "w_v" in change else T)


def test_the_attention_of_a_layer_is_called_with_its_hooks():
    module, tensors = layer(bf.AttentionGRU), given(bf.AttentionGRU)
    seen = []
    handle = module.attention.register_forward_pre_hook(lambda m, inputs: seen.append(inputs))
    module.attention.register_forward_hook(lambda *_: seen.append("after"))
    want = by_steps(lambda: call(layer(bf.AttentionGRU), tensors))
    torch.testing.assert_close(call(module, tensors), want, **EXACT)
    assert seen[1::2] == ["after"] * T
    queries, memory, values = seen[-2]
    assert (queries.shape, memory.values.shape, values) == ((B, 1, H), (B, TK, DV), None)
    handle.remove()
    module.attention.register_forward_hook(halved)
    patched = layer(bf.AttentionGRU)
    own = patched.attention.attend
    patched.attention.attend = lambda *args: 0.5 * own(*args)
    changed = call(patched, tensors)
    assert not torch.allclose(changed[0], want[0])
    torch.testing.assert_close(call(module, tensors), changed, **EXACT)


def test_an_lstm_whose_state_is_projected_is_stepped():
    torch.manual_seed(0)
    attention = bf.AdditiveAttention(DK, 4, F, dtype=torch.float64)
    rnn = nn.LSTM(DV + E, H, proj_size=4, dtype=torch.float64)
    tensors = given(bf.AttentionLSTM)
    memory = attention.memory(tensors["keys"], tensors["values"], LENS)
    hidden = tensors["cell"][..., :4], tensors["cell"]
    found = decode_given(attention, rnn, tensors["inputs"], hidden, memory)
    step = partial(attend_step, attention, rnn)
    want = decode_given(attention, rnn, tensors["inputs"], hidden, memory, step)
    torch.testing.assert_close(found, want, **EXACT)


def test_a_decoder_with_a_step_of_its_own():
    class Own(Seq2SeqAttentionDecoder):
        taken = 0

        def step(self, embedded, hidden, memory):
            self.taken += 1
            return super().step(embedded, hidden, memory)

    X, state = torch.zeros(B, T, dtype=torch.long), (torch.randn(TK, B, H), torch.zeros(1, B, H))
    own, plain = Own(10, E, H, 1), Seq2SeqAttentionDecoder(10, E, H, 1)
    plain.load_state_dict(own.state_dict())
    logits = own(X, own.init_state(state, LENS))[0]
    assert own.taken == T
    torch.testing.assert_close(logits, plain(X, plain.init_state(state, LENS))[0])


def test_other_backends_and_modes_are_stepped():
    module, tensors = (
        layer(bf.AttentionGRU, dtype=torch.float32),
        given(bf.AttentionGRU, dtype=torch.float32),
    )
    want = call(module, tensors)
    with bf.backends.use("reference"):
        assert counts(lambda: torch.testing.assert_close(call(module, tensors), want)) == {}
    halves = {n: x.to(torch.bfloat16) for n, x in tensors.items()}
    assert "decode" not in counts(lambda: call(module.bfloat16(), halves))


def test_layouts_and_defaults():
    module = bf.AttentionLSTM(E, H, 2, batch_first=True).eval()
    inputs, keys = torch.randn(B, T, E), torch.randn(B, TK, H)
    outputs, (hidden, cell) = module(inputs, keys=keys)
    zeros = torch.zeros(2, B, H)
    memory = module.attention.memory(keys)
    again, _ = module(inputs, (zeros, zeros), memory=memory)
    torch.testing.assert_close(again, outputs)
    assert outputs.shape == (B, T, H)
    assert torch.equal(outputs[:, -1], hidden[-1])
    assert cell.shape == hidden.shape == (2, B, H)
    assert module.attention_weights.shape == (B, T, TK)
    torch.testing.assert_close(module.attention_weights.sum(-1), torch.ones(B, T))


def test_a_sequence_in_two_parts():
    module, tensors = layer(bf.AttentionGRU, 2), given(bf.AttentionGRU, 2)
    whole, last, _ = call(module, tensors)
    memory = module.attention.memory(tensors["keys"], tensors["values"], LENS)
    first, state = module(tensors["inputs"][:2], tensors["hidden"], memory=memory)
    second, state = module(tensors["inputs"][2:], state, memory=memory)
    torch.testing.assert_close([torch.cat((first, second)), state], [whole, last], **EXACT)


def test_copies_and_pickles():
    module, tensors = layer(bf.AttentionGRU), given(bf.AttentionGRU)
    want = call(module, tensors)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(call(twin, tensors), want)


def test_inputs_without_features():
    module = bf.AttentionGRU(0, H, 1, key_size=DK, value_size=DV, num_hiddens=F).double()
    tensors = given(bf.AttentionGRU) | {"inputs": torch.zeros(T, B, 0).double().requires_grad_()}
    torch.testing.assert_close(
        results(module, tensors), by_steps(lambda: results(module, tensors)), **EXACT
    )


def test_errors():
    module = layer(bf.AttentionGRU, dtype=torch.float32)
    inputs, keys = torch.zeros(T, B, E), torch.zeros(B, TK, DK)
    values = torch.zeros(B, TK, DV)
    with pytest.raises(TypeError, match="exactly one of keys and memory must be given"):
        module(inputs)
    memory = module.attention.memory(keys, values)
    with pytest.raises(TypeError, match="got both"):
        module(inputs, None, keys, memory=memory)
    with pytest.raises(ValueError, match="inputs must have 3 dimensions"):
        module(inputs[0], memory=memory)
    with pytest.raises(ValueError, match="inputs must have feature size 3"):
        module(torch.zeros(T, B, E + 1), memory=memory)
    with pytest.raises(TypeError, match="inputs must be float32"):
        module(inputs.long(), memory=memory)
    with pytest.raises(ValueError, match="batch size of the memory"):
        module(inputs[:, :2], memory=memory)
    with pytest.raises(ValueError, match=r"hidden must have shape \(1, 5, 9\)"):
        module(inputs, torch.zeros(2, B, H), memory=memory)
    with pytest.raises(TypeError, match="hidden must have the dtype of inputs"):
        module(inputs, torch.zeros(1, B, H, dtype=torch.float64), memory=memory)
    lstm = layer(bf.AttentionLSTM, dtype=torch.float32)
    with pytest.raises(TypeError, match="hidden must be a pair"):
        lstm(inputs, torch.zeros(1, B, H), keys, values)

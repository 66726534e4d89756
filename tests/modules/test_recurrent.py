"""Layers that attend at every step: all at once, each way that there is, and one by one."""

import copy
from functools import partial
from types import SimpleNamespace

import cells
import pytest
import torch
from beside import as_exact
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
    Low,
    T,
    by_steps,
    call,
    given,
    hook,
    layer,
    operator_of,
    results,
)
from profiled import counts
from torch import nn

import bahdanau_fast as bf
from bahdanau_fast.modules import decoder_loop
from bahdanau_fast.modules.decoder_loop import attend_step, decode_inputs
from bahdanau_fast.ops import decode, decode_arguments, decode_on_gpu
from bahdanau_fast.seq2seq import Seq2SeqAttentionDecoder

OPERATOR, LOOP = "the operator of the CPU", "the loop of a GPU"
BOTH = pytest.mark.parametrize("cls", CELLS)


@pytest.fixture(params=[OPERATOR, LOOP])
def way(request, monkeypatch):
    """How all steps are taken: its name, and what of the loop ran; with kernels of the CPU."""
    ran = []
    if request.param == OPERATOR:
        yield SimpleNamespace(name=OPERATOR, ran=ran)
        return
    for name in ("forward", "backward", "decode_greedily"):
        function = getattr(decode_on_gpu, name)
        monkeypatch.setattr(
            decode_on_gpu, name, lambda *args, f=function, n=name: ran.append(n) or f(*args)
        )
    monkeypatch.setattr(decoder_loop, "_decoder_route", operator_of("cuda"))
    with cells.on_the_cpu():
        yield SimpleNamespace(name=LOOP, ran=ran)


on_a_loop = pytest.mark.parametrize("way", [LOOP], indirect=True)

CLAIMS = {
    **{
        f"{layers} layers, {name}": {"layers": layers, "lens": lens, "T": 19 if layers == 3 else T}
        for layers in (1, 2, 3)
        for name, lens in (("no lens", None), ("lens", LENS), ("a column", LENS.unsqueeze(1)))
    },
    **{
        f"{n} = {size}": {n: size}
        for n, size in (("T", 1), ("B", 1), ("B", 0), ("Tk", 1), ("Tk", 0), ("E", 0))
    },
    "other sizes": {"B": 33, "T": 2, "Tk": 70, "num_hiddens": 37},
    **{
        f"gradients of {name}": {"lens": LENS, "which": which}
        for name, which in (
            *(("outputs", slice(0, 1)), ("the last states", slice(1, 2))),
            *(("weights", slice(-1, None)), ("outputs and states", slice(0, 2))),
        )
    },
}


def drawn(cls, layers=2, num_hiddens=F, E=E, lens="some", which=slice(None), **sizes):
    """Of a claim: the module, its tensors, lengths, and the results that gradients are of."""
    module = layer(cls, layers, num_hiddens=num_hiddens, E=E)
    tensors = given(cls, layers, E=E, **sizes)
    rows, length = tensors["keys"].shape[:2]
    return module, tensors, torch.arange(rows) % (length + 1) if lens == "some" else lens, which


@BOTH
@pytest.mark.parametrize("claim", CLAIMS)
def test_the_same_as_steps(way, claim, cls):
    if claim == "B = 0" and way.name == LOOP:
        pytest.skip("nothing is launched then")
    module, tensors, lens, which = drawn(cls, **CLAIMS[claim])
    found = results(module, tensors, lens, which)
    assert way.ran == ["forward", "backward"] * (way.name == LOOP)
    want = by_steps(lambda: results(module, tensors, lens, which))
    filled = [
        torch.zeros_like(a) if a is not None and b is None else b
        for a, b in zip(found, want, strict=True)
    ]
    torch.testing.assert_close(found, filled, **EXACT)
    way.ran.clear()
    with torch.no_grad():
        outputs = call(module, tensors, lens)
    assert way.ran == ["forward"] * (way.name == LOOP)  # nothing is kept
    torch.testing.assert_close(outputs, [x.detach() for x in want[: len(outputs)]], **EXACT)


@BOTH
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_as_exact_as_its_steps(way, autocast, layers, cls):
    """The parity rule; the operator computes in fp32, and its dtypes are those of steps."""
    tensors, module = given(cls, layers, torch.float32), layer(cls, layers, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = results(module, tensors)
        assert way.ran == ["forward", "backward"] * (way.name == LOOP)
        if way.name == OPERATOR:
            assert counts(lambda: call(module, tensors))["decode"] == 1
        with bf.backends.use("reference"):
            eager = by_steps(lambda: results(module, tensors))
    doubled = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    exact = by_steps(lambda: results(copy.deepcopy(module).double(), doubled))
    as_exact(ours, eager, exact, torch.bfloat16 if autocast else torch.float32)


@BOTH
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_by_finite_differences(way, dropout, cls):
    module = layer(cls, 2, num_hiddens=3, dropout=dropout, attention_dropout=dropout)
    tensors = given(cls, 2, T=3, B=2, Tk=4)

    def function(*_):
        torch.manual_seed(11)
        return tuple(call(module, tensors, torch.tensor([4, 2])))

    leaves = [*tensors.values(), *module.parameters()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    if not dropout:  # differences of gradients, of errors some 1e4 larger than of values
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True, atol=1e-4)


@BOTH
def test_dropout(way, cls):
    module, tensors = layer(cls, 2, dropout=0.5, attention_dropout=0.3), given(cls, 2)

    def seeded():
        torch.manual_seed(11)
        return results(module, tensors)

    first = seeded()
    assert all(map(torch.equal, seeded(), first))
    assert not torch.equal(first[0], call(module, tensors)[0])
    still = call(module.eval(), tensors)[0]
    assert torch.equal(still, call(module, tensors)[0])
    module.train()
    with torch.no_grad():
        mean = torch.stack([call(module, tensors)[0][0] for _ in range(400)]).mean(0)
    # The first step of the first layer sees dropped-out weights, of the same mean.
    assert (mean - still[0]).abs().mean() < 0.1 * still[0].abs().mean() + 0.05


def test_every_step_drops_other_weights(way):
    module = layer(bf.AttentionGRU, attention_dropout=0.5)
    tensors = {name: torch.zeros_like(x) for name, x in given(bf.AttentionGRU).items()}
    tensors["values"] = torch.eye(TK, DV, dtype=torch.float64).expand(B, TK, DV)
    outputs = call(module, tensors, None)[0]
    assert len({tuple(x.flatten().tolist()) for x in outputs}) == len(outputs)


@on_a_loop
def test_tokens_are_those_of_the_operator(way):
    steps_taken = set()
    for seed in range(24):
        torch.manual_seed(seed)
        layers = 1 + seed % 2
        decoder = Seq2SeqAttentionDecoder(7, 4, 6, layers).eval()
        for parameter in decoder.parameters():
            nn.init.normal_(parameter, std=0.9)
        outputs, hidden = torch.randn(9, 2, 6), torch.randn(layers, 2, 6)
        memory = decoder.memory(decoder.init_state((outputs, hidden), torch.tensor([9, 3])))
        never = [0, 1] if seed % 3 else []
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            tokens, weights = decoder.write(hidden, memory, never, 20)
            patch.setattr(decoder_loop, "_decoder_route", operator_of(None))
            want = decoder.write(hidden, memory, never, 20)
        assert torch.equal(tokens, want[0])
        torch.testing.assert_close(weights, want[1])
        steps_taken.add(tokens.shape[1])
    assert way.ran == ["decode_greedily"] * 24
    assert len(steps_taken) > 4, "rows should end at several steps"


@BOTH
@pytest.mark.parametrize("multiple", [2, 4, 16])
def test_padded_sizes_change_nothing(multiple, cls, monkeypatch):
    module, tensors = layer(cls, attention_dropout=0.3), given(cls)

    def seeded():
        torch.manual_seed(3)
        return results(module, tensors)

    want, seen, gates_of = seeded(), [], decode._input_gates
    monkeypatch.setitem(decode_arguments.MULTIPLES, "cpu", multiple)
    monkeypatch.setattr(decode, "_input_gates", lambda a: seen.append(a) or gates_of(a))
    torch.testing.assert_close(seeded(), want, **EXACT)
    with torch.no_grad():
        torch.manual_seed(3)
        outputs = call(module, tensors)
    torch.testing.assert_close(outputs, [x.detach() for x in want[: len(outputs)]], **EXACT)
    for arguments in seen:
        sizes = arguments.keys.shape[2], arguments.values.shape[2], arguments.hidden.shape[2]
        assert all(size % multiple == 0 for size in sizes)
        assert sizes[2] > H or sizes[0] > F
    assert len(seen) == 2


def test_threads_do_not_change_a_bit(threads):
    module = layer(bf.AttentionGRU, 2, torch.float32)
    tensors = given(bf.AttentionGRU, 2, torch.float32, B=37, Tk=70)
    many = results(module, tensors, None)
    threads(1 if torch.get_num_threads() > 1 else 2)
    assert all(map(torch.equal, results(module, tensors, None), many))


@BOTH
def test_autocast_leaves_fp64_alone(cls):
    module, tensors = layer(cls, 2), given(cls, 2)
    want = results(module, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, results(module, tensors), want))


def test_backward_under_autocast():
    """Is that of the call."""
    module, tensors = layer(bf.AttentionGRU, 2, torch.float32), given(bf.AttentionGRU, 2)
    tensors = {name: x.detach().float().requires_grad_() for name, x in tensors.items()}
    found = []
    for inside in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(module, tensors)[0].sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(loss, list(module.parameters())))
    assert all(map(torch.equal, *found))


def test_compiled_code_calls_one_operator():
    module, tensors = layer(bf.AttentionGRU), given(bf.AttentionGRU)
    want = results(module, tensors)
    compiled = torch.compile(module, backend="eager")
    assert counts(lambda: call(compiled, tensors))["decode"] == 1
    torch.testing.assert_close(results(compiled, tensors), want, **EXACT)


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


def halved(module, inputs, outputs):
    return 0.5 * outputs


class Halved(bf.AdditiveAttention):
    def forward(self, *args):
        return 0.5 * super().forward(*args)


CHANGES = {
    "a hook on the rnn": lambda m: m.rnn.register_forward_hook(hook),
    "a hook on W_q": lambda m: m.attention.W_q.register_forward_hook(hook),
    "a hook on w_v": lambda m: m.attention.w_v.register_forward_hook(hook),
    "a replaced layer": lambda m: setattr(m.attention, "W_q", Low(m.attention.W_q).double()),
    "a hook on the dropout": lambda m: m.attention.dropout.register_forward_hook(hook),
    "a replaced dropout": lambda m: setattr(m.attention, "dropout", nn.Sequential()),
    "a hook on the attention": lambda m: m.attention.register_forward_hook(hook),
    "another activation": lambda m: setattr(
        m, "attention", bf.AdditiveAttention(DK, H, F, activation="relu", dtype=torch.float64)
    ),
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
    derived = layer(bf.AttentionGRU)
    derived.attention.__class__ = Halved
    torch.testing.assert_close(call(derived, tensors), changed, **EXACT)


def test_an_lstm_whose_state_is_projected_is_stepped():
    torch.manual_seed(0)
    attention = bf.AdditiveAttention(DK, 4, F, dtype=torch.float64)
    rnn = nn.LSTM(DV + E, H, proj_size=4, dtype=torch.float64)
    tensors = given(bf.AttentionLSTM)
    memory = attention.memory(tensors["keys"], tensors["values"], LENS)
    hidden = tensors["cell"][..., :4], tensors["cell"]
    found = decode_inputs(attention, rnn, tensors["inputs"], hidden, memory)
    step = partial(attend_step, attention, rnn)
    want = decode_inputs(attention, rnn, tensors["inputs"], hidden, memory, step)
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
    module = layer(bf.AttentionGRU, dtype=torch.float32)
    tensors = given(bf.AttentionGRU, dtype=torch.float32)
    want = call(module, tensors)
    with bf.backends.use("reference"):
        assert counts(lambda: torch.testing.assert_close(call(module, tensors), want)) == {}
    halves = {n: x.to(torch.bfloat16) for n, x in tensors.items()}
    assert "decode" not in counts(lambda: call(module.bfloat16(), halves))

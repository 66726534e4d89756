"""The course's encoder and decoder: shapes, numbers and state_dict keys."""

import copy
import pickle

import pytest
import torch
from course import CourseAttention
from threads import one_thread  # noqa: F401
from torch import nn

from bahdanau_fast.seq2seq import (
    AttentionDecoder,
    Decoder,
    Encoder,
    EncoderDecoder,
    Seq2SeqAttentionDecoder,
    Seq2SeqDecoder,
    Seq2SeqEncoder,
    init_xavier,
)

CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}


class PlainDecoder(nn.Module):
    """What the course's decoder computes, written a second time, without any of the package."""

    def __init__(self, vocab, embed, hidden, layers, cell):
        super().__init__()
        self.attention = CourseAttention(hidden, hidden, hidden)
        self.embedding = nn.Embedding(vocab, embed)
        self.rnn = CELLS[cell](hidden + embed, hidden, layers)
        self.dense = nn.Linear(hidden, vocab)

    def forward(self, tokens, outputs, state, lens):
        keys, logits, seen = outputs.permute(1, 0, 2), [], []
        for t in range(tokens.shape[1]):
            top = (state[0] if isinstance(state, tuple) else state)[-1]
            context = self.attention(top.unsqueeze(1), keys, keys, lens).squeeze(1)
            x = torch.cat([context, self.embedding(tokens[:, t])], dim=1)
            out, state = self.rnn(x[None], state)
            logits.append(self.dense(out[0]))
            seen.append(self.attention.attention_weights)
        return torch.stack(logits, 1), state, seen


class PlainEncoder(nn.Module):
    def __init__(self, vocab, embed, hidden, layers, cell):
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed)
        self.rnn = CELLS[cell](embed, hidden, layers)


def course(layers=2, **options):
    """An encoder and a decoder with the course's arguments."""
    torch.manual_seed(0)
    sizes = (10, 8, 16, layers)
    kinds = (Seq2SeqEncoder, Seq2SeqAttentionDecoder)
    return [kind(*sizes, **options).eval() for kind in kinds]


def hidden_parts(state):
    return list(state) if isinstance(state, tuple) else [state]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("later", [False, True])
def test_a_course_checkpoint_gives_the_same_numbers_both_ways(cell, layers, later):
    torch.manual_seed(3)
    sizes = (13, 6, 12, layers)
    plain_encoder = PlainEncoder(*sizes, cell).double()
    plain = PlainDecoder(*sizes, cell).double()
    state = nn.ModuleDict({"encoder": plain_encoder, "decoder": plain}).state_dict()
    if later:  # the encoder's one level deeper, the attention of the LSTM by another name
        parts = {"encoder.rnn.": "rnn.", "decoder.attention": "_cell"}
        for old, more in parts.items():
            state = {key.replace(old, old + more): value for key, value in state.items()}
    encoder = Seq2SeqEncoder(*sizes, cell=cell).double()
    decoder = Seq2SeqAttentionDecoder(*sizes, cell=cell).double()
    model = EncoderDecoder(encoder, decoder)
    model.load_state_dict(state, strict=True)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*attention\.more"):
        model.load_state_dict({**state, "decoder.attention_cell.more": torch.zeros(1)})
    source, target = torch.randint(0, 13, (5, 9)), torch.randint(0, 13, (5, 4))
    lens = torch.tensor([9, 1, 4, 7, 2])

    outputs, hidden = plain_encoder.rnn(plain_encoder.embedding(source.T))
    want, want_state, want_weights = plain(target, outputs, hidden, lens)
    got, state = model(source, target, lens)

    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(got, want, **close)
    for a, b in zip(hidden_parts(state[1]), hidden_parts(want_state), strict=True):
        torch.testing.assert_close(a, b, **close)
    for a, b in zip(decoder.attention_weights, want_weights, strict=True):
        torch.testing.assert_close(a, b, **close)
    assert (decoder.attention_weights[0][1, 0, 1:] == 0).all()
    # In two calls, the second from the state of the first, it is the same.
    first, state = decoder(target[:, :1], decoder.init_state(encoder(source, lens), lens))
    torch.testing.assert_close(
        torch.cat((first, decoder(target[:, 1:], state)[0]), 1), want, **close
    )

    got.square().sum().backward()
    want.square().sum().backward()
    for name, parameter in plain.named_parameters():
        ours = decoder.get_parameter(name).grad
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-10, atol=1e-11)

    plain.load_state_dict(decoder.state_dict(), strict=True)


def test_the_keys_are_projected_once_per_call():
    encoder, decoder = course(1)
    calls = []
    decoder.attention.W_k.register_forward_hook(lambda *_: calls.append(1))
    X = torch.zeros((2, 9), dtype=torch.long)
    decoder(X, decoder.init_state(encoder(X), None))
    assert len(calls) == 1


def test_a_used_decoder_can_be_copied_and_pickled():
    model = EncoderDecoder(*course(1))
    X = torch.randint(0, 10, (2, 5))
    want, _ = model(X, X, torch.tensor([5, 3]))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        got, _ = twin(X, X, torch.tensor([5, 3]))
        assert torch.equal(got, want)


def test_xavier_reaches_linear_and_recurrent_weights_only():
    torch.manual_seed(0)
    decoder = Seq2SeqAttentionDecoder(50, 40, 64, 2, cell="lstm")
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    decoder.apply(init_xavier)
    for name, value in decoder.state_dict().items():
        kept = torch.equal(value, before[name])
        assert kept == ("bias" in name or "embedding" in name), name
        if not kept:
            bound = (6 / sum(value.shape)) ** 0.5
            assert 0.95 * bound < value.abs().max() <= bound or value.numel() < 100, name


SIZES = (10, 8, 16, 1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Encoder()(torch.zeros(1)), "Encoder must define forward"),
        (lambda: Decoder().init_state(None), "Decoder must define init_state"),
        (lambda: AttentionDecoder().attention_weights, "must define attention_weights"),
        (lambda: Seq2SeqEncoder(*SIZES, cell="rnn"), "cell must be 'gru' or 'lstm', got 'rnn'"),
        (lambda: Seq2SeqEncoder(*SIZES, dropout=1.5), r"dropout must be .* 0 and 1, got 1\.5"),
        (
            lambda: Seq2SeqAttentionDecoder(*SIZES, attention="cosine"),
            "attention must be 'additive' or 'dot', got 'cosine'",
        ),
    ],
)
def test_interfaces_and_bad_arguments(call, said):
    with pytest.raises((NotImplementedError, ValueError), match=said):
        call()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_packed_encoder_reads_no_padding(cell, bidirectional):
    torch.manual_seed(0)
    options = {"cell": cell, "bidirectional": bidirectional, "packed": True}
    encoder = Seq2SeqEncoder(10, 8, 16, 2, **options).double()
    source, lens = torch.randint(4, 10, (4, 6)), torch.tensor([2, 6, 1, 4])
    outputs, hidden = encoder(source, lens)
    assert outputs.shape == (6, 4, encoder.output_size)
    for b, length in enumerate(lens.tolist()):
        alone, last = encoder(source[b : b + 1, :length])  # without lengths nothing is packed
        torch.testing.assert_close(outputs[:length, b : b + 1], alone)
        assert (outputs[length:, b] == 0).all()
        for part, wanted in zip(hidden_parts(hidden), hidden_parts(last), strict=True):
            torch.testing.assert_close(part[:, b : b + 1], wanted)
    assert encoder(source[:0], lens[:0])[0].shape == (6, 0, encoder.output_size)


@pytest.mark.parametrize("cell", CELLS)
def test_a_bidirectional_encoder_is_that_of_the_paper(cell):
    torch.manual_seed(0)
    encoder = Seq2SeqEncoder(10, 8, 16, 1, cell=cell, bidirectional=True).double()
    source = torch.randint(0, 10, (3, 5))
    outputs, hidden = encoder(source)
    embedded = encoder.embedding(source).transpose(0, 1)
    halves = []
    for suffix in ("", "_reverse"):
        half = CELLS[cell](8, 16).double()
        for name in dict(half.named_parameters()):
            half.get_parameter(name).data = encoder.rnn.get_parameter(name + suffix).data
        halves.append(half)
    ahead, _ = halves[0](embedded)
    back, last = halves[1](embedded.flip(0))
    torch.testing.assert_close(outputs, torch.cat((ahead, back.flip(0)), -1))
    parts = zip(hidden_parts(hidden), hidden_parts(last), encoder.bridge, strict=True)
    for got, state, layer in parts:
        torch.testing.assert_close(got, torch.tanh(layer(state)))


@pytest.mark.parametrize("attention", ["additive", "dot"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_kind_of_attention_over_a_bidirectional_encoder(cell, attention):
    torch.manual_seed(0)
    encoder = Seq2SeqEncoder(10, 8, 16, 2, cell=cell, bidirectional=True, packed=True).double()
    decoder = Seq2SeqAttentionDecoder(10, 8, 16, 2, 0, cell, attention=attention, key_size=32)
    model = EncoderDecoder(encoder, decoder.double())
    source, target = torch.randint(4, 10, (3, 6)), torch.randint(4, 10, (3, 4))
    lens = torch.tensor([6, 2, 4])
    logits, _ = model(source, target, lens)
    assert logits.shape == (3, 4, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # the first step by hand
    outputs, hidden = encoder(source, lens)
    keys, top = outputs.transpose(0, 1), hidden_parts(hidden)[0][-1].unsqueeze(1)
    if attention == "dot":
        scores = (top @ decoder.key_layer(keys).mT).squeeze(1) / 4
    else:
        layers = decoder.attention
        scores = layers.w_v(torch.tanh(layers.W_q(top) + layers.W_k(keys))).squeeze(-1)
    scores = scores.masked_fill(torch.arange(6) >= lens[:, None], float("-inf"))
    torch.testing.assert_close(decoder.attention_weights[0].squeeze(1), scores.softmax(-1))
    # padding of another width changes nothing
    wider = torch.cat((source, source), 1)
    torch.testing.assert_close(model(wider, target, lens)[0], logits)


def test_dot_attention_of_equal_sizes_has_no_parameters():
    decoder = Seq2SeqAttentionDecoder(10, 8, 16, 1, attention="dot")
    assert not [name for name, _ in decoder.named_parameters() if "attention" in name]
    assert decoder.key_layer is None


@pytest.mark.parametrize("cell", CELLS)
def test_the_decoder_without_attention_has_one_context(cell):
    torch.manual_seed(0)
    encoder = Seq2SeqEncoder(10, 8, 16, 2, cell=cell).eval()
    decoder = Seq2SeqDecoder(10, 8, 16, 2, cell=cell).eval()
    keys = {name.split(".")[0] for name in decoder.state_dict()}
    assert keys == {"embedding", "rnn", "dense"}
    source, target = torch.randint(0, 10, (3, 6)), torch.randint(0, 10, (3, 5))
    with torch.no_grad():
        state = decoder.init_state(encoder(source))
        at_once, _ = decoder(target, state)
        # the course's formula, and token by token with two sequences per source
        outputs, hidden = encoder(source)
        context = outputs[-1].expand(5, -1, -1)
        plain, _ = decoder.rnn(torch.cat((decoder.embedding(target.T), context), -1), hidden)
        torch.testing.assert_close(decoder.dense(plain).transpose(0, 1), at_once)
        twice = tuple(part.repeat_interleave(2, 1) for part in hidden_parts(state[1]))
        hidden = twice if cell == "lstm" else twice[0]
        for t in range(5):
            embedded = decoder.embedding(target[:, t]).repeat_interleave(2, 0)
            features, looked, hidden = decoder.step(embedded, hidden, decoder.memory(state))
            assert looked is None
            logits = decoder.dense(features).reshape(3, 2, 10)
            torch.testing.assert_close(logits, at_once[:, t : t + 1].expand(-1, 2, -1))

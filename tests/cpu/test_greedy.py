"""Greedy decoding in one operator against greedy decoding step by step."""

import pytest
import torch
from decoders import by_steps, counts, hook
from translators import STEPS, TK, B, E, H, V, model, sources

from bahdanau_fast.modules import decoder_loop as steps_module
from bahdanau_fast.seq2seq import greedy
from bahdanau_fast.seq2seq.data.pairs import BOS, EOS, PAD, UNK

ops = torch.ops.bahdanau_fast


@pytest.mark.parametrize("unknown", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("cell", "layers"), [("gru", 1), ("gru", 2), ("lstm", 2)])
def test_the_same_as_steps(cell, layers, seed, unknown):
    translator = model(cell, layers, seed=seed)

    def written():
        return greedy(translator, *sources(seed), STEPS, unknown=unknown)

    tokens, weights = written()
    want_tokens, want_weights = by_steps(written)
    assert torch.equal(tokens, want_tokens)
    torch.testing.assert_close(weights, want_weights, rtol=1e-9, atol=1e-12)
    for token in (BOS, *(() if unknown else (UNK,))):
        assert not (tokens == token).any()


def test_it_stops_when_every_row_has_ended():
    translator = model()
    with torch.no_grad():  # <eos> grows likelier than anything soon
        translator.decoder.dense.bias[EOS] += 6.0
    tokens, weights = greedy(translator, *sources(), 50)
    want, _ = by_steps(lambda: greedy(translator, *sources(), 50))
    assert torch.equal(tokens, want)
    assert tokens.shape[1] < 50
    assert weights.shape == (B, tokens.shape[1], TK)
    assert (tokens == EOS).any(1).all()
    ended = (tokens == EOS).cumsum(1) - (tokens == EOS).int() > 0
    assert (tokens[ended] == PAD).all()
    assert not (tokens[~ended] == PAD).any()


def test_one_operator_serves_it():
    translator = model(dtype=torch.float32)
    seen = counts(lambda: greedy(translator, *sources(), STEPS))
    assert seen["decode_greedy"] == 1
    assert "attend" not in seen


@pytest.mark.parametrize("name", ["embedding", "dense", "rnn", "attention.W_q"])
def test_with_a_hook_it_is_stepped(name):
    translator = model(dtype=torch.float32)
    tokens = greedy(translator, *sources(), STEPS)[0]
    translator.decoder.get_submodule(name).register_forward_hook(hook)
    seen = counts(lambda: greedy(translator, *sources(), STEPS))
    assert "decode_greedy" not in seen
    assert torch.equal(greedy(translator, *sources(), STEPS)[0], tokens)


def arguments(layers=2, dtype=torch.float32):
    """Of the operator, as greedy decoding makes them."""
    translator = model(layers=layers, dtype=dtype).eval()
    tokens, lens = sources()
    with torch.no_grad():
        state = translator.decoder.init_state(translator.encoder(tokens, lens), lens)
        memory = translator.decoder.memory(state)
    decoder, projected = translator.decoder, memory.projected
    w = steps_module._Weights.of(decoder.rnn, H)
    made = (
        *(decoder.embedding.weight, w.of_inputs, w.input_bias, state[1], None, projected.keys),
        *(None, None, memory.values, lens, decoder.attention.W_q.weight),
        *(decoder.attention.w_v.weight, w.of_context, w.above, w.hidden, w.bias),
        *(decoder.dense.weight, decoder.dense.bias, torch.tensor([PAD, BOS]), BOS, EOS, PAD),
    )
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(ops.decode_greedy.default, (*arguments(dtype=dtype), STEPS))


def test_nan_ends_nothing_and_hangs_nothing():
    given = arguments()
    given[3] = given[3] * float("nan")
    tokens, _ = ops.decode_greedy(*given, STEPS)
    assert tokens.shape[1] <= STEPS
    assert ((tokens >= 0) & (tokens < V)).all()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (19, V, "first, last and blank must be tokens"),
        (18, torch.tensor([V]), "left_out must hold tokens"),
        (18, torch.tensor([[1, 2], [3, 4]]), "left_out must have 1 dimensions"),
        (0, torch.zeros(E), "embedding must have 2 dimensions"),
        (16, torch.zeros(V + 1, H), "w_dense must be contiguous and have the size"),
        (0, torch.zeros(V, E, dtype=torch.float64), "embedding must be contiguous"),
        (3, torch.zeros(2, B + 1, H), "hidden must be contiguous and have the size"),
    ],
)
def test_errors(place, value, message):
    given = arguments()
    given[place] = value
    with pytest.raises(RuntimeError, match=message):
        ops.decode_greedy(*given, STEPS)
    with pytest.raises(RuntimeError, match="max_steps must be between 1 and"):
        ops.decode_greedy(*arguments(), 0)
    with pytest.raises(RuntimeError, match="max_steps must be between 1 and"):
        ops.decode_greedy(*arguments(), 2**62)

"""Greedy decoding in one operator against greedy decoding step by step."""

import copy

import pytest
import torch
from beside import close
from decoders import by_steps, hook
from profiled import counts
from torch import nn

from bahdanau_fast.modules.decoder_loop import _operator_inputs
from bahdanau_fast.ops import decode
from bahdanau_fast.seq2seq import EncoderDecoder, Seq2SeqAttentionDecoder, Seq2SeqEncoder, greedy
from bahdanau_fast.seq2seq.data.pairs import BOS, EOS, PAD, UNK

ops = torch.ops.bahdanau_fast
V, E, H, B, TK, STEPS = 23, 6, 11, 9, 7, 12


def model(cell="gru", layers=2, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    encoder = Seq2SeqEncoder(V, E, H, layers, cell=cell)
    made = EncoderDecoder(encoder, Seq2SeqAttentionDecoder(V, E, H, layers, 0.3, cell)).to(dtype)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.7)
    return made


def sources(seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, V, (B, TK), generator=generator)
    return tokens, torch.tensor([7, 1, 3, 0, 7, 2, 6, 5, 4])


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
    close(weights, want_weights)
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


def test_an_embedding_that_renorms_is_stepped():
    translator = model()
    translator.decoder.embedding.max_norm = 0.5
    twin = copy.deepcopy(translator)
    tokens, weights = greedy(translator, *sources(), STEPS)
    want_tokens, want_weights = by_steps(lambda: greedy(twin, *sources(), STEPS))
    assert torch.equal(tokens, want_tokens)
    close(weights, want_weights)


@pytest.mark.parametrize("bf16", [False, True])
def test_autocast_is_one_operator(bf16):
    translator = model(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        tokens, weights = greedy(translator, *sources(), STEPS)
        of_steps, looked = by_steps(lambda: greedy(translator, *sources(), STEPS))
        seen = counts(lambda: greedy(translator, *sources(), STEPS))
    assert seen["decode_greedy"] == 1
    assert "attention" not in seen
    # The scores of tokens may lie as near to each other as bf16 tells apart; weights of at most one
    # err by some of its roundings of 2**-9 in each step.
    same = (tokens == of_steps).cumprod(1).bool()
    assert same.float().mean() > 0.8
    torch.testing.assert_close(weights[same], looked.to(weights.dtype)[same], rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ["embedding", "dense", "rnn", "attention.W_q"])
def test_with_a_hook_it_is_stepped(name):
    translator = model(dtype=torch.float32)
    tokens = greedy(translator, *sources(), STEPS)[0]
    translator.decoder.get_submodule(name).register_forward_hook(hook)
    seen = counts(lambda: greedy(translator, *sources(), STEPS))
    assert "decode_greedy" not in seen
    assert torch.equal(greedy(translator, *sources(), STEPS)[0], tokens)


def arguments(layers=2, dtype=torch.float32):
    """Of the operator by name, as greedy decoding makes them."""
    translator = model(layers=layers, dtype=dtype).eval()
    tokens, lens = sources()
    with torch.no_grad():
        state = translator.decoder.init_state(translator.encoder(tokens, lens), lens)
        memory = translator.decoder.memory(state)
        decoder = translator.decoder
        embedding = decoder.embedding.weight
        of, _ = _operator_inputs(dtype, decoder.attention, decoder.rnn, embedding, state[1], memory)
        made = decode.operator_arguments(of, dtype)._asdict()
    made = {
        **{"embedding": made.pop("inputs"), "w_embedded": made.pop("w_inputs"), **made},
        **{"table": None, "keys_max": None, "valid_lens": lens, "mask": None},
        **{
            "w_dense": decoder.dense.weight,
            "dense_bias": decoder.dense.bias,
            "left_out": torch.tensor([PAD, BOS]),
        },
        **{"first": BOS, "last": EOS, "blank": PAD, "max_steps": STEPS},
    }
    return {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in made.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(ops.decode_greedy.default, (), arguments(dtype=dtype))


@pytest.mark.parametrize("token", [0, V - 1])
def test_any_token_can_be_the_likeliest(token):
    given = arguments()
    given["left_out"] = torch.tensor([], dtype=torch.int64)
    given["last"] = 1
    given["dense_bias"] = 100.0 * torch.eye(V)[token]
    tokens, _ = ops.decode_greedy(**given)
    assert torch.equal(tokens, torch.full((B, STEPS), token))


def test_nan_ends_nothing_and_hangs_nothing():
    given = arguments()
    given["hidden"] = given["hidden"] * float("nan")
    tokens, _ = ops.decode_greedy(**given)
    assert tokens.shape[1] <= STEPS
    assert ((tokens >= 0) & (tokens < V)).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("first", V, "first, last and blank must be tokens"),
        ("last", V, "first, last and blank must be tokens"),
        ("blank", V, "first, last and blank must be tokens"),
        ("left_out", torch.tensor([V]), "left_out must hold tokens"),
        ("left_out", torch.tensor([[1, 2], [3, 4]]), "left_out must have 1 dimensions"),
        ("embedding", torch.zeros(E), "embedding must have 2 dimensions"),
        ("w_dense", torch.zeros(V + 1, H), "w_dense must be contiguous and have the size"),
        ("embedding", torch.zeros(V, E, dtype=torch.float64), "embedding must be contiguous"),
        ("hidden", torch.zeros(2, B + 1, H), "hidden must be contiguous and have the size"),
        ("max_steps", 0, "max_steps must be between 1 and"),
        ("max_steps", 2**62, "max_steps must be between 1 and"),
    ],
)
def test_errors(name, value, message):
    with pytest.raises(RuntimeError, match=message):
        ops.decode_greedy(**{**arguments(), name: value})

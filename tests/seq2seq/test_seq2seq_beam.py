"""Beam search: against every possible target, against greedy, and without a copy per beam."""

import itertools
import math

import pytest
import torch
from profiled import allocated
from threads import one_thread  # noqa: F401

from bahdanau_fast.seq2seq import (
    Beam,
    EncoderDecoder,
    Seq2SeqAttentionDecoder,
    Seq2SeqDecoder,
    Seq2SeqEncoder,
    Vocab,
    beam_search,
    greedy,
    translate,
)
from bahdanau_fast.seq2seq.data.pairs import BOS, EOS, PAD, UNK

TOKENS = 8  # <pad>, <bos>, <eos>, <unk> and four more


def model_of(kind="additive", cell="gru", hidden=16, scale=3.0, vocab=TOKENS):
    torch.manual_seed(1)
    encoder = Seq2SeqEncoder(vocab, 8, hidden, 2, 0, cell, packed=True)
    if kind == "none":
        decoder = Seq2SeqDecoder(vocab, 8, hidden, 2, 0, cell)
    else:
        decoder = Seq2SeqAttentionDecoder(vocab, 8, hidden, 2, 0, cell, attention=kind)
    with torch.no_grad():
        decoder.dense.weight.mul_(scale)  # opinions worth searching among
        if kind == "additive":
            decoder.attention.w_v.weight.mul_(4 * scale)
    return EncoderDecoder(encoder, decoder).eval()


def sources(rows=5, length=6, vocab=TOKENS):
    torch.manual_seed(2)
    lens = torch.randint(1, length + 1, (rows,))
    return torch.randint(4, vocab, (rows, length)), lens


def all_targets(max_steps):
    """Every target: ended by <eos>, or as long as may be."""
    words = [t for t in range(TOKENS) if t not in (PAD, BOS, EOS)]
    for length in range(max_steps):
        for body in itertools.product(words, repeat=length):
            yield (*body, EOS)
    yield from itertools.product(words, repeat=max_steps)


def scores_of(model, source, length, targets, beam):
    """The formula of the docstring, by teacher forcing of all the targets at once."""
    longest = max(map(len, targets))
    rows = torch.tensor([[*t, *[PAD] * (longest - len(t))] for t in targets])
    given = torch.cat((torch.full((len(rows), 1), BOS), rows[:, :-1]), 1)
    repeated = source.expand(len(rows), -1)
    logits, _ = model(repeated, given, torch.full((len(rows),), length))
    logits = logits.double()
    logits[..., [PAD, BOS]] = float("-inf")
    picked = logits.log_softmax(-1).gather(2, rows.unsqueeze(-1)).squeeze(-1)
    looked = None
    if not isinstance(model.decoder, Seq2SeqDecoder):
        looked = torch.cat(model.decoder.attention_weights, 1).double()
    scores = []
    for i, target in enumerate(targets):
        score = float(picked[i, : len(target)].sum())
        score /= ((5 + len(target)) / 6) ** beam.length_penalty
        if beam.coverage_penalty:
            seen = looked[i, : len(target), :length].sum(0)
            score += beam.coverage_penalty * float(seen.clamp(1e-9, 1).log().sum())
        scores.append(score)
    return scores


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("additive", {"length_penalty": 0.0}),
        ("additive", {"length_penalty": 1.0}),
        ("additive", {"length_penalty": 0.6, "coverage_penalty": 0.3}),
        ("dot", {"length_penalty": 2.0}),
        ("none", {}),
    ],
)
@torch.no_grad()
def test_a_beam_wide_enough_finds_the_best_of_all_targets(kind, options):
    model, (source, lens) = model_of(kind), sources(3)
    wide = Beam(width=700, **options)  # more than there are prefixes of three tokens
    found = beam_search(model, source, lens, 4, wide)
    for row, length in enumerate(lens.tolist()):
        targets = list(all_targets(4))
        scores = scores_of(model, source[row], length, targets, wide)
        top = max(range(len(targets)), key=scores.__getitem__)
        assert tuple(t for t in found.tokens[row, 0].tolist() if t != PAD) == targets[top]
        assert float(found.scores[row, 0]) == pytest.approx(scores[top], abs=1e-5)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("kind", ["additive", "dot", "none"])
def test_one_beam_is_greedy(kind, cell):
    model, (source, lens) = model_of(kind, cell), sources(20)
    model.train().encoder.eval()  # which a search leaves as they are
    modes = [module.training for module in model.modules()]
    tokens, weights = greedy(model, source, lens, 7)
    found = beam_search(model, source, lens, 7, Beam(1))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(found.tokens[:, 0], tokens)
    if kind == "none":
        assert weights is found.weights is None
    else:
        written = tokens != PAD  # behind <eos> weights mean nothing
        torch.testing.assert_close(found.weights[:, 0][written], weights[written])


def test_hypotheses_are_ordered_different_and_scored_right():
    model, (source, lens) = model_of(), sources(8)
    beam = Beam(4, length_penalty=0.8, coverage_penalty=0.2)
    found = beam_search(model, source, lens, 6, beam)
    assert (found.scores[:, :-1] >= found.scores[:, 1:]).all()
    for row, length in enumerate(lens.tolist()):
        targets = [tuple(t for t in words if t != PAD) for words in found.tokens[row].tolist()]
        assert len(set(targets)) == len(targets)
        with torch.no_grad():
            (want,) = scores_of(model, source[row], length, targets[:1], beam)
            looked = torch.cat(model.decoder.attention_weights, 1)[0]
        assert float(found.scores[row, 0]) == pytest.approx(want, abs=1e-5)
        torch.testing.assert_close(found.weights[row, 0, : len(targets[0])], looked)


@pytest.mark.parametrize("kind", ["additive", "none"])
def test_batches_do_not_matter(kind):
    model, vocab = model_of(kind), Vocab(["abcd"])
    texts = ["abca", "d", "", "bb", "dcbadcba", "a"]
    beam = Beam(3, coverage_penalty=0.1 if kind == "additive" else 0.0)
    for search in (None, beam):
        together = translate(model, texts, vocab, vocab, 6, 7, beam=search)
        alone = [translate(model, [t], vocab, vocab, 6, 7, beam=search)[0] for t in texts]
        assert [t.tokens for t in together] == [t.tokens for t in alone]
        assert ["".join(t.source) for t in together] == ["abca", "d", "", "bb", "dcbadc", "a"]
        assert together[2].tokens == []
        for a, b in zip(together, alone, strict=True):
            assert a.score == pytest.approx(b.score)
            if kind == "additive":
                assert a.weights.shape == (len(a.tokens), len(a.source))
                torch.testing.assert_close(a.weights, b.weights)


def test_more_beams_than_tokens_and_no_source_at_all():
    model, (source, lens) = model_of(), sources(2)
    found = beam_search(model, source, lens, 1, Beam(50))
    assert found.tokens.shape == (2, 50, 1)
    assert (found.scores > -math.inf).sum(1).tolist() == [TOKENS - 2] * 2  # no <pad>, no <bos>
    assert beam_search(model, source[:0], lens[:0], 3, Beam(2)).tokens.shape[:2] == (0, 2)
    assert greedy(model, source[:0], lens[:0], 3)[0].shape[0] == 0


@pytest.mark.parametrize("search", [None, Beam(3)])
def test_unknown_tokens_are_written_only_where_asked_for(search):
    model, vocab = model_of(), Vocab(["abcd"])
    with torch.no_grad():
        model.decoder.dense.bias[[PAD, BOS, UNK]] = 50.0  # the likeliest by far
    with_it, without = (
        translate(model, ["abc", "d"], vocab, vocab, 6, 4, beam=search, unknown=unknown)
        for unknown in (True, False)
    )
    assert [t.tokens for t in with_it] == [["<unk>"] * 4] * 2
    assert all(set(t.tokens) <= set("abcd") for t in without)


@pytest.mark.parametrize(
    ("steps", "options", "said"),
    [
        (3, {"coverage_penalty": 0.5}, "coverage_penalty must be 0 for a decoder without"),
        (3, {"width": 0}, "width must be at least 1, got 0"),
        (3, {"length_penalty": -1}, "length_penalty must be at least 0, got -1"),
        (3, {"coverage_penalty": math.nan}, "coverage_penalty must be at least 0, got nan"),
        (0, {}, "max_steps must be at least 1"),
    ],
)
def test_bad_arguments(steps, options, said):
    model = model_of("none")
    with pytest.raises(ValueError, match=said):
        beam_search(model, *sources(), steps, Beam(**options))
    model.decoder = torch.nn.Identity()
    with pytest.raises(TypeError, match=r"model\.decoder must be a StepDecoder, got Identity"):
        beam_search(model, *sources(), 3)


def test_no_beam_has_a_copy_of_the_memory(monkeypatch):
    rows, length, hidden, width = 64, 50, 96, 5
    model, (source, lens) = model_of(hidden=hidden), sources(rows, length)
    memory_of = model.decoder.memory

    def copied(state):
        outputs, hidden, lens = state
        return memory_of(
            [outputs.repeat_interleave(width, 0), hidden, lens.repeat_interleave(width)]
        )

    def search():
        return beam_search(model, source, lens, 12, Beam(width))

    # Every allocation, those inside the C++ op too. The memory itself is among them, once for each
    # of its few tensors.
    memory, sizes = rows * length * hidden * 4, allocated(search)
    assert memory <= max(sizes) < 2 * memory
    assert sum(size >= memory for size in sizes) < 12  # not one per step either
    monkeypatch.setattr(model.decoder, "memory", copied)
    assert max(allocated(search)) >= width * memory  # what it would be with copies

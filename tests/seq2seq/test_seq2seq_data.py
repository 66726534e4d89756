"""Dates, vocabulary, encoding and batches."""

import datetime

import pytest
import torch

from bahdanau_fast.seq2seq import Pairs, Vocab, batches, encode
from bahdanau_fast.seq2seq.data import dates
from bahdanau_fast.seq2seq.data.pairs import BOS, EOS, PAD, UNK


def test_vocab_orders_by_frequency_then_alphabet():
    vocab = Vocab(["bca", "bc", "b", "zz"])
    assert vocab.tokens == ("<pad>", "<bos>", "<eos>", "<unk>", "b", "c", "z", "a")
    assert [vocab[t] for t in ("<pad>", "<bos>", "<eos>", "<unk>")] == [PAD, BOS, EOS, UNK]
    assert vocab["?"] == UNK
    assert "z" in vocab
    assert vocab.to_tokens([4, 2]) == ["b", "<eos>"]
    assert Vocab(["bca", "bc", "b"], min_freq=2).tokens[4:] == ("b", "c")
    assert Vocab([["go", "."], ["go"]]).tokens[4:] == ("go", ".")


def test_encode_ends_cuts_and_pads():
    tokens, lens = encode(["ab", "", "abab", "a?"], Vocab(["aab"]), 4)
    assert tokens.tolist() == [
        [4, 5, EOS, PAD],
        [EOS, PAD, PAD, PAD],
        [4, 5, 4, 5],
        [4, UNK, EOS, PAD],
    ]
    assert lens.tolist() == [3, 1, 4, 3]
    assert encode([], Vocab([]), 4)[0].shape == (0, 4)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        encode(["a"], Vocab(["a"]), 0)


def test_batches_take_every_pair_once_and_follow_the_seed():
    pairs = Pairs.of([(f"{i:03}", str(i)) for i in range(50)])
    first = list(batches(pairs, 8, seed=1))
    assert sorted(len(batch.source) for batch in first) == [2] + [8] * 6
    rows = torch.cat([batch.source for batch in first])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, pairs.tensors.source.tolist()))
    for one, two in zip(first, batches(pairs, 8, seed=1), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for other in (batches(pairs, 8, seed=2), batches(pairs, 8, seed=1, epoch=1)):
        assert not torch.equal(torch.cat([batch.source for batch in other]), rows)
    # Source and target stay together, lengths too.
    batch = first[0]
    for source, source_len, target, target_len in zip(*batch, strict=True):
        text = "".join(pairs.source_vocab.to_tokens(source[: source_len - 1].tolist()))
        answer = "".join(pairs.target_vocab.to_tokens(target[: target_len - 1].tolist()))
        assert str(int(text)) == answer
    with pytest.raises(ValueError, match="texts must hold at least one pair"):
        Pairs.of([])


def test_batches_hold_texts_of_like_length_without_common_padding():
    texts = [("a" * (1 + i % 40), "b" * (1 + i % 7)) for i in range(1000)]
    pairs = Pairs.of(texts)
    widths, padding = [], 0
    for batch in batches(pairs, 16, seed=0):
        assert batch.source.shape == (len(batch.source), int(batch.source_lens.max()))
        assert batch.target.shape == (len(batch.target), int(batch.target_lens.max()))
        padding += batch.source.numel() - int(batch.source_lens.sum())
        widths.append(batch.source.shape[1])
    assert padding < 0.05 * int(pairs.tensors.source_lens.sum())  # a random order: 0.8 of it
    assert widths != sorted(widths)  # short ones do not all come first
    # Cut at num_steps, <eos> included where it still fits.
    cut = Pairs.of(texts, num_steps=10)
    assert cut.tensors.source.shape == (1000, 10)
    assert cut.tensors.source_lens[:12].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10]
    assert cut.tensors.target.shape == (1000, 8)


def test_pairs_of_a_known_vocabulary():
    vocab = Vocab.of_tokens(Vocab(["ab"]).tokens)
    assert (vocab.tokens, vocab["b"], vocab["c"]) == (Vocab(["ab"]).tokens, 5, UNK)
    pairs = Pairs.with_vocabs([("abc", "b")], vocab, vocab)
    assert pairs.tensors.source.tolist() == [[4, 5, UNK, EOS]]
    assert pairs.source_vocab is vocab
    for bad in (["a"], [*vocab.tokens, "a"]):
        with pytest.raises(ValueError, match="tokens must begin with <pad>, <bos>, <eos>, <unk>"):
            Vocab.of_tokens(bad)


def test_dates_are_reproducible_and_all_different():
    drawn = dates.generate(3_000, seed=4)
    assert drawn == dates.generate(3_500, seed=4)[:3_000]
    assert drawn != dates.generate(3_000, seed=5)
    assert len({example.text for example in drawn}) == 3_000
    assert {example.language for example in drawn} == set(dates.LANGUAGES)
    assert len(dates.LANGUAGES) >= 7
    for example in drawn:
        day = datetime.date.fromisoformat(example.iso)
        assert dates.FIRST <= day <= dates.LAST
        assert example.text == example.text.strip()


def test_no_text_has_two_readings():
    # Days over four years, a leap year among them, and both ends, in every style.
    days = [datetime.date(2000, 1, 1) + datetime.timedelta(days=i) for i in range(4 * 365 + 1)]
    readings = {}
    for language, names in dates.LANGUAGES.items():
        for style in names.styles:
            for day in (*days[::3], dates.FIRST, dates.LAST):
                text = dates.write(day, language, style)
                for form in (text, text.lower(), text.upper()):
                    assert readings.setdefault(form, day) == day, form


@pytest.mark.parametrize(
    ("language", "style", "text"),
    [
        ("American English", "{weekday}, {month} {nth}, {y}", "Thursday, March 11th, 2010"),
        ("British English", "{dd}-{mon}-{y}", "11-Mar-2010"),
        ("French", "le {weekday} {nth} {month} {y}", "le jeudi 11 mars 2010"),
        ("German", "{weekday}, den {d}. {month} {y}", "Donnerstag, den 11. März 2010"),
        ("Chinese", "{y}年{mon}{d}日{weekday}", "2010年三月11日星期四"),
        ("Japanese", "{y}年{mon}{dd}日{day}", "2010年03月11日(木)"),
    ],
)
def test_written_dates(language, style, text):
    assert dates.write(datetime.date(2010, 3, 11), language, style) == text


def test_ordinals():
    january = [datetime.date(2010, 1, day) for day in range(1, 32)]
    days = [dates.write(day, "British English", "{nth}") for day in january]
    assert days[:4] == ["1st", "2nd", "3rd", "4th"]
    assert days[10:13] == ["11th", "12th", "13th"]
    assert days[20:24] == ["21st", "22nd", "23rd", "24th"]
    assert days[30] == "31st"
    assert dates.write(datetime.date(2010, 5, 1), "French", "{nth} {month}") == "1er mai"
    assert dates.write(datetime.date(2010, 5, 2), "French", "{nth} {month}") == "2 mai"

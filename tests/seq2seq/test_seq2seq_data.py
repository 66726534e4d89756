"""From files of pairs to batches: tokens, skipped lines, the split, vocabularies, dates."""

import datetime

import pytest
import torch

from bahdanau_fast.seq2seq import Pairs, Vocab, batches, encode
from bahdanau_fast.seq2seq.data import corpus, dates
from bahdanau_fast.seq2seq.data.pairs import BOS, EOS, PAD, UNK


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("sentence", "tokens"),
    [
        ("Call us.", ["call", "us", "."]),
        ("I'm OK .", ["i'm", "ok", "."]),
        ("J'ai dit : « Ça va ? »", ["j'ai", "dit", ":", "«", "ça", "va", "?", "»"]),
        ("L’eau, s'il vous plaît !", ["l’eau", ",", "s'il", "vous", "plaît", "!"]),
        ("rendez-vous -- à 5.50 $", ["rendez-vous", "-", "-", "à", "5", ".", "50", "$"]),
        ("Va\u202f!\u00a0", ["va", "!"]),
        ("", []),
    ],
)
def test_words(sentence, tokens):
    assert corpus.tokenize(sentence, "words") == tokens
    assert corpus.tokenize(" ".join(tokens), "words") == tokens


def test_characters_and_joining():
    assert corpus.tokenize(" 我 OK。", "characters") == ["我", " ", "O", "K", "。"]
    assert corpus.join(["我", "。"], "characters") == "我。"
    assert corpus.join(["va", "!"], "words") == "va !"
    for call in (lambda: corpus.tokenize("a", "bytes"), lambda: corpus.join(["a"], "bytes")):
        with pytest.raises(ValueError, match="tokens must be 'words' or 'characters', got 'bytes'"):
            call()


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["嗨。", "你好。"], "characters"),
        (["こんにちは", "OK"] * 2 + ["はい"], "characters"),
        (["ไปกันเถอะ"], "characters"),
        (["Salut !", "嗨"], "words"),
        (["Привет", "안녕 하세요"], "words"),
        ([], "words"),
    ],
)
def test_the_kind_of_tokens_is_guessed_from_the_script(texts, kind):
    assert corpus.guess_tokens(texts) == kind


def test_a_file_is_read_and_what_is_left_out_is_named(tmp_path):
    content = (
        "\ufeffHi.\tSalut.\tCC-BY #1\r\nno tab here\n\n\tnothing\nGo.\t \nRun!\tCours\u2028!\n"
    )
    found = corpus.read(write(tmp_path / "a.tsv", content))
    assert found.pairs == [("Hi.", "Salut."), ("Run!", "Cours\u2028!")]
    assert found.skipped == [(2, "no tab"), (3, "empty"), (4, "no source"), (5, "no target")]
    assert found.note() == (
        "skipped 4 malformed lines (line 2: no tab; line 3: empty; line 4: no source; "
        "line 5: no target)"
    )
    clean = corpus.read(write(tmp_path / "b.tsv", "a\tb"))
    assert (clean.pairs, clean.note()) == ([("a", "b")], "")
    many = corpus.read(write(tmp_path / "c.tsv", "a\tb\n" + "x\n" * 8))
    assert many.note().endswith("line 6: no tab; and 3 more)")


def test_the_line_ends_of_every_system(tmp_path):
    lines = ["Hi.\tSalut.", "", "Go.\tVa !", "no tab"]
    found = [
        corpus.read(write(tmp_path / "a.tsv", end.join(lines) + last))
        for end in ("\n", "\r\n", "\r")
        for last in (end, "")
    ]
    assert found[0].pairs == [("Hi.", "Salut."), ("Go.", "Va !")]
    assert found == found[:1] * 6
    with pytest.raises(ValueError, match="byte 0xc9 in line 2"):
        corpus.read(write(tmp_path / "a.tsv", "a\tb\rÉ\tx".encode("latin-1")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"hold pairs \(source, tab, target\), got .*a\.tsv \(empty\)$"),
        (b"Go. Va !\n\nRun.\n", r"hold pairs .* got .*line 1: no tab; line 2: empty; line 3: no"),
        (b"\tVa !\nRun.\t\n", r"hold pairs .* got .*a\.tsv \(skipped .*; line 2: no target\)\)$"),
        ("Hi.\tSalut.\nÉté\tx".encode("latin-1"), r"be UTF-8 text, got .* \(byte 0xc9 in line 2\)"),
        ("a\tb".encode("utf-16"), r"be UTF-8 text, got .* \(it looks like UTF-16\)"),
        ("嗨\t们".encode("utf-16"), r"be UTF-8 text, got .* \(it looks like UTF-16\)"),
        ("Hi.\tÉté\n".encode("utf-16-be"), r"be UTF-8 text, got .* \(it looks like UTF-16\)"),
        (None, r"be a readable file, got .*gone\.tsv \(No such file"),
        ("a folder", r"be a readable file, got .* \(Is a directory"),
    ],
)
def test_a_file_that_is_no_file_of_pairs_is_a_clear_error(tmp_path, content, said):
    path = {None: tmp_path / "gone.tsv", "a folder": tmp_path}.get(content, tmp_path / "a.tsv")
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ValueError, match="^data must " + said):
        corpus.read(path)


def test_parts_share_no_source_and_follow_the_seed():
    pairs = [(f"Go {i // 2}." if i % 2 else f"go  {i // 2}. ", str(i)) for i in range(200)]
    parts = corpus.split(pairs, 0.1, 0.2, seed=3)
    assert [len(part) for part in parts] == [140, 20, 40]
    assert sorted(parts.train + parts.validation + parts.test) == sorted(pairs)
    sources = [{" ".join(s.lower().split()) for s, _ in part} for part in parts]
    assert len(set.union(*sources)) == sum(map(len, sources))  # none is in two parts
    assert parts.train == [pair for pair in pairs if pair in set(parts.train)]  # order kept
    assert corpus.split(pairs, 0.1, 0.2, seed=3) == parts
    assert corpus.split(pairs, 0.1, 0.2, seed=4) != parts
    assert corpus.split(pairs, 0.0, 0.0, seed=0).train == pairs
    with pytest.raises(ValueError, match="leave something to train on, got shares"):
        corpus.split(pairs, 0.5, 0.5, seed=0)
    with pytest.raises(ValueError, match="test must be between 0 and 1, got 2"):
        corpus.split(pairs, 0.1, 2, seed=0)


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


ENGLISH = "British English"


@pytest.mark.parametrize(
    ("day", "language", "style", "text"),
    [
        (11, "American English", "{weekday}, {month} {nth}, {y}", "Thursday, March 11th, 2010"),
        (11, ENGLISH, "{dd}-{mon}-{y}", "11-Mar-2010"),
        (11, "French", "le {weekday} {nth} {month} {y}", "le jeudi 11 mars 2010"),
        (11, "German", "{weekday}, den {d}. {month} {y}", "Donnerstag, den 11. März 2010"),
        (11, "Chinese", "{y}年{mon}{d}日{weekday}", "2010年三月11日星期四"),
        (11, "Japanese", "{y}年{mon}{dd}日{day}", "2010年03月11日(木)"),
        (1, "French", "{nth} {month}", "1er mars"),
        (2, "French", "{nth} {month}", "2 mars"),
        *((n, ENGLISH, "{nth}", f"{n}th") for n in (4, 11, 12, 13, 14, 20, 24, 30)),
        *((n, ENGLISH, "{nth}", f"{n}st") for n in (1, 21, 31)),
        *((n, ENGLISH, "{nth}", f"{n}nd") for n in (2, 22)),
        *((n, ENGLISH, "{nth}", f"{n}rd") for n in (3, 23)),
    ],
)
def test_written_dates(day, language, style, text):
    assert dates.write(datetime.date(2010, 3, day), language, style) == text

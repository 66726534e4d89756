"""Files of pairs: tokens, lines left out, clear errors, parts that share no source."""

import pytest

from bahdanau_fast.seq2seq.data import corpus as text


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
    assert text.tokenize(sentence, "words") == tokens
    assert text.tokenize(" ".join(tokens), "words") == tokens


def test_characters_and_joining():
    assert text.tokenize(" 我 OK。", "characters") == ["我", " ", "O", "K", "。"]
    assert text.join(["我", "。"], "characters") == "我。"
    assert text.join(["va", "!"], "words") == "va !"
    for call in (lambda: text.tokenize("a", "bytes"), lambda: text.join(["a"], "bytes")):
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
    assert text.guess_tokens(texts) == kind


def test_a_file_is_read_and_what_is_left_out_is_named(tmp_path):
    content = (
        "\ufeffHi.\tSalut.\tCC-BY #1\r\nno tab here\n\n\tnothing\nGo.\t \nRun!\tCours\u2028!\n"
    )
    found = text.read(write(tmp_path / "a.tsv", content))
    assert found.pairs == [("Hi.", "Salut."), ("Run!", "Cours\u2028!")]
    assert found.skipped == [(2, "no tab"), (3, "empty"), (4, "no source"), (5, "no target")]
    assert found.note() == (
        "skipped 4 malformed lines (line 2: no tab; line 3: empty; line 4: no source; "
        "line 5: no target)"
    )
    clean = text.read(write(tmp_path / "b.tsv", "a\tb"))
    assert (clean.pairs, clean.note()) == ([("a", "b")], "")
    many = text.read(write(tmp_path / "c.tsv", "a\tb\n" + "x\n" * 8))
    assert many.note().endswith("line 6: no tab; and 3 more)")


def test_the_line_ends_of_every_system(tmp_path):
    lines = ["Hi.\tSalut.", "", "Go.\tVa !", "no tab"]
    found = [
        text.read(write(tmp_path / "a.tsv", end.join(lines) + last))
        for end in ("\n", "\r\n", "\r")
        for last in (end, "")
    ]
    assert found[0].pairs == [("Hi.", "Salut."), ("Go.", "Va !")]
    assert found == found[:1] * 6
    with pytest.raises(ValueError, match="byte 0xc9 in line 2"):
        text.read(write(tmp_path / "a.tsv", "a\tb\rÉ\tx".encode("latin-1")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"hold pairs \(source, tab, target\), got .*a\.tsv \(skipped 1 .*line 1: empty\)\)$"),
        (b"Go. Va !\n\nRun.\n", r"hold pairs .* got .*line 1: no tab; line 2: empty; line 3: no"),
        (b"\tVa !\nRun.\t\n", r"hold pairs .* got .*a\.tsv \(skipped .*; line 2: no target\)\)$"),
        ("Hi.\tSalut.\nÉté\tx".encode("latin-1"), r"be UTF-8 text, got .* \(byte 0xc9 in line 2\)"),
        ("a\tb".encode("utf-16"), r"be UTF-8 text, got .* \(byte 0xff in line 1\)"),
        (None, r"be a readable file, got .*gone\.tsv \(No such file"),
        ("a folder", r"be a readable file, got .* \(Is a directory"),
    ],
)
def test_a_file_that_is_no_file_of_pairs_is_a_clear_error(tmp_path, content, said):
    path = {None: tmp_path / "gone.tsv", "a folder": tmp_path}.get(content, tmp_path / "a.tsv")
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ValueError, match="^data must " + said):
        text.read(path)


def test_parts_share_no_source_and_follow_the_seed():
    pairs = [(f"Go {i // 2}." if i % 2 else f"go  {i // 2}. ", str(i)) for i in range(200)]
    parts = text.split(pairs, 0.1, 0.2, seed=3)
    assert [len(part) for part in parts] == [140, 20, 40]
    assert sorted(parts.train + parts.validation + parts.test) == sorted(pairs)
    sources = [{" ".join(s.lower().split()) for s, _ in part} for part in parts]
    assert len(set.union(*sources)) == sum(map(len, sources))  # none is in two parts
    assert parts.train == [pair for pair in pairs if pair in set(parts.train)]  # order kept
    assert text.split(pairs, 0.1, 0.2, seed=3) == parts
    assert text.split(pairs, 0.1, 0.2, seed=4) != parts
    assert text.split(pairs, 0.0, 0.0, seed=0).train == pairs
    with pytest.raises(ValueError, match="leave something to train on, got shares"):
        text.split(pairs, 0.5, 0.5, seed=0)
    with pytest.raises(ValueError, match="test must be between 0 and 1, got 2"):
        text.split(pairs, 0.1, 2, seed=0)

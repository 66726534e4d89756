"""Parallel text: reading pairs from a file, tokenising them, and the split of a training."""

from __future__ import annotations

import codecs
import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bahdanau_fast import checks
from bahdanau_fast.seq2seq import options
from bahdanau_fast.seq2seq.data import dates
from bahdanau_fast.seq2seq.data.pairs import Pairs, Vocabs

__all__ = ["Corpus", "RawPair", "TextSettings", "guess_tokens", "join", "read", "split", "tokenize"]

DATES = 22_000  # number of synthetic dates without a file

RawPair = tuple[str, str]
"""Source and target as they stand in the file."""

TOKENS = ("words", "characters")

# Letters and digits, joined by apostrophes and hyphens (l'eau, rendez-vous); other signs alone.
_WORD = re.compile(r"\w+(?:['’\-]\w+)*|[^\w\s]")
# Scripts written without spaces: Chinese, Japanese kana, Thai, Lao, Khmer, Burmese.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")


def tokenize(text: str, tokens: str) -> list[str]:
    """Split a text into "words" (lower case, punctuation by itself) or "characters" (as they are).

    >>> tokenize("I'm OK, go!", "words"), tokenize("嗨。", "characters")
    (["i'm", 'ok', ',', 'go', '!'], ['嗨', '。'])
    """
    if tokens == "words":
        return _WORD.findall(text.lower())
    _check_kind(tokens)
    return list(text.strip())


def join(words: Sequence[str], tokens: str) -> str:
    """Join tokens into a text: words with spaces, characters without.

    >>> join(["i'm", "ok", "."], "words"), join("嗨。", "characters")
    ("i'm ok .", '嗨。')
    """
    _check_kind(tokens)
    return (" " if tokens == "words" else "").join(words)


def _check_kind(tokens: str) -> None:
    if tokens not in TOKENS:
        checks.reject(ValueError, "tokens", "be 'words' or 'characters'", repr(tokens))


def guess_tokens(texts: Sequence[str]) -> str:
    """The kind of tokens for texts: "characters" for a script without spaces, else "words".

    >>> guess_tokens(["嗨。", "OK。好"]), guess_tokens(["Salut !"])
    ('characters', 'words')
    """
    unspaced = sum(1 for text in texts if _UNSPACED.search(text))
    return "characters" if 2 * unspaced > len(texts) else "words"


class TextFile(NamedTuple):
    """The pairs of a file, and (line number from 1, reason) of every skipped line."""

    pairs: list[RawPair]
    skipped: Sequence[tuple[int, str]] = ()

    def note(self) -> str:
        """One line about the skipped lines; empty if there are none."""
        if not self.skipped:
            return ""
        shown = "; ".join(f"line {number}: {reason}" for number, reason in self.skipped[:5])
        more = f"; and {len(self.skipped) - 5} more" if len(self.skipped) > 5 else ""
        lines = "line" if len(self.skipped) == 1 else "lines"
        return f"skipped {len(self.skipped)} malformed {lines} ({shown}{more})"


def read(path: str | Path) -> TextFile:
    """Read a UTF-8 file of pairs: source, a tab, target; further columns are ignored.

    The layout of Tatoeba and ManyThings. A line without a tab, or with an empty side, is skipped.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        checks.reject(ValueError, "data", "be a readable file", f"{path} ({error.strerror})")
    # With a byte order mark, or for Latin letters every second byte.
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or (
        content[:1000].count(0) > len(content[:1000]) // 4
    ):
        checks.reject(ValueError, "data", "be UTF-8 text", f"{path} (it looks like UTF-16)")
    # The line ends of every system. Not splitlines(): it splits inside sentences too.
    content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    try:
        # utf-8-sig: the byte order mark of some editors is not part of the first word.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = content.count(b"\n", 0, error.start) + 1
        bad = f"{path} (byte 0x{content[error.start]:02x} in line {where})"
        checks.reject(ValueError, "data", "be UTF-8 text", bad)
    lines = text.removesuffix("\n").split("\n")
    pairs: list[RawPair] = []
    skipped: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        columns = line.split("\t")
        source, target = columns[0].strip(), columns[1].strip() if len(columns) > 1 else ""
        if source and target:
            pairs.append((source, target))
        elif len(columns) == 1:
            skipped.append((number, "no tab" if source else "empty"))
        else:
            skipped.append((number, "no source" if target else "no target"))
    found = TextFile(pairs, skipped)
    if not pairs:
        need = "hold pairs (source, tab, target)"
        checks.reject(ValueError, "data", need, f"{path} ({found.note() if content else 'empty'})")
    return found


class Parts(NamedTuple):
    """Training, validation and test pairs."""

    train: list[RawPair]
    validation: list[RawPair]
    test: list[RawPair]


def split(pairs: Sequence[RawPair], validation: float, test: float, seed: int) -> Parts:
    """Split pairs into three parts; pairs with equal sources (up to case and spaces) stay together.

    So no source of the validation and test parts, which are shares of all sources, is in training.
    Each part keeps the order of ``pairs``.

    >>> parts = split([("Hi.", "Salut."), ("hi. ", "Bonjour."), ("Go.", "Va.")], 0.0, 0.4, seed=0)
    >>> len(parts.train), len(parts.validation), len(parts.test)
    (2, 0, 1)
    """
    checks.probability("validation", validation)
    checks.probability("test", test)
    sources = sorted({_same(source) for source, _ in pairs})
    random.Random(seed).shuffle(sources)
    held = [round(share * len(sources)) for share in (validation, test)]
    if sum(held) >= len(sources):
        actual = f"shares {validation} and {test} of {len(sources)} sources"
        checks.reject(ValueError, "validation and test", "leave something to train on", actual)
    where = dict.fromkeys(sources[: held[0]], 1) | dict.fromkeys(sources[held[0] : sum(held)], 2)
    parts: tuple[list[RawPair], ...] = ([], [], [])
    for pair in pairs:
        parts[where.get(_same(pair[0]), 0)].append(pair)
    return Parts(*parts)


def _same(source: str) -> str:
    return " ".join(source.lower().split())


@dataclass(frozen=True)
class TextSettings(options.Checked):
    """File, tokenisation and split of a corpus; ``seed`` is that of the split and of the dates."""

    data: str | None = options.other(
        None, "file of pairs (default: synthetic dates)", type=Path, metavar="FILE"
    )
    source_tokens: str = options.choice(
        "auto",
        "split sources into these; auto: characters for scripts without spaces",
        ("auto", *TOKENS),
    )
    target_tokens: str = options.choice("auto", "the same for targets", ("auto", *TOKENS))
    min_freq: int = options.count(2, "rarer tokens are read as <unk>")
    num_steps: int = options.count(50, "longer texts are truncated to this many tokens")
    validation: float = options.share(
        0.02, "share of the sources to choose the best epoch by", "SHARE"
    )
    test: float = options.share(0.05, "share of the sources for evaluate", "SHARE")
    limit: int | None = options.count(None, "use only the first N pairs of the file")
    seed: int = 0


@dataclass(frozen=True)
class Corpus:
    """Pairs of texts, read and split.

    Attributes:
        pairs: all of them, in the order of the file.
        kinds: "words" or "characters", of source and target.
        parts: training, validation and test pairs.
        note: one line about skipped lines; empty if there are none.
        digest: of all pairs, to detect a changed file.
    """

    pairs: list[RawPair]
    kinds: tuple[str, str]
    parts: Parts
    note: str
    digest: str

    @classmethod
    def of(cls, settings: TextSettings) -> Corpus:
        """Read the data."""
        if settings.data is None:
            written = dates.generate(DATES, settings.seed)
            found = TextFile([(example.text, example.iso) for example in written])
        else:
            found = read(settings.data)
        pairs = found.pairs[: settings.limit]
        kinds = [settings.source_tokens, settings.target_tokens]
        for side, kind in enumerate(kinds):
            if kind == "auto":
                sample = [pair[side] for pair in pairs[:1000]]
                kinds[side] = "characters" if settings.data is None else guess_tokens(sample)
        parts = split(pairs, settings.validation, settings.test, settings.seed)
        digest = hashlib.sha256("\n".join(map("\t".join, pairs)).encode()).hexdigest()
        return cls(pairs, (kinds[0], kinds[1]), parts, found.note(), digest)

    def encode(
        self, pairs: Sequence[RawPair], settings: TextSettings, vocabs: Vocabs | None = None
    ) -> Pairs:
        """Token indices of some of the pairs, with new vocabularies of these unless given."""
        of_source, of_target = self.kinds
        texts = [(tokenize(s, of_source), tokenize(t, of_target)) for s, t in pairs]
        if vocabs is not None:
            return Pairs.with_vocabs(texts, *vocabs, settings.num_steps)
        new = Pairs.of(texts, settings.min_freq, settings.num_steps)
        for side, vocab in (("source", new.source_vocab), ("target", new.target_vocab)):
            if not vocab.known:
                most = f"{settings.min_freq} (no {side} token is there so often)"
                checks.reject(ValueError, "min_freq", "leave tokens to learn", most)
        return new

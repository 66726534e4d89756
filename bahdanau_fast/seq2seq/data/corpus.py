"""Parallel text: reading pairs from a file, tokenising them, and the split of a training."""

from __future__ import annotations

import codecs
import hashlib
import os
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

DATES = 22_000  # number of synthetic dates without a file

RawPair = tuple[str, str]
"""Source and target as they stand in the file."""

TOKENS = ("words", "characters")

# Letters and digits, joined by apostrophes and hyphens (l'eau, rendez-vous); other signs alone.
_WORD = re.compile(r"\w+(?:['’\-]\w+)*|[^\w\s]")
# Scripts written without spaces: Chinese, Japanese kana, Thai, Lao, Khmer, Burmese.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")


def tokenize(text: str, tokens: str) -> list[str]:
    """A text's "words" (lower case, punctuation by itself) or "characters" (as they are)."""
    return _WORD.findall(text.lower()) if _are_words(tokens) else list(text.strip())


def join(words: Sequence[str], tokens: str) -> str:
    """Join tokens into a text: words with spaces, characters without."""
    return (" " if _are_words(tokens) else "").join(words)


def _are_words(tokens: str) -> bool:
    if tokens not in TOKENS:
        checks.reject(ValueError, "tokens", "be 'words' or 'characters'", repr(tokens))
    return tokens == "words"


def guess_tokens(texts: Sequence[str]) -> str:
    """The kind of tokens for texts: "characters" for a script without spaces, else "words"."""
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
        source, target, *_ = *map(str.strip, line.split("\t")), ""
        if source and target:
            pairs.append((source, target))
        elif "\t" in line:
            skipped.append((number, "no source" if target else "no target"))
        else:
            skipped.append((number, "no tab" if source else "empty"))
    file = TextFile(pairs, skipped)
    if not pairs:
        need = "hold pairs (source, tab, target)"
        checks.reject(ValueError, "data", need, f"{path} ({file.note() if content else 'empty'})")
    return file


class CorpusParts(NamedTuple):
    """The pairs of a corpus, split."""

    train: list[RawPair]
    validation: list[RawPair]
    test: list[RawPair]


def split(pairs: Sequence[RawPair], validation: float, test: float, seed: int) -> CorpusParts:
    """Split pairs, in their order, into three parts, the last two shares of all sources.

    Pairs with equal sources, up to case and spaces, share a part: none is also in training.
    """
    checks.probability("validation", validation)
    checks.probability("test", test)
    plain = [" ".join(source.lower().split()) for source, _ in pairs]
    sources = sorted(set(plain))
    random.Random(seed).shuffle(sources)
    first, second = (round(share * len(sources)) for share in (validation, test))
    if first + second >= len(sources):
        actual = f"shares {validation} and {test} of {len(sources)} sources"
        checks.reject(ValueError, "validation and test", "leave something to train on", actual)
    part = dict.fromkeys(sources[:first], 1) | dict.fromkeys(sources[first : first + second], 2)
    parts = CorpusParts([], [], [])
    for pair, source in zip(pairs, plain, strict=True):
        parts[part.get(source, 0)].append(pair)
    return parts


@dataclass(frozen=True)
class TextSettings(options.Checked):
    """File, tokenisation and split of a corpus; ``seed`` is that of the split and of the dates."""

    data: str | None = options.other(
        None, "file of pairs (default: synthetic dates)", type=os.path.realpath, metavar="FILE"
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
    """Pairs of texts, read and split."""

    pairs: list[RawPair]  # all of them, in the order of the file
    kinds: tuple[str, str]  # "words" or "characters", of source and target
    parts: CorpusParts
    note: str  # one line about skipped lines; empty if there are none
    digest: str  # of all pairs, to detect a changed file

    @classmethod
    def of(cls, settings: TextSettings) -> Corpus:
        """Read the data."""
        if settings.data is None:
            drawn = dates.generate(DATES, settings.seed)
            file = TextFile([(example.text, example.iso) for example in drawn])
        else:
            file = read(settings.data)
        pairs = file.pairs[: settings.limit]
        kinds = [settings.source_tokens, settings.target_tokens]
        for side, kind in enumerate(kinds):
            if kind == "auto":
                sample = [pair[side] for pair in pairs[:1000]]
                kinds[side] = "characters" if settings.data is None else guess_tokens(sample)
        parts = split(pairs, settings.validation, settings.test, settings.seed)
        digest = hashlib.sha256("\n".join(map("\t".join, pairs)).encode()).hexdigest()
        return cls(pairs, (kinds[0], kinds[1]), parts, file.note(), digest)

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

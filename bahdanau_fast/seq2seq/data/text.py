"""Parallel text: reading pairs from a file, tokenising them, splitting them by seed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bahdanau_fast import checks

__all__ = [
    "TOKENS",
    "Parts",
    "RawPair",
    "TextFile",
    "guess_tokens",
    "join",
    "read",
    "split",
    "tokenize",
]

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
        checks.reject(ValueError, "data", need, _hollow(path, found, text))
    return found


def _hollow(path: Path, found: TextFile, text: str) -> str:
    """A file without pairs, and the reason."""
    reasons = {reason for _, reason in found.skipped}
    if reasons == {"empty"}:
        return f"{path} ({'only blank lines' if text else 'an empty file'})"
    if reasons <= {"empty", "no tab"}:
        return f"{path} (no line has a tab)"
    return f"{path} ({found.note()})"


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

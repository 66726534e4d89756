"""The data of a training: its file, tokenisation and split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.data import dates
from bahdanau_fast.seq2seq.data.pairs import Pairs, Vocabs
from bahdanau_fast.seq2seq.data.text import (
    TOKENS,
    Parts,
    RawPair,
    TextFile,
    guess_tokens,
    read,
    split,
    tokenize,
)

__all__ = ["Corpus", "TextSettings"]

DATES = 22_000  # number of synthetic dates without a file


@dataclass(frozen=True)
class TextSettings:
    """Tokenisation and split of a corpus.

    Attributes:
        data: path of the file of pairs; None for synthetic dates.
        source_tokens: "words", "characters", or "auto" (by the script).
        target_tokens: likewise.
        min_freq: tokens that are rarer in the training part become <unk>.
        num_steps: longer texts are truncated to this many tokens, <eos> included.
        validation: share of the sources to choose the best epoch by.
        test: share of the sources for evaluation.
        limit: use only the first ``limit`` pairs; None uses all.
        seed: of the split, and of the dates.

    Raises:
        TypeError, ValueError: a setting out of its range.
    """

    data: str | None = None
    source_tokens: str = "auto"
    target_tokens: str = "auto"
    min_freq: int = 2
    num_steps: int = 50
    validation: float = 0.02
    test: float = 0.05
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("source_tokens", "target_tokens"):
            if getattr(self, name) not in ("auto", *TOKENS):
                need = "be one of 'auto', 'words', 'characters'"
                checks.reject(ValueError, name, need, repr(getattr(self, name)))
        checks.positive_int("min_freq", self.min_freq)
        checks.positive_int("num_steps", self.num_steps)
        checks.probability("validation", self.validation)
        checks.probability("test", self.test)
        if self.limit is not None:
            checks.positive_int("limit", self.limit)


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
        """Read the data.

        Raises:
            ValueError: the file cannot be read, or leaves nothing to train on.
        """
        found = _dates(settings.seed) if settings.data is None else read(settings.data)
        pairs = found.pairs[: settings.limit]
        guessed = [guess_tokens([pair[side] for pair in pairs[:1000]]) for side in (0, 1)]
        if settings.data is None:
            guessed = ["characters", "characters"]
        asked = (settings.source_tokens, settings.target_tokens)
        source, target = (g if a == "auto" else a for a, g in zip(asked, guessed, strict=True))
        parts = split(pairs, settings.validation, settings.test, settings.seed)
        digest = hashlib.sha256("\n".join(map("\t".join, pairs)).encode()).hexdigest()
        return cls(pairs, (source, target), parts, found.note(), digest)

    def part(self, name: str) -> list[RawPair]:
        """The pairs of "train", "validation" or "test", or "all" in the order of the file."""
        if name == "all":
            return self.pairs
        pairs: list[RawPair] = getattr(self.parts, name)
        return pairs

    def encode(
        self, pairs: Sequence[RawPair], settings: TextSettings, vocabs: Vocabs | None = None
    ) -> Pairs:
        """Encode pairs as token indices.

        Args:
            pairs: some of the corpus.
            settings: says how long they may be, and how rare a token.
            vocabs: those of the training; new ones, of these pairs, unless given.

        Raises:
            ValueError: new vocabularies would hold no token.
        """
        texts = [tokenized(pair, self.kinds) for pair in pairs]
        if vocabs is None:
            new = Pairs.of(texts, settings.min_freq, settings.num_steps)
            for side, vocab in (("source", new.source_vocab), ("target", new.target_vocab)):
                if not vocab.known:
                    most = f"{settings.min_freq} (no {side} token is there so often)"
                    checks.reject(ValueError, "min_freq", "leave tokens to learn", most)
            return new
        return Pairs.with_vocabs(texts, *vocabs, settings.num_steps)


def tokenized(pair: RawPair, kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """Both sides of a pair as tokens."""
    return tokenize(pair[0], kinds[0]), tokenize(pair[1], kinds[1])


def _dates(seed: int) -> TextFile:
    return TextFile([(example.text, example.iso) for example in dates.generate(DATES, seed)])

"""The data of a training: its file, tokenisation and split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bahdanau_fast import checks
from bahdanau_fast.seq2seq import options
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

__all__ = ["Corpus", "TextSettings", "tokenized"]

DATES = 22_000  # number of synthetic dates without a file


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
        guessed = [guess_tokens([pair[side] for pair in pairs[:1000]]) for side in (0, 1)]
        if settings.data is None:
            guessed = ["characters", "characters"]
        asked = (settings.source_tokens, settings.target_tokens)
        source, target = (g if a == "auto" else a for a, g in zip(asked, guessed, strict=True))
        parts = split(pairs, settings.validation, settings.test, settings.seed)
        digest = hashlib.sha256("\n".join(map("\t".join, pairs)).encode()).hexdigest()
        return cls(pairs, (source, target), parts, found.note(), digest)

    def encode(
        self, pairs: Sequence[RawPair], settings: TextSettings, vocabs: Vocabs | None = None
    ) -> Pairs:
        """Token indices of some of the pairs, with new vocabularies of these unless given."""
        texts = [tokenized(pair, self.kinds) for pair in pairs]
        if vocabs is not None:
            return Pairs.with_vocabs(texts, *vocabs, settings.num_steps)
        new = Pairs.of(texts, settings.min_freq, settings.num_steps)
        for side, vocab in (("source", new.source_vocab), ("target", new.target_vocab)):
            if not vocab.known:
                most = f"{settings.min_freq} (no {side} token is there so often)"
                checks.reject(ValueError, "min_freq", "leave tokens to learn", most)
        return new


def tokenized(pair: RawPair, kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """Both sides of a pair as tokens."""
    return tokenize(pair[0], kinds[0]), tokenize(pair[1], kinds[1])

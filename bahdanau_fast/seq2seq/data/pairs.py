"""From text to batches: vocabulary, encoding, padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks

PAD, BOS, EOS, UNK = 0, 1, 2, 3
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


class Vocab:
    """Tokens and their indices: <pad>, <bos>, <eos>, <unk>, then by falling frequency.

    Args:
        sequences: tokenised texts; a plain string counts as its characters.
        min_freq: a token seen less often becomes <unk>.

    >>> vocab = Vocab(["may", "march"])
    >>> vocab.tokens[:6], vocab["m"], vocab["?"]
    (('<pad>', '<bos>', '<eos>', '<unk>', 'a', 'm'), 5, 3)
    """

    def __init__(self, sequences: Iterable[Sequence[str]], min_freq: int = 1) -> None:
        counts = Counter(token for sequence in sequences for token in sequence)
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        often = (token for token, n in ordered if n >= min_freq and token not in _SPECIAL)
        self.tokens: tuple[str, ...] = (*_SPECIAL, *often)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @classmethod
    def of_tokens(cls, tokens: Sequence[str]) -> Vocab:
        """The vocabulary with these :attr:`tokens`.

        Raises:
            ValueError: not <pad>, <bos>, <eos>, <unk> in front, or duplicates.
        """
        vocab = cls(())
        if tuple(tokens[:4]) != _SPECIAL or len(set(tokens)) != len(tokens):
            need = f"begin with {', '.join(_SPECIAL)} and hold no duplicates"
            checks.reject(ValueError, "tokens", need, f"{len(tokens)} tokens")
        vocab.tokens = tuple(tokens)
        return vocab

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def known(self) -> tuple[str, ...]:
        """The tokens of texts, without <pad>, <bos>, <eos> and <unk>."""
        return self.tokens[len(_SPECIAL) :]

    def __getitem__(self, token: str) -> int:
        return self._index.get(token, UNK)

    def __contains__(self, token: object) -> bool:
        return token in self._index

    def to_tokens(self, indices: Iterable[int]) -> list[str]:
        """The tokens of these indices."""
        return [self.tokens[index] for index in indices]


class Vocabs(NamedTuple):
    """The vocabularies of both sides."""

    source_vocab: Vocab
    target_vocab: Vocab


def encode(
    sequences: Sequence[Sequence[str]], vocab: Vocab, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Token indices of N texts with <eos> appended, truncated or padded to ``num_steps``, T.

    Returns:
        Tokens (N,T) and valid lengths (N,), both int64.

    Raises:
        ValueError: ``num_steps`` is below 1.

    >>> encode(["ab", "abcd"], Vocab(["abcd"]), 4)[0].tolist()
    [[4, 5, 2, 0], [4, 5, 6, 7]]
    """
    checks.positive_int("num_steps", num_steps)
    rows = [[*(vocab[token] for token in text), EOS][:num_steps] for text in sequences]
    lens = torch.tensor([len(row) for row in rows], dtype=torch.long)
    padded = [row + [PAD] * (num_steps - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.long).reshape(-1, num_steps), lens


class Batch(NamedTuple):
    """One training step: tokens (B,Tk) and (B,T), and their valid lengths (B,)."""

    source: Tensor
    source_lens: Tensor
    target: Tensor
    target_lens: Tensor


@dataclass(frozen=True)
class Pairs:
    """Encoded source and target texts: the whole set as one :class:`Batch`."""

    tensors: Batch
    source_vocab: Vocab
    target_vocab: Vocab

    @classmethod
    def of(
        cls,
        texts: Sequence[tuple[Sequence[str], Sequence[str]]],
        min_freq: int = 1,
        num_steps: int | None = None,
    ) -> Pairs:
        """Build vocabularies from (source, target) pairs and encode them.

        Args:
            texts: tokenised pairs; plain strings count as their characters.
            min_freq: a token seen less often becomes <unk>.
            num_steps: longer texts are truncated to this many tokens; None truncates none.

        Raises:
            ValueError: ``texts`` is empty.
        """
        sources, targets = [pair[0] for pair in texts], [pair[1] for pair in texts]
        return cls.with_vocabs(texts, Vocab(sources, min_freq), Vocab(targets, min_freq), num_steps)

    @classmethod
    def with_vocabs(
        cls,
        texts: Sequence[tuple[Sequence[str], Sequence[str]]],
        source_vocab: Vocab,
        target_vocab: Vocab,
        num_steps: int | None = None,
    ) -> Pairs:
        """Encode pairs with existing vocabularies; arguments as for :meth:`of`."""
        if not texts:
            checks.reject(ValueError, "texts", "hold at least one pair", 0)
        encoded: list[Tensor] = []
        for side, vocab in enumerate((source_vocab, target_vocab)):
            sequences = [pair[side] for pair in texts]
            longest = max(map(len, sequences)) + 1
            steps = longest if num_steps is None else min(num_steps, longest)
            encoded += encode(sequences, vocab, steps)
        return cls(Batch(*encoded), source_vocab, target_vocab)

    def __len__(self) -> int:
        return len(self.tensors.source)


# Batches sorted by length together: little padding, and the order stays random.
_WINDOW = 50


def batches(pairs: Pairs, batch_size: int, seed: int, epoch: int = 0) -> Iterator[Batch]:
    """Every pair once, texts of similar length together, in an order set by seed and epoch.

    Args:
        pairs: the whole set.
        batch_size: B; one batch may be smaller.
        seed: of the whole training.
        epoch: each has its own order.

    Yields:
        Batches of at most ``batch_size`` pairs, as wide as their longest text.
    """
    checks.positive_int("batch_size", batch_size)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**64)
    order = torch.randperm(len(pairs), generator=generator)
    widest = pairs.tensors.target.shape[1] + 1
    lens = pairs.tensors.source_lens * widest + pairs.tensors.target_lens
    chunks: list[Tensor] = []
    for window in torch.split(order, batch_size * _WINDOW):
        chunks += torch.split(window[lens[window].argsort(stable=True)], batch_size)
    for i in torch.randperm(len(chunks), generator=generator).tolist():
        source, source_lens, target, target_lens = (tensor[chunks[i]] for tensor in pairs.tensors)
        wide, long = (int(lens.max()) for lens in (source_lens, target_lens))
        yield Batch(source[:, :wide], source_lens, target[:, :long], target_lens)

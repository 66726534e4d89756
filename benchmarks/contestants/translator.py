"""A whole model of others: letters to letters, with JoeyNMT's recurrent decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .published import load

__all__ = ["Translator", "train"]

VOCABULARY = 128  # letters; others are the last one


class _Encoder(nn.GRU):
    """A GRU that says how wide its states are, as JoeyNMT's decoder asks."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size, batch_first=True)
        self.output_size = size


class Translator(nn.Module):
    """An embedding, a GRU and JoeyNMT's recurrent decoder.

    Args:
        size: features of embeddings and states.

    Raises:
        UnavailableError: JoeyNMT cannot be downloaded.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size, padding_idx=0)
        self.encoder = _Encoder(size)
        self.decoder = load("joeynmt.decoders", "RecurrentDecoder")(
            emb_size=size, hidden_size=size, encoder=self.encoder, vocab_size=VOCABULARY
        )

    def loss(self, source: Tensor, target: Tensor) -> Tensor:
        """Cross entropy of the letters of (B,T) targets, from (B,S) sources."""
        states, last = self.encoder(self.embedding(source))
        given, wanted = self.embedding(target[:, :-1]), target[:, 1:]
        scores, *_ = self.decoder(
            trg_embed=given,
            encoder_output=states,
            encoder_hidden=last[-1],
            src_mask=(source > 0).unsqueeze(1),
            unroll_steps=given.shape[1],
            trg_mask=None,
        )
        return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=0)


def batch_of(texts: Sequence[str]) -> Tensor:
    """(B,T): 1 to begin, letters, 2 to end, then zeros."""
    rows = [torch.tensor([1, *(min(ord(c), VOCABULARY - 1) for c in text), 2]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def train(
    model: Translator, pairs: Sequence[tuple[str, str]], steps: int, batch: int
) -> list[float]:
    """The losses of some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for step in range(steps):
        at = step * batch % (len(pairs) - batch)
        sources, targets = zip(*pairs[at : at + batch], strict=True)
        optimizer.zero_grad()
        loss = model.loss(batch_of(sources), batch_of(targets))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses

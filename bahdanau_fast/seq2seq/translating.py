"""Greedy decoding, with the attention weights of every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.data import BOS, EOS, PAD, Vocab, encode
from bahdanau_fast.seq2seq.decoders import Seq2SeqAttentionDecoder
from bahdanau_fast.seq2seq.models import EncoderDecoder

__all__ = ["Translation", "greedy", "translate"]


@dataclass(frozen=True)
class Translation:
    """One translated text.

    Attributes:
        source: source tokens that were read, without <eos>.
        tokens: target tokens, without <eos>.
        weights: (len(tokens),len(source)), where each target token looked; what went to the
            source's <eos> is left out, so rows may sum to less than one.
    """

    source: list[str]
    tokens: list[str]
    weights: Tensor


@torch.inference_mode()
def greedy(
    model: EncoderDecoder, source: Tensor, source_lens: Tensor, max_steps: int
) -> tuple[Tensor, Tensor]:
    """The likeliest token at every step, for a whole batch at a time.

    Args:
        model: its decoder is a :class:`Seq2SeqAttentionDecoder`.
        source: (B,Tk) tokens.
        source_lens: (B,).
        max_steps: the longest target.

    Returns:
        Tokens (B,T), <pad> behind <eos>, and weights (B,T,Tk), with T <= ``max_steps``: decoding
        stops when every text has its <eos>.

    Raises:
        TypeError: another kind of decoder.
        ValueError: ``max_steps`` is below 1.
    """
    decoder = model.decoder
    if not isinstance(decoder, Seq2SeqAttentionDecoder):
        kind = type(decoder).__name__
        checks.reject(TypeError, "model.decoder", "be a Seq2SeqAttentionDecoder", kind)
    checks.positive_int("max_steps", max_steps)
    was_training = model.training
    model.eval()
    state = decoder.init_state(model.encoder(source, source_lens), source_lens)
    memory, hidden = decoder.memory(state), state[1]
    token = torch.full_like(source[:, 0], BOS)
    finished = torch.zeros_like(token, dtype=torch.bool)
    tokens, weights = [], []
    for _ in range(max_steps):
        features, looked, hidden = decoder.step(decoder.embedding(token), hidden, memory)
        token = decoder.dense(features).argmax(-1).masked_fill(finished, PAD)
        tokens.append(token)
        weights.append(looked)
        finished = finished | (token == EOS)
        if bool(finished.all()):
            break
    model.train(was_training)
    return torch.stack(tokens, 1), torch.cat(weights, 1)


def translate(
    model: EncoderDecoder,
    texts: Sequence[Sequence[str]],
    source_vocab: Vocab,
    target_vocab: Vocab,
    num_steps: int,
    max_steps: int,
    batch_size: int = 256,
) -> list[Translation]:
    """Translate tokenised texts greedily.

    Args:
        model: trained.
        texts: plain strings count as their characters; longer ones are cut to ``num_steps``.
        source_vocab: of the training.
        target_vocab: of the training.
        num_steps: padded source length Tk.
        max_steps: the longest target.
        batch_size: texts at a time.

    Returns:
        One translation per text, in order.
    """
    device = next(model.parameters()).device
    results = []
    for start in range(0, len(texts), batch_size):
        chunk = texts[start : start + batch_size]
        source, lens = encode(chunk, source_vocab, num_steps)
        tokens, weights = greedy(model, source.to(device), lens.to(device), max_steps)
        for text, row, seen in zip(chunk, tokens.tolist(), weights.cpu(), strict=True):
            length = next((i for i, token in enumerate(row) if token in (EOS, PAD)), len(row))
            read = list(text)[:num_steps]
            words = target_vocab.to_tokens(row[:length])
            results.append(Translation(read, words, seen[:length, : len(read)].clone()))
    return results

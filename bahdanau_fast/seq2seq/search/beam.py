"""Beam search whose beams are queries against one memory: no source is copied per beam.

Sizes: B sources, K beams, V vocabulary, T steps, Tk source length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.data.pairs import BOS, EOS, PAD, UNK
from bahdanau_fast.seq2seq.model.decoders import StepDecoder
from bahdanau_fast.seq2seq.model.encoder_decoder import Hidden

__all__ = ["Beam", "Hypotheses", "Start", "search"]

_MIN_COVERAGE = 1e-9  # summed attention of a source token is at least this, so that log is finite


@dataclass(frozen=True)
class Beam:
    """How to search (Wu et al. 2016, https://arxiv.org/abs/1609.08144, section 7).

    A target of n tokens, <eos> included, has the score

        log P / ((5 + n) / 6)^length_penalty + coverage_penalty * sum_j log(min(sum_i w_ij, 1))

    Attributes:
        width: K, the number of hypotheses; 1 is greedy decoding.
        length_penalty: 0 prefers short targets, 1 nearly removes that preference.
        coverage_penalty: weight of source tokens without attention in the score.

    Raises:
        TypeError, ValueError: a width below 1, a penalty below 0.
    """

    width: int = 5
    length_penalty: float = 1.0
    coverage_penalty: float = 0.0

    def __post_init__(self) -> None:
        checks.positive_int("width", self.width)
        for name in ("length_penalty", "coverage_penalty"):
            if not getattr(self, name) >= 0:
                checks.reject(ValueError, name, "be at least 0", getattr(self, name))


class Start(NamedTuple):
    """Encoded sources, from which a search starts.

    Attributes:
        decoder: of the model.
        memory: of the B sources.
        hidden: (L,B,H) or a pair of those.
        source_lens: (B,).
        unknown: whether <unk> may be written.
    """

    decoder: StepDecoder
    memory: Any
    hidden: Hidden
    source_lens: Tensor
    unknown: bool = True

    def logits(self, features: Tensor) -> Tensor:
        """Logits of the next token in fp32 or better; -inf for excluded tokens."""
        logits: Tensor = self.decoder.dense(features)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits[..., self.left_out] = float("-inf")
        return logits

    @property
    def left_out(self) -> list[int]:
        """Tokens that are excluded from targets."""
        return [PAD, BOS] if self.unknown else [PAD, BOS, UNK]


class Hypotheses(NamedTuple):
    """Targets found by a search, the best first.

    Attributes:
        tokens: (B,K,T), <pad> behind <eos>.
        scores: (B,K); -inf where there were fewer than K hypotheses.
        weights: (B,K,T,Tk), or None from a decoder without attention.
    """

    tokens: Tensor
    scores: Tensor
    weights: Tensor | None


def search(start: Start, beam: Beam, max_steps: int) -> Hypotheses:
    """Keep the K best hypotheses of every source, finished or not, at every step.

    Ends when no source's best hypothesis can be overtaken any more.

    Args:
        start: the sources.
        beam: how to search.
        max_steps: the longest target.

    Raises:
        ValueError: a coverage penalty for a decoder without attention.
    """
    decoder, memory, hidden, source_lens, _ = start
    batch, width, device = len(source_lens), beam.width, source_lens.device
    hidden = _map(hidden, lambda part: part.repeat_interleave(width, 1))
    token = torch.full((batch, width), BOS, device=device)
    # All beams start equal, so only the first may be continued.
    log_p = torch.full((batch, width), float("-inf"), device=device)
    log_p[:, 0] = 0.0
    lens, finished = torch.zeros_like(token), torch.zeros_like(token, dtype=torch.bool)
    first = width * torch.arange(batch, device=device).unsqueeze(1)
    score = _Score(beam, source_lens)
    tokens, parents, weights = [], [], []
    scores = log_p
    for step in range(max_steps):
        features, of_step, hidden = decoder.step(decoder.embedding(token.flatten()), hidden, memory)
        if of_step is not None:
            of_step = of_step.reshape(batch, width, of_step.shape[-1])
            weights.append(of_step)
        score.add_weights(of_step, finished)
        lens = lens + ~finished
        best, candidates = _continuations(start.logits(features), finished, width)
        totals = log_p.unsqueeze(-1) + best  # (B,K,n): n continuations of each hypothesis
        scores, chosen = score(totals, lens).flatten(1).topk(width)
        parent = chosen // best.shape[-1]
        token, log_p = candidates.flatten(1).gather(1, chosen), totals.flatten(1).gather(1, chosen)
        lens, finished = lens.gather(1, parent), finished.gather(1, parent) | (token == EOS)
        score.reorder(parent)
        rows = (first + parent).flatten()
        hidden = _map(hidden, lambda part, rows=rows: part.index_select(1, rows))
        tokens.append(token)
        parents.append(parent)
        # The best score an unfinished hypothesis can reach: at full length, all sources covered.
        hope = log_p / score.norm(torch.full_like(lens, max_steps))
        hope = hope.masked_fill(finished, float("-inf")).amax(1)
        if step + 1 < max_steps and bool((finished[:, 0] & (scores[:, 0] >= hope)).all()):
            break
    return _trace(tokens, parents, weights, scores)


class _Score:
    """The score of :class:`Beam`, step by step."""

    def __init__(self, beam: Beam, source_lens: Tensor) -> None:
        self.beam, self.source_lens = beam, source_lens
        self.coverage: Tensor | None = None  # (B,K,Tk), the sum of the weights so far

    def add_weights(self, weights: Tensor | None, finished: Tensor) -> None:
        """Add the weights (B,K,Tk) of one step to those of unfinished hypotheses."""
        if not self.beam.coverage_penalty:
            return
        if weights is None:
            need = "be 0 for a decoder without attention"
            checks.reject(ValueError, "coverage_penalty", need, self.beam.coverage_penalty)
        added = weights.float().masked_fill(finished.unsqueeze(-1), 0.0)
        self.coverage = added if self.coverage is None else self.coverage + added

    def reorder(self, parent: Tensor) -> None:
        """Hypothesis k continues ``parent[:, k]`` (B,K)."""
        if self.coverage is not None:
            chosen = parent.unsqueeze(-1).expand_as(self.coverage)
            self.coverage = self.coverage.gather(1, chosen)

    def norm(self, lens: Tensor) -> Tensor:
        """The divisor of log P for hypotheses of these lengths."""
        return ((5.0 + lens) / 6.0) ** self.beam.length_penalty

    def __call__(self, log_p: Tensor, lens: Tensor) -> Tensor:
        """Scores (B,K,n) of continuations with log P (B,K,n); their lengths (B,K)."""
        scores = log_p / self.norm(lens).unsqueeze(-1)
        if self.coverage is None:
            return scores
        beyond = torch.arange(self.coverage.shape[-1], device=lens.device)
        beyond = (beyond >= self.source_lens.unsqueeze(1)).unsqueeze(1)
        covered = self.coverage.clamp(_MIN_COVERAGE, 1.0).log().masked_fill(beyond, 0.0).sum(-1)
        return scores + self.beam.coverage_penalty * covered.unsqueeze(-1)


def _map(hidden: Hidden, function: Any) -> Hidden:
    if isinstance(hidden, tuple):
        return function(hidden[0]), function(hidden[1])
    result: Tensor = function(hidden)
    return result


def _continuations(logits: Tensor, finished: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best tokens behind each hypothesis and their log P (B,K,n); only <pad> behind <eos>."""
    batch, beams = finished.shape
    log_p = logits.log_softmax(-1).unflatten(0, (batch, beams))
    best, candidates = log_p.topk(min(width, log_p.shape[-1]), -1)
    over = finished.unsqueeze(-1)
    best = best.masked_fill(over, float("-inf"))
    best[..., 0].masked_fill_(finished, 0.0)
    return best, candidates.masked_fill(over, PAD)


def _trace(
    tokens: list[Tensor], parents: list[Tensor], weights: list[Tensor], scores: Tensor
) -> Hypotheses:
    """Trace every hypothesis back from the last step to the first."""
    at = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    found_tokens, found_weights = [], []
    for step in reversed(range(len(tokens))):
        found_tokens.append(tokens[step].gather(1, at))
        at = parents[step].gather(1, at)
        if weights:
            index = at.unsqueeze(-1).expand(-1, -1, weights[step].shape[-1])
            found_weights.append(weights[step].gather(1, index))
    stacked = torch.stack(found_weights[::-1], 2) if found_weights else None
    return Hypotheses(torch.stack(found_tokens[::-1], 2), scores, stacked)

"""Beam search whose beams are queries against one memory: no source is copied per beam.

Sizes: B sources, K beams, V vocabulary, T steps, Tk source length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.data.pairs import BOS, EOS, PAD, UNK
from bahdanau_fast.seq2seq.model.decoders import StepDecoder
from bahdanau_fast.seq2seq.model.encoder_decoder import EncoderDecoder, Hidden

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
        record: keep what was alive at each step, for :func:`attention_page`.

    Raises:
        TypeError, ValueError: a width below 1, a penalty below 0.
    """

    width: int = 5
    length_penalty: float = 1.0
    coverage_penalty: float = 0.0
    record: bool = False

    def __post_init__(self) -> None:
        checks.positive_int("width", self.width)
        for name in ("length_penalty", "coverage_penalty"):
            if not getattr(self, name) >= 0:
                checks.reject(ValueError, name, "be at least 0", getattr(self, name))

    def norm(self, lens: Tensor) -> Tensor:
        """The divisor of log P for hypotheses of these lengths."""
        return ((5.0 + lens) / 6.0) ** self.length_penalty


class BeamStep(NamedTuple):
    """The hypotheses of a search after one of its steps, the best first; as :class:`Hypotheses`."""

    tokens: Tensor  # (B,K), the last of each
    parents: Tensor  # (B,K), the ranks of what they continue in the step before
    scores: Tensor
    weights: Tensor | None  # (B,K,Tk), of the last tokens


class Hypotheses(NamedTuple):
    """Targets found by a search, the best first.

    Attributes:
        tokens: (B,K,T), <pad> behind <eos>.
        scores: (B,K); -inf where there were fewer than K hypotheses.
        weights: (B,K,T,Tk), or None from a decoder without attention.
        steps: T of them if ``Beam.record``, else none.
    """

    tokens: Tensor
    scores: Tensor
    weights: Tensor | None
    steps: Sequence[BeamStep] = ()


class Start(NamedTuple):
    """Encoded sources, from which a search starts: what ``decoder.step`` is given."""

    decoder: StepDecoder
    memory: Any
    hidden: Hidden
    banned_tokens: list[int]  # tokens that are never written

    def logits(self, features: Tensor) -> Tensor:
        """Logits of the next token in fp32 or better; -inf for excluded tokens."""
        logits: Tensor = self.decoder.dense(features)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits[..., self.banned_tokens] = float("-inf")
        return logits


@contextmanager
def started(
    model: EncoderDecoder, source: Tensor, source_lens: Tensor, max_steps: int, unknown: bool
) -> Iterator[Start]:
    """The model in evaluation mode, with the sources encoded."""
    decoder = model.decoder
    if not isinstance(decoder, StepDecoder):
        checks.reject(TypeError, "model.decoder", "be a StepDecoder", type(decoder).__name__)
    checks.positive_int("max_steps", max_steps)
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        state = decoder.init_state(model.encoder(source, source_lens), source_lens)
        banned_tokens = [PAD, BOS] if unknown else [PAD, BOS, UNK]
        yield Start(decoder, decoder.memory(state), state[1], banned_tokens)
    finally:
        for module in in_training:  # not all of them, where layers are frozen
            module.training = True


@torch.inference_mode()
def beam_search(
    model: EncoderDecoder,
    source: Tensor,
    source_lens: Tensor,
    max_steps: int,
    beam: Beam | None = None,
    *,
    unknown: bool = True,
) -> Hypotheses:
    """The best targets found by beam search, for a whole batch.

    Keeps the K best hypotheses of every source, finished or not, at every step. Ends when no
    source's best hypothesis can be overtaken any more. Arguments are those of :func:`greedy`, and
    ``beam``: width and penalties, five beams unless given.

    Returns:
        Tokens (B,K,T), scores (B,K), weights (B,K,T,Tk) or None; the best hypothesis first.

    Raises:
        TypeError: the decoder is no :class:`StepDecoder`.
        ValueError: ``max_steps`` is below 1, or a coverage penalty without attention.
    """
    with started(model, source, source_lens, max_steps, unknown) as start:
        return _search(start, source_lens, max_steps, beam or Beam())


def _search(start: Start, source_lens: Tensor, max_steps: int, beam: Beam) -> Hypotheses:
    batch, width, device = len(source_lens), beam.width, source_lens.device
    hidden = _map(start.hidden, lambda part: part.repeat_interleave(width, 1))
    token = torch.full((batch, width), BOS, device=device)
    # All beams start equal, so only the first may be continued.
    scores = log_p = torch.full((batch, width), float("-inf"), device=device)
    log_p[:, 0] = 0.0
    lens, finished = torch.zeros_like(token), torch.zeros_like(token, dtype=torch.bool)
    coverage = log_p.new_zeros(batch, width, 1)  # (B,K,Tk) from the first step on
    first = width * torch.arange(batch, device=device).unsqueeze(1)
    tokens, parents, weights = [], [], []
    steps: list[BeamStep] = []
    for step in range(max_steps):
        embedded = start.decoder.embedding(token.flatten())
        features, of_step, hidden = start.decoder.step(embedded, hidden, start.memory)
        if of_step is not None:
            weights.append(of_step.reshape(batch, width, of_step.shape[-1]))
        lens = lens + ~finished
        best, candidates = _continuations(start.logits(features), finished, width)
        totals = log_p.unsqueeze(-1) + best  # (B,K,n): n continuations of each hypothesis
        ranked = totals / beam.norm(lens).unsqueeze(-1)
        if beam.coverage_penalty:
            if not weights:
                need = "be 0 for a decoder without attention"
                checks.reject(ValueError, "coverage_penalty", need, beam.coverage_penalty)
            coverage = coverage + weights[-1].float().masked_fill(finished.unsqueeze(-1), 0.0)
            covered = _log_covered(coverage, source_lens).unsqueeze(-1)
            ranked = ranked + beam.coverage_penalty * covered
        scores, chosen = ranked.flatten(1).topk(width)
        parent = chosen // best.shape[-1]
        token, log_p = candidates.flatten(1).gather(1, chosen), totals.flatten(1).gather(1, chosen)
        lens, finished = lens.gather(1, parent), finished.gather(1, parent) | (token == EOS)
        coverage = coverage.gather(1, parent.unsqueeze(-1).expand_as(coverage))
        rows = (first + parent).flatten()
        hidden = _map(hidden, lambda part, rows=rows: part.index_select(1, rows))
        tokens.append(token)
        parents.append(parent)
        if beam.record:
            looked = weights[-1].flatten(0, 1)[rows].view_as(weights[-1]) if weights else None
            steps.append(BeamStep(token, parent, scores, looked))
        # The best score an unfinished hypothesis can reach: at full length, all sources covered.
        hope = log_p / beam.norm(torch.full_like(lens, max_steps))
        hope = hope.masked_fill(finished, float("-inf")).amax(1)
        if step + 1 < max_steps and bool((finished[:, 0] & (scores[:, 0] >= hope)).all()):
            break
    return _trace(tokens, parents, weights, scores)._replace(steps=steps)


def _log_covered(coverage: Tensor, source_lens: Tensor) -> Tensor:
    """Sum over a source of the logs of its tokens' summed weights, at most one each: (B,K)."""
    beyond = torch.arange(coverage.shape[-1], device=coverage.device) >= source_lens[:, None, None]
    return coverage.clamp(_MIN_COVERAGE, 1.0).log().masked_fill(beyond, 0.0).sum(-1)


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
    traced, looked = [], []
    for step in reversed(range(len(tokens))):
        traced.append(tokens[step].gather(1, at))
        at = parents[step].gather(1, at)
        if weights:
            index = at.unsqueeze(-1).expand(-1, -1, weights[step].shape[-1])
            looked.append(weights[step].gather(1, index))
    stacked = torch.stack(looked[::-1], 2) if looked else None
    return Hypotheses(torch.stack(traced[::-1], 2), scores, stacked)

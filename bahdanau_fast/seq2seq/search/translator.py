"""Translating: tokens of a batch, tokenised texts, and plain sentences with a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.data.corpus import RawPair, TextSettings, guess_tokens, join, tokenize
from bahdanau_fast.seq2seq.data.pairs import BOS, EOS, PAD, Vocab, Vocabs, encode
from bahdanau_fast.seq2seq.model import checkpoints
from bahdanau_fast.seq2seq.model.encoder_decoder import EncoderDecoder
from bahdanau_fast.seq2seq.model.settings import Settings, build_model
from bahdanau_fast.seq2seq.search.beam import Beam, BeamStep, beam_search, started
from bahdanau_fast.seq2seq.search.scoring import CorpusScores, bleu, corpus_scores


class Alive(NamedTuple):
    """A hypothesis after one step of a search."""

    token: str | None  # its last; None behind <eos>
    parent: int  # the rank of what it continues in the step before
    score: float
    weights: list[float]  # of its last token, over the source tokens and, if it was read, <eos>


@dataclass(frozen=True)
class Translation:
    """One translated text.

    Attributes:
        source: source tokens, truncated as for the model, without <eos>.
        tokens: target tokens, without <eos>.
        weights: (len(tokens),len(source)), the attention weights. None from a decoder without
            attention.
        score: of the beam search; None when greedy.
        end_weights: (len(tokens),), the weights of the source's <eos>: with ``weights`` each row
            sums to one. None from a decoder without attention, and for a truncated source.
        steps: the hypotheses after each step, the best first, if ``Beam.record``; else None.
    """

    source: list[str]
    tokens: list[str]
    weights: Tensor | None
    score: float | None = None
    end_weights: Tensor | None = None
    steps: list[list[Alive]] | None = None


def shown(translation: Translation) -> tuple[list[str], Tensor]:
    """Source tokens and weights (target, source) to show; with <eos>, if read: rows sum to one."""
    source, tokens, weights = translation.source, translation.tokens, translation.weights
    if weights is None or not source or not tokens:
        need = "have attention weights and at least one token on either side"
        checks.reject(ValueError, "translations", need, f"{len(tokens)} tokens")
    if tuple(weights.shape) != (len(tokens), len(source)):
        need = f"have shape (target tokens, source tokens), {(len(tokens), len(source))}"
        checks.reject(ValueError, "weights", need, tuple(weights.shape))
    if translation.end_weights is None:
        return source, weights
    return [*source, "<eos>"], torch.cat((weights, translation.end_weights.unsqueeze(1)), 1)


@torch.inference_mode()
def greedy(
    model: EncoderDecoder,
    source: Tensor,
    source_lens: Tensor,
    max_steps: int,
    *,
    unknown: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The most likely token at every step, for a whole batch.

    Args:
        model: its decoder is a :class:`StepDecoder`.
        source: (B,Tk) tokens.
        source_lens: (B,).
        max_steps: the longest target.
        unknown: allow <unk> in targets; otherwise the most likely known token is taken.

    Returns:
        Tokens (B,T), <pad> behind <eos>, and weights (B,T,Tk), with T <= ``max_steps``: decoding
        stops when every text has its <eos>. The weights of a decoder without attention are None.

    Raises:
        TypeError: another kind of decoder.
        ValueError: ``max_steps`` is below 1.
    """
    tokens: list[Tensor] = []
    weights: list[Tensor] = []
    with started(model, source, source_lens, max_steps, unknown) as start:
        decoder, memory, hidden, banned_tokens = start
        written = decoder.write(hidden, memory, banned_tokens, max_steps)
        if written is not None:
            return written
        token = source.new_full((len(source),), BOS)
        finished = torch.zeros_like(token, dtype=torch.bool)
        for _ in range(max_steps):
            features, of_step, hidden = decoder.step(decoder.embedding(token), hidden, memory)
            token = start.logits(features).argmax(-1).masked_fill(finished, PAD)
            tokens.append(token)
            if of_step is not None:
                weights.append(of_step)
            finished = finished | (token == EOS)
            if bool(finished.all()):
                break
    return torch.stack(tokens, 1), torch.cat(weights, 1) if weights else None


def translate(
    model: EncoderDecoder,
    texts: Sequence[Sequence[str]],
    source_vocab: Vocab,
    target_vocab: Vocab,
    num_steps: int,
    max_steps: int,
    batch_size: int = 256,
    beam: Beam | None = None,
    *,
    unknown: bool = True,
) -> list[Translation]:
    """Translate tokenised texts.

    Args:
        model: trained.
        texts: plain strings count as their characters; longer ones are truncated to ``num_steps``.
        source_vocab: of the training.
        target_vocab: of the training.
        num_steps: the longest source, <eos> included.
        max_steps: the longest target.
        batch_size: texts per batch; texts of similar length share one.
        beam: how to search; greedy unless given.
        unknown: whether <unk> may be written.

    Returns:
        One translation per text, in order; empty for an empty text.
    """
    device = next(model.parameters()).device
    packed = getattr(model.encoder, "packed", False)
    order = sorted((i for i, text in enumerate(texts) if text), key=lambda i: len(texts[i]))
    results = {
        i: Translation([], [], torch.zeros(0, 0)) for i, text in enumerate(texts) if not text
    }
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        # Where padding does not matter, a batch is as wide as its last text, the longest.
        width = min(num_steps, len(texts[chosen[-1]]) + 1) if packed else num_steps
        encoded = encode([texts[i] for i in chosen], source_vocab, width)
        source, lens = (tensor.to(device) for tensor in encoded)
        scores: Sequence[float | None] = [None] * len(chosen)
        steps: Sequence[BeamStep] = ()
        if beam is None:
            tokens, weights = greedy(model, source, lens, max_steps, unknown=unknown)
        else:
            best = beam_search(model, source, lens, max_steps, beam, unknown=unknown)
            tokens, scores, steps = best.tokens[:, 0], best.scores[:, 0].tolist(), best.steps
            weights = None if best.weights is None else best.weights[:, 0]
        weights = None if weights is None else weights.cpu()
        for n, (i, row, score) in enumerate(zip(chosen, tokens.tolist(), scores, strict=True)):
            length = next((j for j, token in enumerate(row) if token in (EOS, PAD)), len(row))
            read, inner, end = list(texts[i])[:num_steps], None, None
            if weights is not None:
                inner = weights[n, :length, : len(read)].clone()
                end = weights[n, :length, len(read)].clone() if len(read) < num_steps else None
            words = target_vocab.to_tokens(row[:length])
            alive = [_alive(step, n, target_vocab, len(read) + 1) for step in steps] or None
            results[i] = Translation(read, words, inner, score, end, alive)
    return [results[i] for i in range(len(texts))]


def _alive(step: BeamStep, row: int, vocab: Vocab, width: int) -> list[Alive]:
    """What a step of a batch's search left alive in one row; weights of ``width`` source tokens."""
    scores = [score for score in step.scores[row].tolist() if score > float("-inf")]
    tokens = [None if t == PAD else vocab.tokens[t] for t in step.tokens[row].tolist()]
    parents: list[int] = step.parents[row].tolist()
    weights = [[]] * len(scores) if step.weights is None else step.weights[row, :, :width].tolist()
    return [Alive(*parts) for parts in zip(tokens, parents, scores, weights, strict=False)]


@dataclass(frozen=True)
class Scores:
    """Scores of translations against references that are tokenised and joined as they are."""

    corpus: CorpusScores
    bleu_above_0: int  # how many have the course's bleu(k=2) > 0
    bleu_above_08: int
    exact: int  # how many equal the reference


def settings_of(payload: Mapping[str, Any]) -> tuple[Settings, TextSettings]:
    """The settings in a checkpoint."""
    return Settings(**payload["settings"]), TextSettings(**payload["text"])


def vocabs_of(payload: Mapping[str, Any]) -> Vocabs:
    """The vocabularies in a checkpoint."""
    source, target = (Vocab.of_tokens(payload[f"{side}_vocab"]) for side in ("source", "target"))
    return Vocabs(source, target)


@dataclass(frozen=True)
class Translator:
    """A trained model, its vocabularies, and the settings of its training and of the data.

    Attributes:
        kinds: "words" or "characters", of source and target.
    """

    model: EncoderDecoder
    source_vocab: Vocab
    target_vocab: Vocab
    settings: Settings
    text: TextSettings
    kinds: tuple[str, str]

    @classmethod
    def load(cls, where: str | Path, device: torch.device | str = "cpu") -> Translator:
        """Read a checkpoint, or the best one of a folder that ``train`` wrote.

        Raises:
            ValueError: no checkpoint there, or a broken one.
        """
        path = checkpoints.find(Path(where))
        with checkpoints.fitting(path):
            payload = checkpoints.load(path, device)
            vocabs, (settings, text) = vocabs_of(payload), settings_of(payload)
            model = build_model(vocabs, settings)
            model.load_state_dict(payload["model"])
            source_kind, target_kind = payload["kinds"]
        return cls(model.to(device), *vocabs, settings, text, (source_kind, target_kind))

    def translate(
        self, sentences: Sequence[str], beam: Beam | None = None, batch_size: int = 256
    ) -> list[Translation]:
        """Translate plain sentences, greedily without a beam; translations hold no <unk>."""
        texts = [tokenize(sentence, self.kinds[0]) for sentence in sentences]
        steps, vocabs = self.text.num_steps, (self.source_vocab, self.target_vocab)
        return translate(self.model, texts, *vocabs, steps, steps, batch_size, beam, unknown=False)

    def joined(self, translation: Translation) -> str:
        """The text of a translation."""
        return join(translation.tokens, self.kinds[1])

    def score(self, pairs: Sequence[RawPair], translations: Sequence[Translation]) -> Scores:
        """Compare translations with the targets of their pairs.

        Raises:
            ModuleNotFoundError: sacrebleu is not installed.
            ValueError: no pairs.
        """
        wanted = [tokenize(target, self.kinds[1]) for _, target in pairs]
        course = [bleu(t.tokens, label, 2) for t, label in zip(translations, wanted, strict=True)]
        characters = self.kinds[1] == "characters"
        chinese = characters and guess_tokens([target for _, target in pairs]) == "characters"
        texts = [self.joined(translation) for translation in translations]
        references = [join(label, self.kinds[1]) for label in wanted]
        return Scores(
            corpus_scores(texts, references, chinese=chinese),
            sum(score > 0 for score in course),
            sum(score > 0.8 for score in course),
            sum(t.tokens == label for t, label in zip(translations, wanted, strict=True)),
        )

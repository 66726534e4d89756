"""A trained model with its vocabularies: plain sentences in, translations out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bahdanau_fast.seq2seq.data.corpus import RawPair, TextSettings, guess_tokens, join, tokenize
from bahdanau_fast.seq2seq.data.pairs import Vocab, Vocabs
from bahdanau_fast.seq2seq.model import checkpoints
from bahdanau_fast.seq2seq.model.encoder_decoder import EncoderDecoder
from bahdanau_fast.seq2seq.model.settings import Settings, build_model
from bahdanau_fast.seq2seq.search.beam import Beam
from bahdanau_fast.seq2seq.search.scoring import CorpusScores, bleu, corpus_scores
from bahdanau_fast.seq2seq.search.translating import Translation, translate

__all__ = ["Scores", "Translator", "settings_of", "vocabs_of"]


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
    """A trained model and its vocabularies.

    Attributes:
        model: encoder and decoder.
        source_vocab: source tokens.
        target_vocab: target tokens.
        settings: of the training.
        text: of its data.
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
        """Read a checkpoint.

        Args:
            where: a folder that ``train`` wrote (its best checkpoint is taken), or a checkpoint.
            device: where to translate.

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
        kinds = (source_kind, target_kind)
        return cls(model.to(device), *vocabs, settings, text, kinds)

    def translate(
        self, sentences: Sequence[str], beam: Beam | None = None, batch_size: int = 256
    ) -> list[Translation]:
        """Translate plain sentences; translations hold no <unk>.

        Args:
            sentences: tokenised as in the training.
            beam: how to search; greedy unless given.
            batch_size: sentences at a time.

        Returns:
            One translation per sentence, in order.
        """
        texts = [tokenize(sentence, self.kinds[0]) for sentence in sentences]
        steps = self.text.num_steps
        vocabs = (self.source_vocab, self.target_vocab)
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

"""A trained model with its vocabularies: plain sentences in, translations out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bahdanau_fast.seq2seq.data.corpus import TextSettings, tokenized
from bahdanau_fast.seq2seq.data.pairs import Vocab, Vocabs
from bahdanau_fast.seq2seq.data.text import RawPair, guess_tokens, join, tokenize
from bahdanau_fast.seq2seq.model import checkpoints
from bahdanau_fast.seq2seq.model.encoder_decoder import EncoderDecoder
from bahdanau_fast.seq2seq.model.settings import Settings, build_model
from bahdanau_fast.seq2seq.search.beam import Beam
from bahdanau_fast.seq2seq.search.scoring import CorpusScores, bleu, corpus_scores
from bahdanau_fast.seq2seq.search.translating import Translation, translate

__all__ = ["Scores", "Translator"]


@dataclass(frozen=True)
class Scores:
    """Scores of translations against their references.

    Attributes:
        corpus: BLEU and chrF; references are tokenised and joined as translations are.
        bleu_above_0: how many have the course's bleu(k=2) > 0.
        bleu_above_08: how many have it > 0.8.
        exact: how many equal the reference.
    """

    corpus: CorpusScores
    bleu_above_0: int
    bleu_above_08: int
    exact: int


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
    def of(cls, payload: dict[str, Any]) -> Translator:
        """Build it from what :func:`checkpoints.load` returns; its weights are loaded strictly."""
        settings, text = Settings(**payload["settings"]), TextSettings(**payload["text"])
        vocabs = Vocabs(
            *(Vocab.of_tokens(payload[f"{side}_vocab"]) for side in ("source", "target"))
        )
        model = build_model(vocabs, settings)
        model.load_state_dict(payload["model"])
        source_kind, target_kind = payload["kinds"]
        return cls(model, *vocabs, settings, text, (source_kind, target_kind))

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
            translator = cls.of(checkpoints.load(path, device))
        translator.model.to(device)
        return translator

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
        wanted = [tokenized(pair, self.kinds)[1] for pair in pairs]
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

"""A training in a folder: checkpoints, validation, TensorBoard, and going on after a stop."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.data.corpus import Corpus, TextSettings
from bahdanau_fast.seq2seq.data.pairs import Batch, Pairs, Vocabs, batches
from bahdanau_fast.seq2seq.extras import require
from bahdanau_fast.seq2seq.model import checkpoints
from bahdanau_fast.seq2seq.model.checkpoints import BEST, LAST
from bahdanau_fast.seq2seq.model.settings import METRICS, Settings, build_model
from bahdanau_fast.seq2seq.search.translator import Translator, settings_of, vocabs_of
from bahdanau_fast.seq2seq.training import trainer
from bahdanau_fast.seq2seq.training.trainer import ALONE, History, Progress, Trainer, World

# Most pairs that a validation translates; the validation loss is that of all pairs.
_TRANSLATED = 1000


class Run:
    """One training in the folder ``out``; of several processes only that of rank 0 writes.

    With ``resume``, ``settings`` and ``text`` must be those of :meth:`settings_of`, except for more
    epochs. ``save_every`` are the steps between checkpoints within an epoch, 0: none. ``best`` is
    the validation of the epoch in ``best.pt``.
    """

    def __init__(
        self,
        out: Path,
        settings: Settings,
        text: TextSettings,
        *,
        world: World = ALONE,
        resume: bool = False,
        save_every: int = 0,
        tensorboard: bool = False,
    ) -> None:
        self.out, self.settings, self.text = out, settings, text
        self.world, self.save_every = world, save_every
        self.corpus = Corpus.of(text)
        validated = self.corpus.parts.validation
        if validated:
            require("sacrebleu", "BLEU needs")
        payload = checkpoints.load(out / LAST) if resume else None
        with checkpoints.fitting(out / LAST):
            vocabs = None if payload is None else self._continued(payload)
        self.pairs = self.corpus.encode(self.corpus.parts.train, text, vocabs)
        vocabs = Vocabs(self.pairs.source_vocab, self.pairs.target_vocab)
        self.validated = self.corpus.encode(validated, text, vocabs) if validated else None
        self.best = checkpoints.last_validation(out / BEST) if resume else None
        model = build_model(vocabs, settings).to(world.device)
        self.translator = Translator(model, *vocabs, settings, text, self.corpus.kinds)
        self.trainer = Trainer(
            model, settings, trainer.total_steps(self.pairs, settings, world), world
        )
        if payload is not None:
            with checkpoints.fitting(out / LAST):
                self.trainer.load_state_dict(payload)
        self.board = None
        if tensorboard and world.rank == 0:
            require("tensorboard", "--tensorboard needs")
            from torch.utils.tensorboard import SummaryWriter

            # Drop the scalars of steps that are repeated after a resume.
            done = len(self.history.losses)
            self.board = SummaryWriter(str(out / "tensorboard"), purge_step=done)

    def _continued(self, payload: dict[str, Any]) -> Vocabs:
        """The vocabularies of a training to resume; its data and processes must be the same."""
        if payload["digest"] != self.corpus.digest:
            actual = f"{self.text.data or 'dates'} (changed since)"
            checks.reject(ValueError, "data", "be the data of the training to resume", actual)
        if payload["processes"] != self.world.size:
            need = f"equal those of the training to resume, {payload['processes']}"
            checks.reject(ValueError, "processes", need, self.world.size)
        return vocabs_of(payload)

    @staticmethod
    def settings_of(out: Path) -> tuple[Settings, TextSettings]:
        """The settings of the training in a folder."""
        with checkpoints.fitting(out / LAST):
            return settings_of(checkpoints.load(out / LAST))

    @property
    def history(self) -> History:
        """Losses and validations so far."""
        return self.trainer.history

    def train(self, *, progress: bool = True, file: TextIO | None = None) -> History:
        """Train to the last epoch; ``out`` holds a loadable checkpoint from the first step on."""
        first, done = self.world.rank == 0, len(self.history.losses)
        if first:
            self.out.mkdir(parents=True, exist_ok=True)
            if done == 0:
                self._save(LAST)
                (self.out / BEST).unlink(missing_ok=True)  # of the training that is replaced
                self.best = None
        with closing(Progress(self.trainer, progress and first, file)) as show:
            for epoch, batch in trainer.all_batches(self.pairs, self.settings, done, self.world):
                self.trainer.step(batch)
                show.update(epoch)
                if first:
                    self._after_step(epoch, show)
        if self.board is not None:
            self.board.close()
        return self.history

    def _after_step(self, epoch: int, show: Progress) -> None:
        history, done = self.history, len(self.history.losses)
        self._scalars(
            "train",
            loss=history.losses[-1],
            tokens_per_second=history.tokens[-1] / history.seconds[-1],
            learning_rate=float(self.trainer.schedule.get_last_lr()[0]),
        )
        if self.trainer.epoch_ended and self.validated is not None:
            result = self._validate(epoch, self.validated)
            better = self.best is None or self._rank(result) > self._rank(self.best)
            if better:
                self._save(BEST)
                self.best = result
            show.say(f"  validation: {described(result)}{'; the best so far' if better else ''}")
        if self.trainer.epoch_ended or (self.save_every and done % self.save_every == 0):
            self._save(LAST)

    def _rank(self, validation: Mapping[str, float]) -> tuple[float, ...]:
        """Greater is better; the loss decides between equal scores: first epochs have BLEU 0."""
        metric, loss = self.settings.best_metric, -validation["loss"]
        return (loss,) if metric == "loss" else (validation[metric], loss)

    def _validate(self, epoch: int, encoded: Pairs) -> dict[str, Any]:
        """Loss, BLEU and chrF of this epoch, added to the history."""
        loss = validation_loss(self.trainer, encoded)
        if not math.isfinite(loss):
            at = f"{loss} after epoch {epoch + 1} (a lower lr may help)"
            checks.reject(ValueError, "the validation loss", "be finite", at)
        pairs = self.corpus.parts.validation
        if len(pairs) > _TRANSLATED:  # the same ones in every epoch
            pairs = random.Random(0).sample(pairs, _TRANSLATED)
        translations = self.translator.translate([source for source, _ in pairs])
        scores = self.translator.score(pairs, translations).corpus
        result = {"epoch": epoch + 1, "loss": loss, "bleu": scores.bleu, "chrf": scores.chrf}
        self.history.validations.append(result)
        self._scalars("validation", **{name: result[name] for name in METRICS})
        return result

    def _scalars(self, group: str, **values: float) -> None:
        """Numbers for TensorBoard, where it is wanted."""
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(f"{group}/{name}", value, len(self.history.losses))

    def _save(self, name: str) -> None:
        payload = {
            "settings": dataclasses.asdict(self.settings),
            "text": dataclasses.asdict(self.text),
            "kinds": list(self.corpus.kinds),
            "digest": self.corpus.digest,
            "processes": self.world.size,
            "source_vocab": list(self.pairs.source_vocab.tokens),
            "target_vocab": list(self.pairs.target_vocab.tokens),
            **self.trainer.state_dict(),
        }
        checkpoints.save(payload, self.out / name)


def described(validation: Mapping[str, float]) -> str:
    """Metrics of the validation set as text."""
    texts = {"loss": trainer.plain(validation["loss"])}
    texts |= {name: f"{validation[name]:.2f}" for name in METRICS if name != "loss"}
    return ", ".join(f"{METRICS[name]} {text}" for name, text in texts.items())


@torch.no_grad()
def validation_loss(trained: Trainer, pairs: Pairs) -> float:
    """Mean cross-entropy per target token: all pairs, evaluation mode, teacher forcing."""
    trained.model.eval()
    losses: list[Tensor] = []
    for batch in batches(pairs, 256, seed=0):
        moved = Batch(*(tensor.to(trained.world.device) for tensor in batch))
        losses.append(trained.loss(moved) * batch.target.shape[1])
    trained.model.train()
    return float(torch.stack(losses).sum()) / int(pairs.tensors.target_lens.sum())

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
from bahdanau_fast.seq2seq.search.scoring import require_sacrebleu
from bahdanau_fast.seq2seq.search.translator import Translator, settings_of, vocabs_of
from bahdanau_fast.seq2seq.training.trainer import (
    ALONE,
    History,
    Progress,
    Trainer,
    World,
    all_batches,
    plain,
    total_steps,
)

__all__ = ["Run", "described"]

# Most pairs that a validation translates; the validation loss is that of all pairs.
_TRANSLATED = 1000


class Run:
    """One training, from its data to its checkpoints.

    Of several processes only that of rank 0 validates, writes and prints.

    Args:
        out: folder of the checkpoints.
        settings: of the model and its training.
        text: of the data.
        world: the processes that train together.
        resume: continue from the last checkpoint in ``out``; then ``settings`` and ``text`` must be
            those of :meth:`settings_of`, except for more epochs.
        save_every: steps between checkpoints within an epoch; 0: only at the end of each epoch.
        tensorboard: write scalars to ``out/tensorboard``.

    Attributes:
        best: the validation of the epoch in ``best.pt``; None before the first.
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
            require_sacrebleu()
        payload = checkpoints.load(out / LAST) if resume else None
        with checkpoints.fitting(out / LAST):
            vocabs = None if payload is None else self._continued(payload)
        self.pairs = self.corpus.encode(self.corpus.parts.train, text, vocabs)
        vocabs = Vocabs(self.pairs.source_vocab, self.pairs.target_vocab)
        self.validated = self.corpus.encode(validated, text, vocabs) if validated else None
        self.best = self._held() if resume else None
        model = build_model(vocabs, settings).to(world.device)
        self.translator = Translator(model, *vocabs, settings, text, self.corpus.kinds)
        self.trainer = Trainer(model, settings, total_steps(self.pairs, settings, world), world)
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

    def _held(self) -> dict[str, Any] | None:
        """The validation of the epoch in ``best.pt``."""
        best = self.out / BEST
        with checkpoints.fitting(best):
            return checkpoints.load(best)["validations"][-1] if best.is_file() else None

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
        """Train to the last epoch; ``out`` holds a loadable checkpoint from the first step on.

        Lines of progress go to ``file``, the standard output unless given.
        """
        first, done = self.world.rank == 0, len(self.history.losses)
        if first:
            self._begin(done)
        with closing(Progress(self.trainer, progress and first, file)) as show:
            for epoch, batch in all_batches(self.pairs, self.settings, done, self.world):
                self.trainer.step(batch)
                show.update(epoch)
                if first:
                    self._after_step(epoch, show)
        if self.board is not None:
            self.board.close()
        return self.history

    def _begin(self, done: int) -> None:
        """Bring the folder into its state before the next step."""
        self.out.mkdir(parents=True, exist_ok=True)
        if done == 0:
            self._save(LAST)
            (self.out / BEST).unlink(missing_ok=True)  # of the training that is replaced
            self.best = None

    def _after_step(self, epoch: int, show: Progress) -> None:
        done = len(self.history.losses)
        self._scalars(done)
        if self.trainer.epoch_ended:
            if self.validated is not None:
                result = self._validate(epoch, self.validated, done)
                chosen = "; the best so far" if self._keep_best() else ""
                show.say(f"  validation: {described(result)}{chosen}")
            self._save(LAST)
        elif self.save_every and done % self.save_every == 0:
            self._save(LAST)

    def _validate(self, epoch: int, encoded: Pairs, done: int) -> dict[str, Any]:
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
        if self.board is not None:
            for name in METRICS:
                self.board.add_scalar(f"validation/{name}", result[name], done)
        return result

    def _keep_best(self) -> bool:
        """Write ``best.pt`` if the last epoch is better; True if it is."""
        last = self.history.validations[-1]
        metric = self.settings.best_metric
        better = self.best is None or goodness(last, metric) > goodness(self.best, metric)
        if better:
            self._save(BEST)
            self.best = last
        return better

    def _scalars(self, done: int) -> None:
        if self.board is None:
            return
        history = self.history
        speed = history.tokens[-1] / history.seconds[-1]
        self.board.add_scalar("train/loss", history.losses[-1], done)
        self.board.add_scalar("train/tokens_per_second", speed, done)
        self.board.add_scalar("train/learning_rate", self.trainer.schedule.get_last_lr()[0], done)

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
    """Metrics of the validation set as text.

    >>> described({"epoch": 2, "loss": 2.1712, "bleu": 22.084, "chrf": 19.75})
    'loss 2.171, BLEU 22.08, chrF 19.75'
    """
    return ", ".join(
        f"{written} {plain(validation[name]) if name == 'loss' else f'{validation[name]:.2f}'}"
        for name, written in METRICS.items()
    )


def goodness(validation: Mapping[str, float], metric: str) -> tuple[float, ...]:
    """Sort key of epochs, greater is better; the loss decides between equal scores.

    BLEU is 0 in the first epochs of many trainings: without the loss the first would be kept.

    >>> goodness({"loss": 2.0, "bleu": 0.0}, "bleu") < goodness({"loss": 1.5, "bleu": 0.0}, "bleu")
    True
    """
    loss = -validation["loss"]
    return (loss,) if metric == "loss" else (validation[metric], loss)


@torch.no_grad()
def validation_loss(trainer: Trainer, pairs: Pairs) -> float:
    """Mean cross-entropy per target token: all pairs, evaluation mode, teacher forcing."""
    trainer.model.eval()
    losses: list[Tensor] = []
    for batch in batches(pairs, 256, seed=0):
        moved = Batch(*(tensor.to(trainer.world.device) for tensor in batch))
        losses.append(trainer.loss(moved) * batch.target.shape[1])
    trainer.model.train()
    return float(torch.stack(losses).sum()) / int(pairs.tensors.target_lens.sum())

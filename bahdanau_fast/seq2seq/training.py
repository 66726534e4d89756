"""Teacher forcing with masked cross-entropy."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bahdanau_fast.seq2seq.data import BOS, Batch, Pairs, batches
from bahdanau_fast.seq2seq.decoders import Seq2SeqAttentionDecoder
from bahdanau_fast.seq2seq.models import EncoderDecoder, Seq2SeqEncoder, init_xavier

__all__ = ["History", "Settings", "Trainer", "build_model", "masked_cross_entropy", "train"]


@dataclass(frozen=True)
class Settings:
    """Everything a training depends on besides its data.

    Attributes:
        embed_size: E.
        num_hiddens: H.
        num_layers: L.
        dropout: on the attention weights and between layers.
        cell: "gru" or "lstm".
        epochs: passes over the data.
        batch_size: B.
        lr: learning rate of Adam at its highest; it falls to a twentieth along a cosine.
        clip: largest norm of the gradient.
        seed: of weights, batches and dropout.
    """

    embed_size: int = 32
    num_hiddens: int = 128
    num_layers: int = 1
    dropout: float = 0.0
    cell: str = "gru"
    epochs: int = 3
    batch_size: int = 128
    lr: float = 3e-3
    clip: float = 1.0
    seed: int = 0


@dataclass
class History:
    """What a training leaves behind, one entry per step.

    Attributes:
        losses: cross-entropy per target token.
        seconds: wall time of the step.
        tokens: target tokens read.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Over all steps; 0 before the first."""
        return sum(self.tokens) / sum(self.seconds) if self.seconds else 0.0


def build_model(pairs: Pairs, settings: Settings) -> EncoderDecoder:
    """A new model for these vocabularies, its weights decided by ``settings.seed``."""
    sizes = (settings.embed_size, settings.num_hiddens, settings.num_layers)
    options = (settings.dropout, settings.cell)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        encoder = Seq2SeqEncoder(len(pairs.source_vocab), *sizes, *options)
        decoder = Seq2SeqAttentionDecoder(len(pairs.target_vocab), *sizes, *options)
        return EncoderDecoder(encoder, decoder).apply(init_xavier)


def masked_cross_entropy(logits: Tensor, labels: Tensor, valid_lens: Tensor) -> Tensor:
    """Cross-entropy of the valid positions, averaged over all T steps of each sample.

    Args:
        logits: (B,T,vocab).
        labels: (B,T) tokens.
        valid_lens: (B,); later positions count as zero.

    Returns:
        Loss (B,).

    >>> logits = torch.zeros(1, 4, 2)
    >>> loss = masked_cross_entropy(logits, torch.zeros(1, 4).long(), torch.tensor([2]))
    >>> bool(loss.isclose(torch.tensor(2.0).log() / 2))  # half the steps count, log 2 each
    True
    """
    per_token = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    valid = torch.arange(labels.shape[1], device=labels.device) < valid_lens.unsqueeze(1)
    return (per_token * valid).mean(1)


def shift_right(target: Tensor) -> Tensor:
    """Decoder input for teacher forcing: (B,T) with <bos> in front, the last token gone."""
    first = torch.full_like(target[:, :1], BOS)
    return torch.cat((first, target[:, :-1]), dim=1)


class Trainer:
    """A model, its optimizer and its learning-rate schedule, one batch at a time.

    Args:
        model: returns (logits, state).
        settings: learning rate and clipping.
        total_steps: the length of the schedule.
    """

    def __init__(self, model: nn.Module, settings: Settings, total_steps: int) -> None:
        self.model = model.train()
        self.clip = settings.clip
        self.optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, step / total_steps))),
        )
        self.history = History()

    def step(self, batch: Batch) -> float:
        """Learn from one batch.

        Args:
            batch: source and target.

        Returns:
            Loss per target token, before the update.
        """
        start = time.perf_counter()
        source, source_lens, target, target_lens = batch
        self.optimizer.zero_grad(set_to_none=True)
        logits, _ = self.model(source, shift_right(target), source_lens)
        total = masked_cross_entropy(logits, target, target_lens).sum()
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.schedule.step()
        tokens = int(target_lens.sum())
        loss = float(total.detach()) * target.shape[1] / tokens
        self.history.losses.append(loss)
        self.history.seconds.append(time.perf_counter() - start)
        self.history.tokens.append(tokens)
        return loss


def total_steps(pairs: Pairs, settings: Settings) -> int:
    """Steps of a whole training."""
    return settings.epochs * math.ceil(len(pairs) / settings.batch_size)


def all_batches(pairs: Pairs, settings: Settings) -> Iterator[tuple[int, Batch]]:
    """(epoch, batch) of a whole training, in the order the seed decides."""
    for epoch in range(settings.epochs):
        for batch in batches(pairs, settings.batch_size, settings.seed, epoch):
            yield epoch, batch


def train(model: nn.Module, pairs: Pairs, settings: Settings, *, progress: bool = True) -> History:
    """Train for ``settings.epochs``; the same settings and data give the same losses.

    Args:
        model: changed in place.
        pairs: what to learn.
        settings: see :class:`Settings`.
        progress: show a bar with loss and tokens/s on a terminal, else a line per epoch.

    Returns:
        Loss, time and tokens of every step.
    """
    steps = total_steps(pairs, settings)
    trainer = Trainer(model, settings, steps)
    show = Progress(steps, settings.epochs, trainer.history, enabled=progress)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # dropout
        for epoch, batch in all_batches(pairs, settings):
            trainer.step(batch)
            show.update(epoch)
    show.close()
    return trainer.history


class Progress:
    """A tqdm bar on a terminal; elsewhere (a log, or no tqdm) one line per epoch.

    Args:
        steps: of the whole training.
        epochs: of the whole training.
        history: read for loss and tokens/s.
        enabled: False shows nothing.
    """

    def __init__(self, steps: int, epochs: int, history: History, *, enabled: bool = True) -> None:
        self.steps, self.epochs, self.history, self.enabled = steps, epochs, history, enabled
        self.bar = None
        if enabled and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            # A recorded terminal may say it has no columns or rows: tqdm would draw nothing.
            columns = min(100, shutil.get_terminal_size().columns or 80)
            self.bar = tqdm(total=steps, unit="step", desc="training", ncols=columns, nrows=24)

    def update(self, epoch: int) -> None:
        """One more step is done.

        Args:
            epoch: the one it belongs to, from 0.
        """
        done = len(self.history.losses)
        if self.bar is not None:
            if done % 5 == 0 or done == self.steps:
                self.bar.set_postfix_str(self._figures(), refresh=False)
            self.bar.update()
        elif self.enabled and done == self.steps * (epoch + 1) // self.epochs:
            print(f"epoch {epoch + 1}/{self.epochs}  {self._figures()}", flush=True)

    def _figures(self) -> str:
        recent = self.history.losses[-20:]
        speed = sum(self.history.tokens[-20:]) / sum(self.history.seconds[-20:])
        return f"loss {sum(recent) / len(recent):.2e}  {speed:,.0f} tokens/s"

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self.bar is not None:
            self.bar.close()

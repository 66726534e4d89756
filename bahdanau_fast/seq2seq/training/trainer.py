"""Teacher forcing with masked cross-entropy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.data.pairs import BOS, Batch, Pairs, batches
from bahdanau_fast.seq2seq.model.settings import History, Settings
from bahdanau_fast.seq2seq.training.distributed import World, shard, total
from bahdanau_fast.seq2seq.training.progress import Progress

__all__ = ["Trainer", "all_batches", "masked_cross_entropy", "shift_right", "total_steps", "train"]

CHUNK = 2**20  # logits that fit the caches of a CPU


def masked_cross_entropy(
    logits: Tensor, labels: Tensor, valid_lens: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy of the valid positions, averaged over all T steps of each sample.

    Args:
        logits: (B,T,vocab).
        labels: (B,T) tokens.
        valid_lens: (B,); later positions count as zero.
        label_smoothing: probability spread evenly over all tokens.

    Returns:
        Loss (B,).

    >>> logits = torch.zeros(1, 4, 2)
    >>> loss = masked_cross_entropy(logits, torch.zeros(1, 4).long(), torch.tensor([2]))
    >>> bool(loss.isclose(torch.tensor(2.0).log() / 2))  # half the steps count, log 2 each
    True
    """
    # One row per token: with the vocabulary in the middle, as in the course, the softmax of a large
    # vocabulary takes several times as long and copies all logits. On the CPU a chunk of rows at a
    # time, which takes half the time, since what backward needs of a loss stays in the caches.
    rows = max(1, CHUNK // logits.shape[-1]) if logits.is_cpu else max(1, labels.numel())
    per_token = torch.cat(
        [
            F.cross_entropy(chosen, truth, reduction="none", label_smoothing=label_smoothing)
            for chosen, truth in zip(
                logits.flatten(0, 1).split(rows), labels.flatten().split(rows), strict=True
            )
        ]
    ).view_as(labels)
    valid = torch.arange(labels.shape[1], device=labels.device) < valid_lens.unsqueeze(1)
    return (per_token * valid).mean(1)


def shift_right(target: Tensor) -> Tensor:
    """Decoder input for teacher forcing: (B,T) with <bos> in front, without the last token."""
    first = torch.full_like(target[:, :1], BOS)
    return torch.cat((first, target[:, :-1]), dim=1)


class Trainer:
    """A model, its optimizer and its learning-rate schedule, one batch at a time.

    Args:
        model: returns (logits, state); it is on the device of ``world``.
        settings: learning rate, clipping, smoothing, precision and the seed of dropout.
        total_steps: the length of the schedule.
        world: the processes that train together; each sees its rows of every batch.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, total_steps: int, world: World | None = None
    ) -> None:
        self.model, self.settings, self.world = model.train(), settings, world or World()
        self.total_steps = total_steps
        # All gradients are summed at once, when the last step of the decoder has given its share.
        self.net = DistributedDataParallel(model) if self.world.size > 1 else model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.history = History()

    def _rate(self, step: int) -> float:
        if self.settings.schedule == "constant":
            return 1.0
        return 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, step / self.total_steps)))

    def step(self, batch: Batch) -> float:
        """Train on one batch.

        Args:
            batch: source and target, of all processes together.

        Returns:
            Loss per target token, before the update.

        Raises:
            ValueError: the loss is not finite; the model is unchanged.
        """
        start = time.perf_counter()
        batch = Batch(*(tensor.to(self.world.device) for tensor in shard(batch, self.world)))
        self.optimizer.zero_grad(set_to_none=True)
        with self._drawing():
            summed = self.loss(batch, self.settings.label_smoothing)
            # DDP takes the mean over the processes; the loss is a sum over the whole batch.
            (summed * self.world.size).backward()
        tokens = batch.target_lens.sum()
        sums = torch.stack((summed.detach().double() * batch.target.shape[1], tokens.double()))
        loss_sum, token_sum = total(sums, self.world).tolist()
        loss: float = loss_sum / max(token_sum, 1.0)
        if not math.isfinite(loss):
            at = f"{loss} at step {len(self.history.losses) + 1} (a lower lr may help)"
            checks.reject(ValueError, "the loss", "be finite", at)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.schedule.step()
        self.history.losses.append(loss)
        self.history.seconds.append(time.perf_counter() - start)
        self.history.tokens.append(int(token_sum))
        return loss

    def loss(self, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        """Loss summed over the batch, averaged over all T steps of each row; autocast with bf16."""
        source, source_lens, target, target_lens = batch
        device = self.world.device.type
        net = self.net if self.model.training else self.model  # only one process validates
        with _autocast(device, self.settings.bf16):
            logits, _ = net(source, shift_right(target), source_lens)
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        return masked_cross_entropy(logits, target, target_lens, label_smoothing).sum()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Seed dropout by seed, step and rank, so that a resumed training repeats it."""
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        step = len(self.history.losses)
        with torch.random.fork_rng(devices=devices):
            seed = (self.settings.seed * 1_000_003 + step) * self.world.size + self.world.rank
            torch.manual_seed(seed % 2**63)
            yield

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings for :meth:`load_state_dict`."""
        history = self.history
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "losses": torch.tensor(history.losses, dtype=torch.float64),
            "seconds": torch.tensor(history.seconds, dtype=torch.float64),
            "tokens": torch.tensor(history.tokens, dtype=torch.long),
            "validations": history.validations,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another trainer with the same settings."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for name in ("losses", "seconds", "tokens"):
            getattr(self.history, name)[:] = state[name].tolist()
        self.history.validations[:] = state["validations"]


@contextmanager
def _autocast(device: str, bf16: bool) -> Iterator[None]:
    """Autocast to bfloat16 where asked for.

    Torch 2.13 asks oneDNN for its LSTM in bfloat16 also on processors where that has none; there
    it does without oneDNN.
    """
    mkldnn = torch.backends.mkldnn
    without = (
        bf16
        and device == "cpu"
        and mkldnn.is_available()
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    with (
        torch.autocast(device, torch.bfloat16, enabled=bf16),
        mkldnn.flags(enabled=False) if without else nullcontext(),
    ):
        yield


def steps_per_epoch(pairs: Pairs, settings: Settings, world: World | None = None) -> int:
    """Steps of one pass over the data; a step takes ``batch_size`` pairs per process."""
    return math.ceil(len(pairs) / (settings.batch_size * (world or World()).size))


def total_steps(pairs: Pairs, settings: Settings, world: World | None = None) -> int:
    """Steps of a whole training."""
    return settings.epochs * steps_per_epoch(pairs, settings, world)


def all_batches(
    pairs: Pairs, settings: Settings, start: int = 0, world: World | None = None
) -> Iterator[tuple[int, Batch]]:
    """(epoch, batch) of a whole training, in the order given by the seed.

    Args:
        pairs: the training data.
        settings: epochs, batch size and seed.
        start: number of steps to skip.
        world: its processes share each batch.
    """
    first, inside = divmod(start, steps_per_epoch(pairs, settings, world))
    size = settings.batch_size * (world or World()).size
    for epoch in range(first, settings.epochs):
        order = batches(pairs, size, settings.seed, epoch)
        for batch in islice(order, inside if epoch == first else 0, None):
            yield epoch, batch


def train(
    model: nn.Module,
    pairs: Pairs,
    settings: Settings,
    *,
    progress: bool = True,
    trainer: Trainer | None = None,
    show: Progress | None = None,
    after_step: Callable[[int, bool], None] | None = None,
) -> History:
    """Train for ``settings.epochs``; the same settings and data give the same losses.

    Args:
        model: changed in place.
        pairs: the training data.
        settings: see :class:`Settings`.
        progress: show a bar with loss and tokens/s on a terminal, else a line per epoch.
        trainer: of the model, to resume or to train with several processes.
        show: a bar or lines of the caller, instead of ``progress``.
        after_step: called with the epoch, and whether that was its last step.

    Returns:
        Loss, time and tokens of every step.
    """
    trainer = trainer or Trainer(model, settings, total_steps(pairs, settings))
    steps, world = trainer.total_steps, trainer.world
    show = show or Progress(steps, settings.epochs, trainer.history, enabled=progress)
    per_epoch = steps_per_epoch(pairs, settings, world)
    for epoch, batch in all_batches(pairs, settings, len(trainer.history.losses), world):
        trainer.step(batch)
        show.update(epoch)
        if after_step is not None:
            after_step(epoch, len(trainer.history.losses) % per_epoch == 0)
    show.close()
    return trainer.history

"""Teacher forcing with masked cross-entropy, in one process or those that torchrun starts."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bahdanau_fast import checks
from bahdanau_fast.seq2seq.data.pairs import BOS, Batch, Pairs, batches
from bahdanau_fast.seq2seq.model.settings import Settings

CHUNK = 2**20  # logits that fit the caches of a CPU
_SILENCE = 60.0  # the most seconds without a line where there is no bar


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
    chunks = zip(logits.flatten(0, 1).split(rows), labels.flatten().split(rows), strict=True)
    losses = [
        F.cross_entropy(*c, reduction="none", label_smoothing=label_smoothing) for c in chunks
    ]
    valid = torch.arange(labels.shape[1], device=labels.device) < valid_lens.unsqueeze(1)
    return (torch.cat(losses).view_as(labels) * valid).mean(1)


@dataclass(frozen=True)
class World:
    """Rank and number of the processes that train together, and the device of this one."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009  it cannot be changed


ALONE = World()
"""One process, on the CPU."""


@contextmanager
def join(device: str) -> Iterator[World]:
    """Join the processes of ``torchrun``, if any: gloo on the CPU, NCCL on a GPU for each."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=torch.device(device))
        return
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield World(dist.get_rank(), size, torch.device(device))
    finally:
        time.sleep(0.1)  # gloo's threads let go of the last tensors: pytorch/pytorch#190489
        dist.destroy_process_group()


def shard(batch: Batch, world: World) -> Batch:
    """The rows of one process, every ``size``-th, as wide as the whole batch."""
    if world.rank < len(batch.source):
        return Batch(*(tensor[world.rank :: world.size] for tensor in batch))
    # There are fewer rows than processes: a row of length 0 adds nothing to a loss.
    source, source_lens, target, target_lens = (tensor[:1] for tensor in batch)
    return Batch(source, source_lens, target, torch.zeros_like(target_lens))


@dataclass
class History:
    """Steps (loss per target token, wall time, target tokens) and epochs of a training."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)  # epoch, loss, bleu, chrf

    @property
    def tokens_per_second(self) -> float:
        """Over all steps; 0 before the first."""
        return sum(self.tokens) / sum(self.seconds) if self.seconds else 0.0


class Trainer:
    """A model, its optimizer and its learning-rate schedule, one batch at a time.

    Args:
        model: returns (logits, state); it is on the device of ``world``.
        settings: learning rate, clipping, smoothing, precision and the seed of dropout.
        total_steps: the length of the schedule.
        world: the processes that train together; each sees its rows of every batch.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, total_steps: int, world: World = ALONE
    ) -> None:
        self.model, self.settings, self.world = model.train(), settings, world
        self.total_steps = total_steps
        self.net = DistributedDataParallel(model) if world.size > 1 else model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.history = History()

    def _rate(self, step: int) -> float:
        if self.settings.schedule == "constant":
            return 1.0
        return 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, step / self.total_steps)))

    @property
    def epoch_ended(self) -> bool:
        """Whether the last step was that of an epoch."""
        return len(self.history.losses) % (self.total_steps // self.settings.epochs) == 0

    def step(self, batch: Batch) -> float:
        """Train on one batch of all processes together; the loss per target token before it.

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
        if self.world.size > 1:
            dist.all_reduce(sums)
        loss_sum, token_sum = sums.tolist()
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
        shifted = F.pad(target[:, :-1], (1, 0), value=BOS)
        net = self.net if self.model.training else self.model  # only one process validates
        with _autocast(self.world.device.type, self.settings.bf16):
            logits, _ = net(source, shifted, source_lens)
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
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "losses": torch.tensor(self.history.losses, dtype=torch.float64),
            "seconds": torch.tensor(self.history.seconds, dtype=torch.float64),
            "tokens": torch.tensor(self.history.tokens, dtype=torch.long),
            "validations": self.history.validations,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another trainer with the same settings."""
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        for name in ("losses", "seconds", "tokens"):
            getattr(self.history, name)[:] = state[name].tolist()
        self.history.validations[:] = state["validations"]


@contextmanager
def _autocast(device: str, bf16: bool) -> Iterator[None]:
    """Autocast to bfloat16 with ``bf16``."""
    mkldnn = torch.backends.mkldnn
    # Torch 2.13 wants oneDNN's LSTM in bfloat16 also on processors where that has none.
    lacks = bf16 and device == "cpu" and mkldnn.is_available()
    lacks = lacks and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with (
        torch.autocast(device, torch.bfloat16, enabled=bf16),
        mkldnn.flags(enabled=False) if lacks else nullcontext(),
    ):
        yield


def total_steps(pairs: Pairs, settings: Settings, world: World = ALONE) -> int:
    """Steps of a whole training; a step takes ``batch_size`` pairs per process."""
    return settings.epochs * math.ceil(len(pairs) / (settings.batch_size * world.size))


def all_batches(
    pairs: Pairs, settings: Settings, start: int = 0, world: World = ALONE
) -> Iterator[tuple[int, Batch]]:
    """(epoch, batch) of a whole training from step ``start`` on, in the order given by the seed."""
    first, inside = divmod(start, total_steps(pairs, settings, world) // settings.epochs)
    for epoch in range(first, settings.epochs):
        order = batches(pairs, settings.batch_size * world.size, settings.seed, epoch)
        for batch in islice(order, inside if epoch == first else 0, None):
            yield epoch, batch


def plain(loss: float) -> str:
    """A loss without an exponent: three decimals, and more where it is near zero.

    >>> plain(4.1239), plain(0.0312), plain(0.000123), plain(0.0)
    ('4.124', '0.031', '0.00012', '0.000')
    """
    digits = 3 if loss == 0 else max(3, 1 - math.floor(math.log10(abs(loss))))
    return f"{loss:.{digits}f}"


class Progress:
    """A tqdm bar on a terminal; otherwise lines in ``file``, at least one an epoch and a minute."""

    def __init__(self, trainer: Trainer, enabled: bool = True, file: TextIO | None = None) -> None:
        self.trainer, self.enabled, self.file = trainer, enabled, file or sys.stdout
        self.bar, self._said = None, time.monotonic()
        if enabled and sys.stderr.isatty():
            with suppress(ImportError):
                from tqdm import tqdm

                # A recorded terminal may report zero columns or rows: tqdm would draw nothing.
                size = {"ncols": min(100, shutil.get_terminal_size().columns or 80), "nrows": 24}
                done, steps = len(trainer.history.losses), trainer.total_steps
                self.bar = tqdm(total=steps, initial=done, unit="step", desc="training", **size)

    def update(self, epoch: int) -> None:
        """Count one more step, of an epoch from 0."""
        epochs, steps = self.trainer.settings.epochs, self.trainer.total_steps
        if self.bar is not None:
            self.bar.set_postfix_str(self._figures(20), refresh=False)
            self.bar.update()
        elif self.trainer.epoch_ended:
            self.say(f"epoch {epoch + 1}/{epochs}  {self._figures(steps // epochs)}")
        elif time.monotonic() - self._said > _SILENCE:
            done = len(self.trainer.history.losses)
            self.say(f"step {done:,} of {steps:,}  {self._figures(20)}")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._said = time.monotonic()
        if self.bar is not None:
            self.bar.write(line, file=self.file)
        elif self.enabled:
            print(line, file=self.file, flush=True)

    def _figures(self, steps: int) -> str:
        """Means over the last ``steps`` steps."""
        history = self.trainer.history
        recent, seconds = history.losses[-steps:], history.seconds[-steps:]
        speed = sum(history.tokens[-steps:]) / sum(seconds)
        return f"loss {plain(sum(recent) / len(recent))}  {speed:,.0f} tokens/s"

    def close(self) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()


def train(model: nn.Module, pairs: Pairs, settings: Settings, *, progress: bool = True) -> History:
    """Train ``model`` in place; the same settings and data give the same losses.

    ``progress`` shows a bar with loss and tokens/s on a terminal, elsewhere a line per epoch.

    Returns:
        Loss, time and tokens of every step.
    """
    trainer = Trainer(model, settings, total_steps(pairs, settings))
    with closing(Progress(trainer, progress)) as show:
        for epoch, batch in all_batches(pairs, settings):
            trainer.step(batch)
            show.update(epoch)
    return trainer.history

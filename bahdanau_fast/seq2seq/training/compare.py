"""Losses and times of the same training on several backends, measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import islice

import torch

from bahdanau_fast import backends
from bahdanau_fast.modules import AdditiveAttention
from bahdanau_fast.seq2seq.data.pairs import Pairs
from bahdanau_fast.seq2seq.model.settings import Settings, build_model
from bahdanau_fast.seq2seq.training.trainer import Trainer, all_batches, total_steps

__all__ = ["attention_seconds", "compare_training", "relative_difference"]


def compare_training(
    pairs: Pairs, settings: Settings, names: Sequence[str], steps: int
) -> dict[str, Trainer]:
    """Train one model per backend from the same seed on the same batches, taking turns.

    Every backend takes a step before any takes the next one, in alternating order, so that other
    load on the machine affects all of them alike. A repeated name is run once.
    """
    schedule = total_steps(pairs, settings)
    trainers = {name: Trainer(build_model(pairs, settings), settings, schedule) for name in names}
    order = list(trainers.items())
    for _, batch in islice(all_batches(pairs, settings), steps):
        for name, trainer in order:
            with backends.use(name):
                trainer.step(batch)
        order.reverse()
    return trainers


def relative_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest ``|a - b| / |b|`` of two loss curves.

    >>> relative_difference([1.0, 2.0], [1.0, 2.5])
    0.2
    """
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def attention_seconds(
    names: Sequence[str], batch: int, keys_len: int, hidden: int, steps: int, rounds: int = 15
) -> dict[str, float]:
    """Seconds of a decoder's attention alone, forward and backward, without its recurrent net.

    One round projects the keys (B,Tk,H) once, attends ``steps`` times with one query, and goes
    back. Backends take turns; the median of the rounds is taken, after two to warm up.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attention = AdditiveAttention(hidden, hidden, hidden)
        keys = torch.randn(batch, keys_len, hidden, requires_grad=True)
        queries = torch.randn(steps, batch, 1, hidden, requires_grad=True)

    def once() -> None:
        memory = attention.memory(keys)
        contexts = [attention.attend(query, memory) for query in queries]
        torch.stack(contexts).sum().backward()

    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 2):
        for name, times in taken.items():
            with backends.use(name):
                start = time.perf_counter()
                once()
                times.append(time.perf_counter() - start)
    return {name: statistics.median(times[2:]) for name, times in taken.items()}

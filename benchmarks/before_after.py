"""Whole training steps of the translator, in this tree and in an older commit.

``python -m benchmarks.before_after BASE`` builds the commit as :mod:`benchmarks.compare` does. Both
versions run the same trainings on made-up dates, each in a process of its own, and take turns step
by step: the training of the demo, of ``train`` with its defaults, and with the course's settings.
First the losses are compared, without dropout, since versions may draw different masks.
``--json OUT`` keeps the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bahdanau_fast.seq2seq.data import dates
from bahdanau_fast.seq2seq.data.pairs import Pairs
from bahdanau_fast.seq2seq.model.settings import TRAINING, Settings, build_model
from bahdanau_fast.seq2seq.training.trainer import Trainer, all_batches

from .compare import NEW, OLD, Side, build, started
from .printing.tables import markdown, milliseconds
from .timing.machine import save
from .timing.measure import interleave
from .timing.worker import ROOT, WorkerError

TRAININGS = {
    "the demo": Settings(),
    "`train`": TRAINING,
    "`train`, the course's settings": Settings(
        num_hiddens=32, num_layers=2, dropout=0.1, batch_size=64, lr=5e-3, schedule="constant"
    ),
}
SOURCE = f"{__package__}.before_after"  # __name__ differs when run as a program
BATCHES = 20
COMPARED, PARITY = 10, 1e-4  # steps, and the relative difference of their losses


def training_step(name: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A function that takes the next step, and the losses of the first steps without dropout."""
    settings = TRAININGS[name]
    examples, _ = dates.split(BATCHES * settings.batch_size, 1, settings.seed)
    pairs = Pairs.of([(example.text, example.iso) for example in examples])
    batches = [batch for _, batch in islice(all_batches(pairs, settings), BATCHES)]

    def trainer(of: Settings) -> Trainer:
        return Trainer(build_model(pairs, of), of, BATCHES)

    compared = trainer(replace(settings, dropout=0.0, embed_dropout=0.0))
    for batch in batches[:COMPARED]:
        compared.step(batch)
    timed, following = trainer(settings), cycle(batches)
    return lambda: timed.step(next(following)), {"losses": compared.history.losses}


def compare(sides: dict[str, Side], seconds: float) -> list[dict[str, Any]]:
    """Seconds of a step in both versions, for every training.

    Raises:
        WorkerError: a version cannot train.
        RuntimeError: the losses of the versions differ.
    """
    rows = []
    for name, settings in TRAININGS.items():
        with started(sides) as workers:
            losses = {
                side: worker.make(SOURCE, training_step.__name__, name)["losses"]
                for side, worker in workers.items()
            }
            for old, new in zip(losses[OLD], losses[NEW], strict=True):
                if not abs(new - old) <= PARITY * abs(old):
                    raise RuntimeError(f"{name}: losses differ: {losses}")
            timings = interleave(dict(workers), seconds)
        ratio = asdict(timings.ratio(OLD, NEW))
        found = {"settings": asdict(settings), "seconds": timings.packed(), "ratio": ratio}
        rows.append({"training": name, **found})
    return rows


def lines(run: dict[str, Any]) -> list[str]:
    """A table, as Markdown."""
    cells = []
    for row in run["rows"]:
        times = (milliseconds(row["seconds"][side]["median"]) for side in (OLD, NEW))
        ratio = "{median:.2f}x ({p20:.2f}-{p80:.2f})".format(**row["ratio"])
        cells.append([row["training"], *times, ratio])
    return markdown(["training", "before (ms)", "after (ms)", "before / after"], cells)


def main() -> int:
    """Compare and print; 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="benchmarks.before_after", description=__doc__)
    parser.add_argument("base", help="a git commit, branch or tag")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing per training")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    try:
        sides = {OLD: build(options.base), NEW: Side("working tree", ROOT)}
        rows = compare(sides, options.seconds)
    except (ValueError, WorkerError) as error:
        print(f"before_after: {error}", file=sys.stderr)
        return 2
    run = {"old": sides[OLD].name, "rows": rows}
    print("\n".join(lines(run)))
    save(options.json, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())

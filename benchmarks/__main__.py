"""``python -m benchmarks`` measures every table, prints it, and keeps the figures as JSON.

A call is timed only after its result has been checked.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .cases import Case, cases, draw
from .contestants import Provider, Unavailable, registry
from .contestants.parity import Oracle, Verdict, checked_call
from .machine import machine, rows_text, slug
from .measure import interleave
from .page import of_machine
from .tables import row_table
from .worker import Worker, WorkerError

READ, READ_BYTES = "DRAM read", 768 << 20  # of a buffer far larger than the caches
EAGER_BYTES = 5e8  # above which eager code takes too much memory


@dataclass
class Runner:
    """Measures cases one after the other.

    A context manager: its end ends the processes of the providers that have one.
    """

    providers: Sequence[Provider] = registry.PROVIDERS
    seconds: float = 0.1  # of a row, per provider
    min_rounds: int = 5
    _workers: dict[str, Worker] = field(default_factory=dict)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        while self._workers:
            self._workers.popitem()[1].__exit__()

    def row(self, case: Case) -> dict[str, Any]:
        """Measure a case: as it is written in JSON, without ``seconds`` if a result is wrong."""
        calls, verdicts = dict[str, Callable[[], Any]](), dict[str, Verdict]()
        packed: dict[str, Any] = {"table": case.table, "shape": vars(case.shape)}
        packed |= {"task": case.task, "mode": case.mode, "skipped": {}}
        inputs = draw(case.shape)
        inputs.require_grad(True)
        oracle = Oracle(inputs, case.shape, case.task, case.mode == "train")
        with torch.set_grad_enabled(case.mode != "forward"):
            for provider in self.providers:
                named = {provider.name, provider.group} & set(case.extra)
                if case.task not in provider.builders or (provider.on_demand and not named):
                    continue
                try:
                    call, verdicts[provider.name] = self._checked(provider, case, oracle)
                    calls[provider.name] = call
                except (Unavailable, WorkerError) as error:
                    packed["skipped"][provider.name] = str(error)
            packed["parity"] = {name: vars(verdict) for name, verdict in verdicts.items()}
            if not calls or not all(verdict.passed for verdict in verdicts.values()):
                return packed | {"seconds": {}}
            buffer = torch.ones(READ_BYTES // 4 if case.task == "scan" else 0)
            calls |= {READ: buffer.sum} if len(buffer) else {}
            timings = interleave(calls, case.share * self.seconds * len(calls), self.min_rounds)
        packed["seconds"] = timings.packed()
        if READ in calls:  # the best rate of the rounds: the others were disturbed
            rate = buffer.nbytes / min(timings.samples[READ])
            packed["dram_read"] = {"bytes_per_second": rate, "reader": "torch.sum"}
        return packed

    def _checked(
        self, provider: Provider, case: Case, oracle: Oracle
    ) -> tuple[Callable[[], Any], Verdict]:
        """A call and its verdict; in a process of its own, a wrong one leaves itself out alone."""
        eager = provider.group == "eager" or (provider.group, case.mode) == ("compiled", "train")
        if eager and (size := 4 * case.shape.features) > EAGER_BYTES:
            raise Unavailable(f"(B,Tq,Tk,H) is {size / 1e9:.1f} GB")
        if provider.process is None:
            return oracle.checked(provider)
        if provider.name not in self._workers:
            self._workers[provider.name] = Worker(dict(provider.process))
        worker = self._workers[provider.name]
        given = registry.__name__, provider.name, case.task, case.shape, case.mode
        verdict: Verdict = worker.make(checked_call, *given)
        if not verdict.passed:
            raise Unavailable(f"its {verdict.where} differs: {verdict.worst:.3g} of the allowed")
        return worker, verdict


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 if a result is wrong, 2 for wrong use."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", metavar="NAME", default="", help="tables or shapes whose name contains NAME"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="for the figures")
    options = parser.parse_args(arguments)
    wanted = cases(options.only)
    if not wanted:
        parser.error(f"--only must name a table or a shape, got {options.only!r}")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
    start, where = time.perf_counter(), machine()
    for name, value in where.items():
        print(f"{name:<14} {value}")
    rows: list[dict[str, Any]] = []
    with Runner() as runner:
        for table, group in itertools.groupby(wanted, key=lambda case: case.table):
            done = [runner.row(case) for case in group]
            title = f"{table}; ms, median (p20-p80)"
            print("\n".join(["", title, "", *row_table(done)]), flush=True)
            rows += done
    run = {"machine": where, "seconds": time.perf_counter() - start, "rows": rows}
    print("\n".join(of_machine(run)))
    wrong = sum(not all(found["passed"] for found in row["parity"].values()) for row in rows)
    print(f"{wrong} rows failed parity; {run['seconds']:.0f} s")
    file = options.out / f"{slug(where)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(rows_text(run), encoding="utf-8")
    print(f"wrote {file}; python -m benchmarks.page writes the page")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

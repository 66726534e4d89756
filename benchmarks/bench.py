"""How a row of the tables is measured: built, checked against fp64, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import host
from .cases import Case, draw
from .contestants import registry
from .contestants.baselines import Unavailable
from .contestants.parity import Oracle, Verdict, build_in
from .contestants.provider import Provider, eager_too_large
from .measure import MemoryRead, interleave
from .tables import Packed
from .worker import Worker, WorkerError

READ = "DRAM read"


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
            self._workers.popitem()[1].close()

    def row(self, case: Case) -> Packed:
        """Measure a case: as it is written in JSON, without ``seconds`` if a result is wrong."""
        if case.table == "host":
            worker = self._worker("host", OMP_NUM_THREADS="1")
            return host.row_in(worker, case, self.seconds, self.min_rounds)
        calls: dict[str, Callable[[], Any]] = {}
        skipped: dict[str, str] = {}
        verdicts: dict[str, Verdict] = {}
        inputs = draw(case.shape)
        inputs.require_grad(True)
        oracle = Oracle(inputs, case.shape, case.task, case.mode == "train")
        packed = {
            "table": case.table,
            "shape": vars(case.shape),
            "task": case.task,
            "mode": case.mode,
            "skipped": skipped,
        }
        with torch.set_grad_enabled(case.mode != "forward"):
            for provider in self.providers:
                reason = _why_not(provider, case)
                if reason is not None:
                    if reason:
                        skipped[provider.name] = reason
                    continue
                try:
                    call, verdicts[provider.name] = self._checked(provider, case, oracle)
                except (Unavailable, WorkerError) as error:
                    skipped[provider.name] = str(error)
                    continue
                calls[provider.name] = call
            packed["parity"] = {name: vars(verdict) for name, verdict in verdicts.items()}
            if not calls or not all(verdict.passed for verdict in verdicts.values()):
                return packed | {"seconds": {}}
            read = MemoryRead() if case.task == "scan" else None
            if read is not None:
                calls[READ] = read
            timings = interleave(calls, case.share * self.seconds * len(calls), self.min_rounds)
        packed["seconds"] = timings.packed()
        if read is not None:
            rate = read.bytes_per_second(timings, READ)
            packed["dram_read"] = {"bytes_per_second": rate, "reader": "torch.sum"}
        return packed

    def _checked(
        self, provider: Provider, case: Case, oracle: Oracle
    ) -> tuple[Callable[[], Any], Verdict]:
        """A call and its verdict; in a process of its own, a wrong one leaves itself out alone."""
        if provider.process is None:
            return oracle.checked(provider, case.task, case.mode == "train")
        worker = self._worker(provider.name, **dict(provider.process))
        given = (provider.name, case.task, case.shape, case.mode)
        verdict = build_in(worker, registry.__name__, *given)
        if not verdict.passed:
            raise Unavailable(f"its {verdict.where} differs: {verdict.worst:.3g} of the allowed")
        return worker, verdict

    def _worker(self, name: str, **extra: str) -> Worker:
        """The process of that name, which has these variables in its environment."""
        if name not in self._workers:
            self._workers[name] = Worker(extra)
        return self._workers[name]


def _why_not(provider: Provider, case: Case) -> str | None:
    """Why a provider is not run in a row: "" if the row is not for it, None if it is run."""
    meant = not provider.on_demand or {provider.name, provider.group} & set(case.extra)
    if case.task not in provider.builders or not meant:
        return ""
    allocates = provider.group == "eager" or (provider.group == "compiled" and case.mode == "train")
    return eager_too_large(case.shape) if allocates else None

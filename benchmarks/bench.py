"""How a row of the tables is measured: built, checked against fp64, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .contestants import peers
from .contestants.baselines import Unavailable
from .contestants.parity import Oracle, Verdict, build_in
from .contestants.providers import PROVIDERS, Provider, eager_too_large
from .timing.measure import MemoryRead, Spread, Timings, interleave
from .timing.worker import Worker, WorkerError
from .workloads.shapes import SUBJECT, Bound, Case, draw

READ = "DRAM read"


@dataclass(frozen=True)
class Row:
    """The measurements of one case.

    Attributes:
        timings: None if a provider failed parity, or none could be built.
        groups: group of each provider that was timed.
        skipped: why other providers were not run.
        verdicts: parity of each provider.
        roof: bytes that are read per second, if the row has a bound on it.
    """

    case: Case
    timings: Timings | None
    groups: dict[str, str]
    skipped: dict[str, str]
    verdicts: dict[str, Verdict]
    roof: float | None = None

    def packed(self) -> dict[str, Any]:
        """The row as ``bench`` writes it in JSON."""
        case = self.case
        packed: dict[str, Any] = {
            "table": case.table,
            "shape": vars(case.shape),
            "task": case.task,
            "mode": case.mode,
            "skipped": self.skipped,
            "parity": {name: vars(verdict) for name, verdict in self.verdicts.items()},
            "seconds": {} if self.timings is None else self.timings.packed(),
        }
        if self.roof is not None:
            packed["dram_read"] = {"bytes_per_second": self.roof, "reader": "torch.sum"}
        packed["bounds"] = [self.check(bound) for bound in case.bounds]
        return packed

    def check(self, bound: Bound) -> dict[str, Any]:
        """A bound with the rival and the figure found; None if it could not be measured."""
        rival, found = self._found(bound.against)
        holds = found is not None and found.median >= bound.at_least
        return {**vars(bound), "rival": rival, "found": found and vars(found), "holds": holds}

    def _found(self, against: str) -> tuple[str, Spread | None]:
        subject = SUBJECT[self.case.task]
        if self.timings is None or subject not in self.timings.samples:
            return "not measured", None
        if against == "DRAM" and self.roof is not None:
            time, moved = self.timings.time(subject), self.case.shape.memory_bytes
            rates = (moved / seconds for seconds in (time.median, time.p80, time.p20))
            return READ, Spread(*(rate / self.roof for rate in rates))
        groups = ("eager", "compiled") if against == "baseline" else (against,)
        rivals = [n for n in self.timings.samples if n == against or self.groups[n] in groups]
        if not rivals:
            return f"{against}: not measured", None
        rival = self.timings.fastest(rivals)
        return rival, self.timings.ratio(rival, subject)


@dataclass
class Runner:
    """Measures cases one after the other.

    A context manager: its end ends the processes of the providers that have one.
    """

    providers: Sequence[Provider] = (*PROVIDERS, *peers.PROVIDERS)
    seconds: float = 0.1  # of a row, per provider
    min_rounds: int = 5
    _workers: dict[str, Worker] = field(default_factory=dict)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        while self._workers:
            self._workers.popitem()[1].close()

    def row(self, case: Case) -> Row:
        """Measure a case."""
        train = case.mode == "train"
        inputs = draw(case.shape)
        inputs.require_grad(True)
        oracle = Oracle(inputs, case.shape, case.task, train)
        calls: dict[str, Callable[[], Any]] = {}
        groups: dict[str, str] = {}
        skipped: dict[str, str] = {}
        verdicts: dict[str, Verdict] = {}
        with torch.set_grad_enabled(case.mode != "forward"):
            for provider in self.providers:
                reason = _why_not(provider, case)
                if reason is not None:
                    if reason:
                        skipped[provider.name] = reason
                    continue
                try:
                    if provider.process is None:
                        call, verdict = oracle.checked(provider, case.task, train)
                    else:
                        call, verdict = self._build_elsewhere(provider, case)
                except (Unavailable, WorkerError) as error:
                    skipped[provider.name] = str(error)
                    continue
                verdicts[provider.name] = verdict
                groups[provider.name] = provider.group
                calls[provider.name] = call
            if not calls or not all(verdict.passed for verdict in verdicts.values()):
                return Row(case, None, groups, skipped, verdicts)
            read = MemoryRead() if case.task == "scan" else None
            if read is not None:
                calls[READ], groups[READ] = read, "roof"
            timings = interleave(calls, case.share * self.seconds * len(calls), self.min_rounds)
        roof = read and read.bytes_per_second(timings, READ)
        return Row(case, timings, groups, skipped, verdicts, roof)

    def _build_elsewhere(self, provider: Provider, case: Case) -> tuple[Worker, Verdict]:
        """Build in the provider's own process; a wrong result leaves out this provider alone."""
        if provider.name not in self._workers:
            self._workers[provider.name] = Worker(dict(provider.process or ()))
        worker = self._workers[provider.name]
        given = (provider.name, case.task, case.shape, case.mode)
        verdict = build_in(worker, peers.__name__, *given)
        if not verdict.passed:
            raise Unavailable(f"its {verdict.where} differs: {verdict.worst:.3g} of the allowed")
        return worker, verdict


def _why_not(provider: Provider, case: Case) -> str | None:
    """Why a provider is not run in a row: "" if the row is not for it, None if it is run."""
    # A provider on demand runs only where the case asks for it, or for its group.
    meant = not provider.on_demand or {provider.name, provider.group} & set(case.extra)
    if case.task not in provider.builders or not meant:
        return ""
    allocates = provider.group == "eager" or (provider.group == "compiled" and case.mode == "train")
    return eager_too_large(case.shape) if allocates else None

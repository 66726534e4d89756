"""Measures rows: checks parity, then times all providers of the row in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..contestants import peers
from ..contestants.baselines import Unavailable
from ..contestants.parity import Oracle, Verdict, family
from ..contestants.providers import PROVIDERS, Provider, eager_too_large
from ..workloads.shapes import SUBJECT, Bound, Case, Inputs, Shape, draw
from .measure import Spread, Timings, interleave, prepare
from .roofs import Bandwidth, Reader
from .worker import Worker, WorkerError

SECONDS_PER_PROVIDER = 0.1
READ = "DRAM read"


@dataclass(frozen=True)
class Row:
    """The measurements of one case.

    Attributes:
        timings: None if a provider failed parity, or none could be built.
        groups: group of each provider that was timed.
        skipped: why other providers were not run.
        verdicts: parity of each provider.
        roof: the read bandwidth, if the row has a bound on it.
        spent: seconds to compile, check and time all providers.
    """

    case: Case
    timings: Timings | None
    groups: dict[str, str]
    skipped: dict[str, str]
    verdicts: dict[str, Verdict]
    roof: Bandwidth | None = None
    spent: float = 0.0

    def packed(self) -> dict[str, Any]:
        """The row as ``bench`` writes it in JSON."""
        case, subject = self.case, SUBJECT[self.case.task]
        packed: dict[str, Any] = {
            "table": case.table,
            "shape": vars(case.shape),
            "task": case.task,
            "mode": case.mode,
            "spent": self.spent,
            "skipped": self.skipped,
            "parity": {name: vars(verdict) for name, verdict in self.verdicts.items()},
            "seconds": {},
            "ratio_to_ours": {},
        }
        if self.timings is not None:
            packed["rounds"] = self.timings.rounds
            for name in self.timings.samples:
                packed["seconds"][name] = vars(self.timings.time(name))
                if subject in self.timings.samples:
                    packed["ratio_to_ours"][name] = vars(self.timings.ratio(name, subject))
        if self.roof is not None:
            packed["dram_read"] = vars(self.roof)
        packed["bounds"] = [
            {
                "against": bound.against,
                "at_least": bound.at_least,
                "rival": found.rival,
                "found": None if found.found is None else vars(found.found),
                "holds": found.holds,
            }
            for bound in case.bounds
            for found in (check(self, bound),)
        ]
        return packed

    @property
    def failed(self) -> dict[str, Verdict]:
        return {name: verdict for name, verdict in self.verdicts.items() if not verdict.passed}

    def rivals(self, against: str) -> list[str]:
        """The timed providers that a bound names."""
        timed = self.timings.samples if self.timings else {}
        return [
            name
            for name in timed
            if (against == "baseline" and self.groups[name] in ("eager", "compiled"))
            or against in (name, self.groups[name])
        ]


@dataclass(frozen=True)
class Check:
    """A bound and the figure found; None if the figure could not be measured."""

    bound: Bound
    rival: str
    found: Spread | None

    @property
    def holds(self) -> bool:
        return self.found is not None and self.found.median >= self.bound.at_least


def check(row: Row, bound: Bound) -> Check:
    """Compare a row with a bound."""
    subject = SUBJECT[row.case.task]
    if row.timings is None or subject not in row.timings.samples:
        return Check(bound, "not measured", None)
    if bound.against == "DRAM":
        return Check(bound, "DRAM read", _share(row, subject))
    rivals = row.rivals(bound.against)
    if not rivals:
        return Check(bound, f"{bound.against}: not measured", None)
    rival = row.timings.fastest(rivals)
    return Check(bound, rival, row.timings.ratio(rival, subject))


def _share(row: Row, subject: str) -> Spread | None:
    if row.timings is None or row.roof is None:
        return None
    rate, time = row.roof.bytes_per_second, row.timings.time(subject)
    moved = row.case.shape.memory_bytes
    return Spread(*(moved / seconds / rate for seconds in (time.median, time.p80, time.p20)))


@dataclass
class Runner:
    """Measures cases one after the other; cases of the same shape share inputs and oracles.

    A context manager: its end ends the processes of the providers that have one.
    """

    providers: Sequence[Provider] = (*PROVIDERS, *peers.PROVIDERS)
    seconds: float = SECONDS_PER_PROVIDER
    min_rounds: int = 5
    _rows: dict[tuple[Any, ...], Row] = field(default_factory=dict)
    _shape: Shape | None = None
    _inputs: Inputs | None = None
    _oracles: dict[tuple[str, bool], Oracle] = field(default_factory=dict)
    _reader: Reader | None = None
    _workers: dict[str, Worker] = field(default_factory=dict)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        while self._workers:
            self._workers.popitem()[1].close()

    def row(self, case: Case) -> Row:
        """Measure a case, or return the measurements of a case with the same key."""
        found = self._rows.get(case.key)
        if found is None:
            start = time.perf_counter()
            found = self._measure(case)
            found = replace(found, spent=time.perf_counter() - start)
            self._rows[case.key] = found
        return replace(found, case=case)

    def _measure(self, case: Case) -> Row:
        train = case.mode == "train"
        inputs = self._draw(case.shape)
        oracle = self._oracle(case.task, train)
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
                        verdict, call = self._build(provider, case, inputs, oracle)
                    else:
                        verdict, call = self._build_elsewhere(provider, case)
                except (Unavailable, WorkerError) as error:
                    skipped[provider.name] = str(error)
                    continue
                verdicts[provider.name] = verdict
                groups[provider.name] = provider.group
                calls[provider.name] = call
            if not calls or not all(verdict.passed for verdict in verdicts.values()):
                return Row(case, None, groups, skipped, verdicts)
            roof = None
            if case.task == "scan":
                self._reader = self._reader or Reader()
                roof = self._reader.measure()
                calls[READ], groups[READ] = self._reader.readers[roof.reader], "roof"
            timings = interleave(calls, case.share * self.seconds * len(calls), self.min_rounds)
        if self._reader is not None and roof is not None:
            # The roof is the best rate before, during or after the timed rounds.
            between = 4 * self._reader.buffer.numel() / min(timings.samples[READ])
            rates = (roof, Bandwidth(between, roof.reader), self._reader.measure())
            roof = max(rates, key=lambda rate: rate.bytes_per_second)
        return Row(case, timings, groups, skipped, verdicts, roof)

    def _build(
        self, provider: Provider, case: Case, inputs: Inputs, oracle: Oracle
    ) -> tuple[Verdict, Callable[[], Any]]:
        train = case.mode == "train"
        runnable = provider.build(case.task, inputs)
        if case.task == "again":
            runnable.forward()  # the checked call must not be the first on its keys
        verdict = oracle.check(runnable, provider.group, train)
        return verdict, prepare(runnable, train, inputs.grad_context)

    def _build_elsewhere(self, provider: Provider, case: Case) -> tuple[Verdict, Callable[[], Any]]:
        """The same in the provider's own process; a wrong result leaves out this provider alone."""
        for each in self.providers:  # all together, since starting takes seconds
            new = each.process is not None and each.name not in self._workers
            if new and case.task in each.builders and _is_meant(each, case):
                self._workers[each.name] = Worker(dict(each.process or ()))
        worker = self._workers[provider.name]
        verdict = worker.build(peers.__name__, provider.name, case.task, case.shape, case.mode)
        if not verdict.passed:
            raise Unavailable(f"its {verdict.where} differs: {verdict.worst:.3g} of the allowed")
        return verdict, worker

    def _draw(self, shape: Shape) -> Inputs:
        if shape != self._shape or self._inputs is None:
            self._oracles, self._inputs = {}, None  # frees the old tensors first
            self._shape, self._inputs = shape, draw(shape)
            self._inputs.require_grad(True)
        return self._inputs

    def _oracle(self, task: str, train: bool) -> Oracle:
        for gradients in (True, False):
            oracle = self._oracles.get((family(task), gradients))
            if oracle is not None and gradients >= train:
                return oracle
        if self._inputs is None or self._shape is None:
            raise RuntimeError("no inputs have been drawn")
        oracle = Oracle(self._inputs, self._shape, task, train)
        self._oracles[family(task), train] = oracle
        return oracle


def _is_meant(provider: Provider, case: Case) -> bool:
    """False for a provider that runs on demand, where the case does not ask for it."""
    return not provider.on_demand or bool({provider.name, provider.group} & set(case.extra))


def _why_not(provider: Provider, case: Case) -> str | None:
    """Why a provider is not run in a row: "" if the row is not for it, None if it is run."""
    if case.task not in provider.builders or not _is_meant(provider, case):
        return ""
    if provider.group == "eager":
        return eager_too_large(case.shape)
    if provider.group == "compiled" and case.mode == "train" and eager_too_large(case.shape):
        return eager_too_large(case.shape)
    return None

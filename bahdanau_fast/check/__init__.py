"""Compares the results of every backend with those of plain PyTorch: ``bahdanau-fast check``.

On a GPU each family of kernels is tried in a process of its own, so that a hang is a line, and what
is wrong has a name by which it is switched off.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from bahdanau_fast import backends, switches
from bahdanau_fast.backends import availability
from bahdanau_fast.check.children import OVER, Row, lines
from bahdanau_fast.check.families import FAMILIES, compiled, rows
from bahdanau_fast.check.machine import gpu, may_have_gpu, versions
from bahdanau_fast.check.problems import CASES, attention, in_words, worst

__all__ = ["check"]

# Seconds from the start by which all families are tried; without an answer after which one hangs;
# in which Triton compiles what they take, all at once.
SECONDS, SILENCE, COMPILING = 50.0, 20.0, 20.0
# The compute capability from which on there are clusters.
_CLUSTERS = (9, 0)


def check(report: str | None = None) -> bool:
    """Print the parity of every available backend; True if all are within the rule.

    A GPU is asked in forks of this process, which must not have used it.

    Args:
        report: a file to write all of it to as JSON; "-" is the standard output, and what is
            printed goes to the standard error then.

    Raises:
        OSError: the file cannot be written.
    """
    start, out = time.monotonic(), sys.stderr if report == "-" else sys.stdout
    if report not in (None, "-"):
        Path(report).touch()  # what cannot be written is said before any work

    def say(text: str) -> None:
        print(text, file=out, flush=True)

    say("largest error of outputs and gradients, as a share of what the parity rule allows")
    say(f"{'family':<15}{'dtype':<10}{'case':<31}{'ours':>8}{'eager':>8}   worst in")
    gpus = [*lines([gpu], start + SECONDS, SILENCE)] if may_have_gpu() else []
    tried: list[Row] = []
    for row in _tried(gpus, start + SECONDS):
        tried.append(row)
        say(_line(row))
    wrong, passed = _wrong(tried), not any(map(_is_bad, tried))
    if wrong:
        for name in wrong:
            what, instead = switches.SWITCHES[name]
            say(f"wrong here: {name}: {what}; without it: {instead}")
        off = ",".join(sorted({*wrong, *switches.OFF}))
        say(f"{switches.VARIABLE}={off} switches off; --json FILE writes a report of all of this")
    if any(row.get("ended") == OVER for row in tried):
        say(f"not all was tried in {SECONDS:g} s: once more, Triton keeps what it has compiled")
    say("PASS" if passed else "FAIL")
    if report is not None:
        content = {
            **versions(),
            "gpu": gpus[0] if gpus else None,
            "off": sorted(switches.OFF),
            "rows": tried,
            "wrong": wrong,
            "passed": passed,
            "seconds": round(time.monotonic() - start, 1),
        }
        finite = json.loads(json.dumps(content), parse_constant=lambda x: str(float(x)))
        text = json.dumps(finite, indent=1) + "\n"  # JSON has no infinity
        if report == "-":
            sys.stdout.write(text)
        else:
            Path(report).write_text(text, encoding="utf-8")
    return passed


def _tried(gpus: Sequence[Row], until: float) -> Iterator[Row]:
    """A row for all that is tried, and for what is not: the families of a GPU, then the CPU."""
    has = gpus[0] if gpus else {}
    if "ended" in has:
        yield {"family": "gpu", **has}
    elif has:
        why = {name: _why_not(name, has) for name in FAMILIES}
        tried = [name for name in ("triton", "terms", "waves") if why[name] is None]
        dtypes = {(n, experiment.dtype) for n in tried for experiment in FAMILIES[n].experiments}
        compiles = [partial(compiled, name, dtype) for name, dtype in dtypes]
        for _ in lines(compiles, min(time.monotonic() + COMPILING, until)):
            pass  # what does not compile is raised again
        for name in FAMILIES:
            if why[name] is None:
                yield from _family(name, until)
            else:
                yield {"family": name, "unchecked": why[name]}
    yield from _on_cpu(with_gpu=bool(has))


def _why_not(name: str, has: Row) -> str | None:
    """What keeps a family from being tried on a GPU, or None."""
    backend = FAMILIES[name].backend
    problem: str | None = switches.why_off(name) or has["why_not"][backend]
    if problem is None and backend == "triton" and availability.interpreted():
        return "TRITON_INTERPRET=1 has it on the CPU"
    if problem is None and name == "clusters" and tuple(has["capability"]) < _CLUSTERS:
        return "this GPU has none"
    return problem


def _family(name: str, until: float) -> Iterator[Row]:
    """Its experiments in a process of its own; the one that it ended in, if it did."""
    current: Row = {}
    for row in lines([partial(rows, name)], until, SILENCE):
        if "begun" in row:
            current = {"family": name, "case": row["case"], "dtype": row["dtype"]}
        else:
            yield {"family": name, **current, **row}


def _on_cpu(with_gpu: bool) -> Iterator[Row]:
    """Every backend that serves the CPU, and the others that are not there."""
    available = backends.available()
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
    on_cpu = {"cpu", "reference", *(["triton"] if availability.interpreted() else ())}
    for name in available:
        for dtype in dtypes[name == "triton" :]:  # which has no fp64
            for case in CASES if name in on_cpu else ():
                row = {"family": name, "case": case.name, "dtype": in_words(dtype)}
                ours, eager, label = worst(attention(case), name, dtype, "cpu")
                yield {**row, "ours": ours, "eager": eager, "worst": label}
    for name in backends.BACKENDS:
        if name not in available and not (with_gpu and name in FAMILIES):
            yield {"family": name, "unchecked": backends.why_not(name)}


def _line(row: Row) -> str:
    if "unchecked" in row:
        return f"{row['family']:<15}not checked: {row['unchecked']}"
    line = f"{row['family']:<15}{row.get('dtype', ''):<10}{row.get('case', ''):<31}"
    if "ours" in row:
        line += f"{row['ours']:>8.3f}{row['eager']:>8.3f}   {row['worst']}"
    elif "absent" in row:
        return f"{line}  not this way here: {row['absent']}"
    else:
        line = f"{line}  {row.get('raised') or row['ended']}"
    return f"{line}  FAIL" if _is_bad(row) else line


def _is_bad(row: Row) -> bool:
    return "raised" in row or "ended" in row or not row.get("ours", 0.0) <= 1.0


def _wrong(tried: Sequence[Row]) -> list[str]:
    """The families to switch off: one that is wrong, or the backend if that is, with all of it."""
    bad = {row["family"] for row in tried if _is_bad(row) and row.get("ended") != OVER}
    return [n for n in FAMILIES if n in bad and FAMILIES[n].backend not in bad - {n}]

"""What docs/gpu.md says of GPUs, from the rows that were measured there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from ..tables import markdown, milliseconds
from .rows import Row, digits

# Columns of the tables: who computes what a user calls, and kernels.
USERS = ("own module", "drop-in", "fuse", "AttentionGRU", "no attention")
KERNELS = {
    "cuda": "CUDA C++",
    "triton": "Triton",
    "d2l eager": "d2l",
    "compiled, tuned": "compiled, tuned",
    "expert": "expert",
}
HOSTS = {
    "own module": "own",
    "drop-in, cuda": "CUDA C++",
    "drop-in, triton": "Triton",
    "drop-in, cpu": "ours",
}
MEANS = ("graphed", "compiled")  # what else is done with what a user calls
TRAINING = "course decoder (64, 50 steps, 50 keys, H 512, V 8000), training step, float32 with TF32"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OPEN = "not measured"  # a note with it is shown


def by_call(found: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Rows by what is called and by who computes it."""
    calls: dict[str, dict[str, Row]] = {}
    for row in found:
        who, _, call = row["row"].partition(": ")
        base, _, means = who.rpartition(", ")
        if base in USERS and means in MEANS:
            who, call = base, f"{call}, {means}"
        calls.setdefault(call, {})[who] = row
    return calls


def _felt(row: Row | None) -> str:
    if row is None:
        return ""
    times = (milliseconds(float(row[name]) * 1e-6) for name in ("called", "graph") if row[name])
    return "/".join(times) + ("\\*" if OPEN in row["note"] else "")


def _named_once(calls: Iterable[str]) -> list[str]:
    """Calls, of which those of what came before only say what is done with it."""
    texts, last = [], ""
    for call in calls:
        what, _, rest = call.partition("), ")
        texts.append(rest if what == last else call)
        last = what
    return texts


def users(found: list[Row]) -> list[str]:
    """Milliseconds of what a user calls, /in a graph where it was captured."""
    felt = by_call(row for row in found if row["stage"] == "user" and row["called"])
    felt = {call: of for call, of in felt.items() if USERS[0] in of}
    whos = [who for who in USERS if any(who in of for of in felt.values())]
    cells = [[text, *(_felt(of.get(who)) for who in whos)]
             for text, of in zip(_named_once(felt), felt.values(), strict=True)]  # fmt: skip
    notes = {row["note"]: "" for of in felt.values() for row in of.values() if OPEN in row["note"]}
    lines = [line for note in notes for line in ("", f"\\* {note}.")]
    return [*markdown(["milliseconds", *whos], cells), *lines]


def hosts(found: list[Row]) -> list[str]:
    """Microseconds until a call returns, in one sentence."""
    calls = by_call(row for row in found if row["host"])
    whos = [who for who in HOSTS if any(who in of for of in calls.values())]
    cells = ["/".join(of[who]["host"] if who in of else "-" for who in whos)
             for of in calls.values()]  # fmt: skip
    said = "; ".join(map(" ".join, zip(_named_once(calls), cells, strict=True)))
    columns = "/".join(HOSTS[who] for who in whos)
    return wrapped(f"Until a call returns, microseconds, {columns}: {said}.")


def checks(found: list[Row]) -> str:
    """How many calls were checked, and how far off the worst was."""
    checked = [row for row in found if row["stage"] in ("smoke", "parity")]
    counts = [[int(n) for n in re.findall(r"\d+", row["note"])] for row in checked]
    calls, wrong = (sum(n[i] for n in counts if len(n) > i) for i in (0, 1))
    if not checked:
        return "No call of ours alone was checked."
    worst = max((row["worst"] for row in checked), key=float)
    return f"Of {calls} checked calls {wrong} exceed the parity rule; the worst has {worst} of it."


def device(row: Row | None) -> str:
    """Microseconds in a graph; with ~ those of the kernels of a call that was not captured."""
    time = row and (row["graph"] or row["kernels"])
    return ("" if row["graph"] else "~") + digits(float(time), 3) if row and time else "-"


def kernels(found: list[Row]) -> list[str]:
    """Microseconds in a graph, forward/with backward; where others were timed, of their calls."""
    calls = by_call(row for row in found if row["stage"] in ("time", "rivals"))
    rivals = {call for row in found if row["stage"] == "rivals" for call in by_call([row])}
    calls = {call: of for call, of in calls.items() if call in rivals or not rivals}
    whos = [who for who in KERNELS if any(who in of for of in calls.values())]
    cells: dict[str, list[str]] = {}
    for call, of in calls.items():
        shape, task, way, dtype = call.rsplit(", ", 3)
        if task != "full":  # the library's products are most of that
            label = f"{shape.split()[1]} {SHORT[dtype]}" + (", W_q too" if task == "step" else "")
            times = [device(of.get(who)) for who in whos]
            if way != "forward":
                before = cells.get(label, ["-"] * len(times))
                times = [f"{first}/{both}" for first, both in zip(before, times, strict=True)]
            cells[label] = times
    rows = [[label, *(t if t.strip("-/") else "" for t in of)] for label, of in cells.items()]
    return markdown(["microseconds", *map(KERNELS.__getitem__, whos)], rows) if rows else []


def block(found: list[Row]) -> list[str]:
    """What docs/gpu.md has of a GPU between its marks."""
    checked = [row for row in found if row["stage"] != "lab"]
    felt, report = [row for row in checked if row["stage"] == "user"], checked[0]["where"]
    parts = [wrapped(f"{report}. {checks(found)}")]
    if felt:
        parts.append(users(found))
        other = [part for part in felt[0]["where"].split("; ") if part not in report.split("; ")]
        parts += [wrapped(f"Of this table: {'; '.join(other)}.")] if other else []
        parts.append(hosts(found))
    return [line for part in (*parts, kernels(found)) for line in ("", *part)][1:]


def wrapped(text: str) -> list[str]:
    """Lines of a paragraph."""
    return textwrap.wrap(text, 110, break_on_hyphens=False)

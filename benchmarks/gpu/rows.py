"""What ``make gpu-report`` measured: ``benchmarks/results/*.csv``, a file a GPU, a line a row.

``python -m benchmarks.gpu.rows REPORT.jsonl`` adds the rows of a report of ``make gpu-report``, in
place of those of the same name. A line with # has machine, versions and commit of all rows up to
the next. A row is named as in the report, "who: call". Times are medians in microseconds: until
the result is there, called, from a graph, and from a graph with a cold L2; of all kernels of a call
of ours; of the host alone, until the call returns. ``roof`` is the share of a copy's bandwidth,
``worst`` the error's share of what the parity rule allows. :func:`block` makes tables of them.
"""

import csv
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..tables import RESULTS, markdown, milliseconds
from . import is_wrong

TIMES = ("called", "graph", "cold")
COLUMNS = ("stage", "row", *TIMES, "kernels", "host", "roof", "worst", "note")
COPY = "bytes per second, copy"  # by what a row calls the roof

Row = dict[str, str]  # the columns, and ``where``: the machine


def measured(kind: str = "gpu", folder: Path = RESULTS) -> list[list[Row]]:
    """The rows of each GPU, or with ``cpu`` processor, in the order of their files' names."""
    return [[*read(path).values()] for path in sorted(folder.glob(f"{kind}-*.csv"))]


def read(path: Path) -> dict[str, Row]:
    found, where = dict[str, Row](), ""
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        if line.startswith("# "):
            where = line.removeprefix("# ")
        else:
            row = dict(zip(COLUMNS, next(csv.reader([line])), strict=True))
            found[row["row"]] = row | {"where": where}
    return found


def write(path: Path, found: Iterable[Row]) -> None:
    """The rows of each machine below a line that names it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        for where, of_run in _grouped(found, lambda row: row["where"]).items():
            file.write(f"# {where}\n")
            out.writerows(of_run)


def _grouped(found: Iterable[Any], key: Callable[[Any], str]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return groups


def of_report(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, Row]]:
    """The rows that are figures, by name, for each file's name."""
    runs: list[list[dict[str, Any]]] = []
    for line in lines:
        if line["stage"] == "machine":
            runs.append([line])
        elif line["stage"] != "hour":  # of which are lines around rows
            runs[-1].append(line)
    found: dict[str, dict[str, Row]] = {}
    for machine, *results in runs:
        timed = [r for r in results if not {*TIMES, "host us"}.isdisjoint(r)]
        checked = [r for r in results if "worst" in r and r not in timed]
        kinds = _grouped(checked, lambda r: _kind(r["row"], r["stage"]))
        rate = next((r[COPY] for r in results if COPY in r), 0.0)
        rows = [_timed(r, rate) for r in timed]
        rows += [_checked(name, of) for name, of in kinds.items()]
        of_file, where = found.setdefault(_file(machine), {}), _where(machine, results)
        of_file.update((row["row"], row | {"where": where}) for row in rows)
    return found


def _kind(row: str, stage: str) -> str:
    return f"{row.split(': ', maxsplit=1)[0]}: {stage}, {row.rsplit(', ', maxsplit=1)[-1]}"


def _file(machine: dict[str, Any]) -> str:
    """``gpu-h100.csv``; ``cpu-`` and the processor where it served itself."""
    of_gpu = re.search(r"\b[A-Za-z]*\d+\w*", machine["gpu"])
    if of_gpu:
        return f"gpu-{of_gpu[0].lower()}.csv"
    return f"cpu-{re.sub(r'[^a-z0-9]+', '-', machine['cpu'].lower()).strip('-')}.csv"


def _where(machine: dict[str, Any], results: list[dict[str, Any]]) -> str:
    of_gpu = [machine["gpu"]] if machine["gpu"] != "cpu" else []
    copied = [f"copies {r[COPY] / 1e12:.3g} TB/s" for r in results if COPY in r]
    versions = [f"{name} {machine[name]}" for name in ("torch", "triton") if name in machine]
    cpu = f"{machine['cpu']}, {machine['cores'].split()[0]} cores"
    return "; ".join([*of_gpu, *copied, cpu, *versions, f"commit {machine['commit']}"])


def digits(value: float, count: int = 4) -> str:
    """A number with so many digits that count, and no exponent."""
    return f"{float(f'{value:.{count}g}'):.12g}"


def _timed(result: dict[str, Any], rate: float) -> Row:
    row = dict.fromkeys(COLUMNS, "") | {name: result[name] for name in ("stage", "row")}
    row |= {name: digits(1e6 * result[name]["median"]) for name in TIMES if name in result}
    if "kernels" in result:
        row["kernels"] = digits(sum(n * us for n, us in result["kernels"].values()))
    if rate and "bytes" in result:
        best = result.get("cold", result["called"])["median"]
        row["roof"] = digits(result["bytes"] / rate / best, 3)
    more = {"worst": ("worst", 3), "host": ("host us", 4)}
    row |= {name: digits(result[key], n) for name, (key, n) in more.items() if key in result}
    notes = {"no graph": "no graph" in result, "wrong": is_wrong(result)}
    return row | {"note": ", ".join(note for note, holds in notes.items() if holds)}


def _checked(name: str, results: list[dict[str, Any]]) -> Row:
    """A row for the checks of a stage, backend and dtype, with the worst of them."""
    wrong = sum(not result["passed"] for result in results)
    note = f"{len(results)} calls" + (f", {wrong} wrong" if wrong else "")
    worst = digits(max(result["worst"] for result in results), 3)
    cells = {"stage": results[0]["stage"], "row": name, "note": note, "worst": worst}
    return dict.fromkeys(COLUMNS, "") | cells


# ---- what docs/gpu.md says of them


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
    if not checked:
        return "No call of ours alone was checked."
    counts = [[*map(int, re.findall(r"\d+", row["note"])), 0] for row in checked]
    calls, wrong = (sum(of[i] for of in counts) for i in (0, 1))
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
    return textwrap.wrap(text, 110, break_on_hyphens=False)


def main(report: str, folder: Path = RESULTS) -> None:
    """Add a report's rows to the files of its machines."""
    lines = Path(report).read_text(encoding="utf-8").splitlines()
    for name, found in of_report(map(json.loads, lines)).items():
        path = folder / name
        write(path, ((read(path) if path.exists() else {}) | found).values())
        print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1])

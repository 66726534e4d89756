"""Writes docs/mutants.md from the results of ``make mutants``."""

import json
import sys
import textwrap
from collections import Counter

from planted import BARRIER, MASK, OTHER, SHARE, TAIL
from planted.guards import EXPLAINED, FACTORS, scan

import build

RESULTS = build.ROOT / "benchmarks" / "results" / "mutants.json"
GUARDS = build.ROOT / "benchmarks" / "results" / "guards.json"
PAGE = build.ROOT / "docs" / "mutants.md"
KINDS = (MASK, TAIL, BARRIER, SHARE, OTHER)

HEAD = """# Planted mistakes

Would the suite notice a mistake in a kernel? `make mutants` plants one at a time in a copy of the
tree, builds it, and runs the narrowest tests that should fail. The mistakes and their tests are in
`tests/hardening/planted/`, the results in `benchmarks/results/mutants.json`, from which this
page is written.

{found}

## Kernels and kinds

Killed of planted. A dash: there is nothing of that kind to get wrong (no lengths are looked at, no
division is shared), or it cannot be shown. CPU kernels have no barriers: a task is one thread's,
and the threads of a step have ended before the next begins. The Triton kernels run in the
interpreter, which has one thread and cannot miss a barrier. The CUDA kernels run on the host;
barriers are judged by the PTX machine (ptx.md), which sees a race in any order of the threads.

"""

GUARDED = """
## Guards

The numbers in the kernels' headers that decide on a path, or at which something is cut off, are
found by scanning the sources (`planted/guards.py`); `guards.py` makes each twice and half as large.
The tests look at both sides of each magnitude: queries and keys of one sign and near one size
(`test_cpu_ranges.py`, `test_cuda_ranges.py`). Where they pass, the results keep the parity rule
with the wrong number too, and the reason is given.

{found}

"""


def table(rows):
    """Lines of a Markdown table, the first row its head."""
    first, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return [first, "|---" * len(rows[0]) + "|", *rest]


def cell(text):
    """Code in a cell, on one line."""
    joined = " ".join(text.split()).replace("|", "\\|")
    return f"`{joined}`" if joined else "nothing"


def page(results):
    """The text of docs/mutants.md."""
    rows, where = results["mutants"], results["machine"]
    planted = Counter((row["kernel"], row["kind"]) for row in rows)
    killed = Counter((row["kernel"], row["kind"]) for row in rows if row["verdict"] == "killed")
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows))
    found = (
        f"{killed.total()} of {len(rows)} mutants were killed, in {results['minutes']} minutes: "
        f"{where['cpu']}, cores {where['cores']}, torch {where['torch']}, commit {commits}."
    )
    head = HEAD.format(found=textwrap.fill(found, 100))
    kernels = dict.fromkeys(row["kernel"] for row in rows)

    def count(key):
        return f"{killed[key]}/{planted[key]}" if planted[key] else "–"

    counts = [[kernel, *(count((kernel, kind)) for kind in KINDS)] for kernel in kernels]
    lines = table([["kernel", *KINDS], *counts])
    lines += ["", "## Mutants", ""]
    listed = [
        [
            f"{row['kernel']}: {row['what'] or row['kind']}",
            cell(row["was"]),
            cell(row["became"]),
            f"`{row['by']}`" if row["verdict"] == "killed" else "**survived**",
            str(row["seconds"]),
        ]
        for row in rows
    ]
    lines += table([["mutant", "was", "became", "killed by", "seconds"], *listed])
    return head + "\n".join(lines) + "\n"


def guarded(results):
    """The part of the page on guards."""
    rows, where = {}, results["machine"]
    for row in results["guards"]:
        rows.setdefault(row["guard"], {})[row["became"]] = row
    killed = Counter(row["verdict"] for row in results["guards"])["killed"]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in results["guards"]))
    every = len(FACTORS) * len(scan(build.ROOT))
    found = (
        f"Of {every} wrong guards {len(results['guards'])} were tried and {killed} killed: "
        f"{where['cpu']}, torch {where['torch']}, commit {commits}."
    )

    def told(name, way):
        row = rows[name].get(way)
        if row is None:
            return "not tried yet"
        if row["verdict"] == "killed":
            return f"`{row['by']}`"
        return EXPLAINED.get((name, way), "**survived**")

    lines = [[cell(name), *(told(name, way) for way in FACTORS)] for name in rows]
    text = "\n".join(table([["guard", *FACTORS], *lines]))
    return GUARDED.format(found=textwrap.fill(found, 100)) + text + "\n"


def whole():
    """The text of docs/mutants.md, from the committed results."""
    return page(json.loads(RESULTS.read_text())) + guarded(json.loads(GUARDS.read_text()))


def main():
    """Write the page."""
    PAGE.write_text(whole())
    return 0


if __name__ == "__main__":
    sys.exit(main())

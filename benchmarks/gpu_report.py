"""``make gpu-report``: checks and figures from the GPU at hand, in less than ten minutes.

make has built the kernels. Each stage runs in processes of its own, and each result is a line of
``<gpu>-<date>.jsonl`` as soon as it is there: what fails later costs nothing that was found before.
The stages come in the order of what is learnt from them. No GPU is touched here: one whose driver
hangs hangs a process that is killed.
"""

import argparse
import datetime
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .gpu import EACH, MACHINE, START_SECONDS, Experiment, command, is_wrong, measure
from .gpu.rows import block, of_report
from .tables import RESULTS

SOURCE = f"{__package__}.gpu.stages"

# Seconds that are left to a stage, and processes that share its rows: one where time is taken.
STAGES = {"user": (150, 1), "smoke": (60, 5), "time": (80, 1), "build": (40, 8), "rivals": (60, 1)}
BUILD_SECONDS, MACHINE_SECONDS, TOTAL_SECONDS = 150.0, 40.0, 580.0
THEIRS = ("build", "rivals")  # stages whose rows are not ours


def experiments(stages: Sequence[str], device: str) -> list[Experiment]:
    """A stage may take what those after it do not need."""
    return [
        Experiment(
            stage, math.inf, EACH, (stage, f"{SOURCE}:{stage}", device, part, STAGES[stage][1]),
            beside=STAGES[stage][1] > 1, spare=sum(STAGES[name][0] for name in stages[number:]),
        )
        for number, stage in enumerate(stages, 1)
        for part in range(STAGES[stage][1])
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 2 where there is no GPU, 1 where a row of ours failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--stage", nargs="*", choices=list(STAGES), default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="build included")
    parser.add_argument("--started", type=float, help="when the build began, of the epoch")
    given = parser.parse_args(arguments)
    left = given.seconds - (time.time() - given.started if given.started else 0.0)

    def path(machine: dict[str, Any]) -> Path:
        name = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].split(",")[0].lower()).strip("-")
        out: Path = given.out
        return out / f"{name}-{datetime.date.today().isoformat()}.jsonl"

    # From a cold disk a look can take longer than planned; then the stages have less.
    look = Experiment("machine", 2 * START_SECONDS, MACHINE, (given.device,))
    plan = experiments(given.stage or [*STAGES], given.device)
    rows = measure("gpu-report", look, path, plan, left, max(parts for _, parts in STAGES.values()))
    if rows is None:
        return 2
    for of_file in filter(None, of_report(rows).values()):
        print("\n".join(["", *block([*of_file.values()]), ""]))
    wrong = [row for row in rows if is_wrong(row) and not {row["stage"], row["row"]} & {*THEIRS}]
    print(f"{len(rows)} results, {len(wrong)} of ours not right")
    return 1 if wrong else 0


if __name__ == "__main__":
    command(main)

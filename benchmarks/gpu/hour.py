"""``python -m benchmarks.gpu.hour --out FILE``: nine minutes on a GPU that is there once.

Experiments come the most telling first: what hangs or is wrong, what a user feels, what decides a
constant. ``python -m benchmarks.gpu.decide FILE`` reads what they wrote.
"""

import argparse
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from bahdanau_fast.check.children import say

from ..worker import ROOT
from . import EACH, MACHINE, Experiment, Row, command, is_wrong, measure
from .decide import SWEEPS

SECONDS = 540.0
HERE, LAB, DRY = f"{__package__}.hour", f"{__package__}.lab:constant", "dry_hour"
CUDA, TRITON = "tests/cuda/gpu/test_", "tests/triton/kernels/test_"
FIRST = f"{CUDA}persistent_on_gpu.py"  # it has the first cooperative launch
# Other tests, and how many processes share them: compiling takes most of their time.
PARTS = {
    **{f"{CUDA}{name}.py": 2 for name in ("on_gpu", "graphs")},
    **{f"{TRITON}kernels_parity.py": 4, f"{TRITON}ranges.py": 2, "tests/fuse/test_styles.py": 4},
    **{f"{TRITON}{name}.py": 1 for name in ("compiled", "launches")},
}
PART_SECONDS = 110.0  # of such a process
# Rows of user.py, without those of the chapter's sizes and of compiled code.
FELT = {
    "user, training in float32": ("training step .*float32", 60),
    "user, training in bfloat16": ("training step .*bfloat16", 60),
    "user, host": ("host,", 30),
    "user, decoding": ("greedy decode", 45),
    "user, modules": ("module call|Tacotron step|captioner step", 45),
}


def experiments(dry: bool) -> list[Experiment]:
    """All of them; in a dry run some at a time, and nothing is compiled beforehand."""
    device = "cpu" if dry else "cuda"
    in_triton = [s.constant for s in SWEEPS if any(w.backend == "triton" for w in s.ways.values())]
    tests = [
        Experiment(
            f"{path}, {part + 1} of {count}",
            *(PART_SECONDS, f"{HERE}:suite", (path, PART_SECONDS - 10, dry, part, count), True),
        )
        for path, count in PARTS.items()
        for part in range(1 if dry else count)
    ]
    rows = f"{DRY}:user_rows" if dry else f"{HERE}:felt"
    user = [
        Experiment(name, limit, EACH, ("user", f"{rows}:{pattern}", device))
        for name, (pattern, limit) in FELT.items()
    ]
    mode = "dry" if dry else "timed"
    found = [
        Experiment("machine", 60, MACHINE, (device,)),
        Experiment("check", 60, f"{HERE}:check"),
        Experiment(FIRST, 90, f"{HERE}:suite", (FIRST, 80.0, dry)),
        *tests,
        *(Experiment(f"compile {name}", PART_SECONDS, LAB, (name, "warm"), True)
          for name in in_triton if not dry),
        *user,
        *(Experiment(s.constant, 25, LAB, (s.constant, mode)) for s in SWEEPS),
    ]  # fmt: skip
    if not dry:
        return found
    # It builds the mock runtime.
    found[0] = Experiment("machine", 300, f"{DRY}:machine")
    # The processor serves its tensors, but for those of the lab.
    interpret = (("TRITON_INTERPRET", str(int(e.function == LAB))) for e in found)
    return [
        e._replace(beside=e.name != "machine", variables=(of,))
        for e, of in zip(found, interpret, strict=True)
    ]


# ---- what is run as users and tests run it


def check() -> None:
    from bahdanau_fast.cli import main

    with redirect_stdout(io.StringIO()) as told:
        code = main(["check"])
    text = told.getvalue().splitlines()
    say({"stage": "check", "row": "check", "passed": code == 0, "text": text})


def suite(path: str, seconds: float, dry: bool, part: int = 0, parts: int = 1) -> None:
    """Tests of a file, or each so-many-th; a row for each that fails, and one of all.

    None begins after so many seconds. A dry run collects them.
    """
    import pytest

    end = time.monotonic() + seconds
    counts = dict.fromkeys(("passed", "failed", "skipped", "no time left"), 0)

    class Told:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            items[:] = items[part::parts]
            counts["all"] = len(items)

        def pytest_runtest_setup(self) -> None:
            if time.monotonic() > end:
                pytest.skip("no time left")

        def pytest_runtest_logreport(self, report: Any) -> None:
            outcome = "no time left" if "no time left" in str(report.longrepr) else report.outcome
            counts[outcome] += report.when == "call" or report.outcome != "passed"
            if report.failed:
                text = str(report.longrepr).splitlines()[-30:]
                say({"stage": "test", "row": report.nodeid, "problem": text[-1], "text": text})

    options = ["-v", "-p", "no:cacheprovider", "-m", "not deep"]
    code = pytest.main([path, *options, *(["--collect-only", "-q"] if dry else [])], [Told()])
    say({"stage": "test", "row": path, "part": [part + 1, parts], "tests": counts})
    if code > 1:  # 1: tests failed, which is said
        raise RuntimeError(f"pytest ended with {int(code)}")


def felt(device: str, pattern: str) -> list[Row]:
    from . import user

    s = user.SIZES["chapter"]
    left_out = re.escape(str((s.batch, s.target, s.source, s.hidden)).replace(" ", ""))
    return [
        row
        for row in user.user(device)
        if re.search(pattern, row.name) and not re.search(f"compiled:|{left_out}", row.name)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """2 where there is no GPU, 1 where an experiment did not end well."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.hour", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, as they come")
    parser.add_argument("--dry", action="store_true", help="without a GPU, and without times")
    given = parser.parse_args(arguments)
    commit = ROOT / "commit"  # of the bundle
    if commit.exists():
        os.environ.setdefault("BAHDANAU_FAST_COMMIT", commit.read_text().strip())
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "cuda")]
    if given.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    # For all that are forked. Dynamo could ask for a GPU, and a fork after that has none.
    loaded = ["torch.profiler", "triton", "pytest", "hypothesis"]
    for name in [*loaded, "torch._dynamo"] if given.dry else loaded:
        with suppress(ImportError):
            import_module(name)
    look, *plan = experiments(given.dry)
    width = max((os.cpu_count() or 1) - 2, 2)
    rows = measure("gpu-hour", look, lambda _: given.out, plan, SECONDS, width)
    if rows is None:
        return 2
    wrong = [row["row"] for row in rows if is_wrong(row)]
    print(f"{len(wrong)} not well: {', '.join(wrong)}" if wrong else "all well")
    print(f"in the checkout: python -m benchmarks.gpu.decide {given.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    command(main)

"""``python -m benchmarks.gpu.hour --out FILE``: every experiment within so many seconds."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .plan import experiments
from .runner import Experiment, is_wrong, run

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 540.0


def main(arguments: Sequence[str] | None = None) -> int:
    """2 where there is no GPU, 1 where an experiment did not end well.

    Args:
        arguments: instead of those of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.hour", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, as they come")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--only", nargs="*", help="experiments by name")
    parser.add_argument("--dry", action="store_true", help="without a GPU, and without times")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
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
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as cache, given.out.open("a", encoding="utf-8") as file:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)

        def record(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=file, flush=True)
            print(json.dumps({k: v for k, v in row.items() if k != "text"})[:500], flush=True)
            if is_wrong(row):
                wrong.append(row["row"])

        first, *rest = experiments(given.dry)
        run([first], SECONDS, record, 1)
        if wrong:
            print("gpu-hour: nothing else is measured", file=sys.stderr)
            return 2
        chosen: list[Experiment] = [e for e in rest if not given.only or e.name in given.only]
        width = max((os.cpu_count() or 1) - 2, 2)
        run(chosen, given.seconds - (time.monotonic() - begun), record, width)
    print(f"{len(wrong)} not well: {', '.join(wrong)}" if wrong else "all well")
    print(f"in the checkout: python -m benchmarks.gpu.decide {given.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are ended too
    sys.exit(main())

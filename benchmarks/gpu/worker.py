"""The process that computes rows: ``python -m benchmarks.gpu.worker module:function``.

It writes a line of JSON before each row and after it. A row that raises is reported, and the
process goes on unless the GPU no longer answers it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from .isolation import take_stdout


class Row(NamedTuple):
    """One result to compute.

    Attributes:
        name: unique in its stage.
        seconds: after which it counts as hanging.
        compute: returns the result, which JSON can hold.
    """

    name: str
    seconds: float
    compute: Callable[[], dict[str, Any]]


def _gpu_problem() -> str | None:
    """What the GPU says of the launches so far; None where no GPU is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return _words(error)
    return None


def _words(error: BaseException) -> str:
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"[:300]


def _compute(row: Row) -> dict[str, Any]:
    start, result = time.monotonic(), dict[str, Any]()
    try:
        result = row.compute()
        json.dumps(result)
    except Exception as error:  # a library may raise anything; it becomes the result
        result = {"problem": _words(error), "said": traceback.format_exc().splitlines()[-8:]}
    return {**result, "seconds": round(time.monotonic() - start, 3)}


def main() -> None:
    """Compute the rows of a share."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.worker", description=__doc__)
    parser.add_argument("rows", help="module:function that returns them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--only", action="append", default=[], help="rows whose name contains this; again: and this"
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("N", "OF"))
    options = parser.parse_args()
    answers = take_stdout()

    def say(**line: Any) -> None:
        print(json.dumps(line), file=answers, flush=True)

    module, _, function = options.rows.partition(":")
    found = getattr(importlib.import_module(module), function)(options.device)
    number, of = options.share
    rows = [row for row in found if all(words in row.name for words in options.only)][number::of]
    say(rows=[row.name for row in rows])
    for row in rows[options.first :]:
        say(begin=row.name, seconds=row.seconds)
        result = _compute(row)
        dead = _gpu_problem()
        if dead is not None:
            result.setdefault("problem", dead)
        say(result=result)
        if dead is not None:  # a fresh process takes the next row
            os._exit(1)
    say(done=True)  # this ends the process: what libraries do at exit could hang


if __name__ == "__main__":
    main()

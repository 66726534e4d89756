"""What is run as users and tests run it."""

from __future__ import annotations

import io
import re
import time
from contextlib import redirect_stdout
from typing import Any

from .lab import Lab


def machine(lab: Lab) -> int:
    """The line that names the machine, versions and commit."""
    from .machine import machine as rows

    found = rows("cpu" if lab.dry else "cuda")[0].compute()
    if lab.dry:
        found["gpu"] = "no GPU: a dry run"
    lab.say(stage="machine", row="machine", **found)
    return "problem" in found


def check(lab: Lab) -> int:
    """``python -m bahdanau_fast check``."""
    from bahdanau_fast.cli import main

    with redirect_stdout(io.StringIO()) as told:
        code = main(["check"])
    lab.say(stage="check", row="check", passed=code == 0, text=told.getvalue().splitlines())
    return code


def suite(lab: Lab, path: str, seconds: float, part: int = 0, parts: int = 1) -> int:
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
                lab.say(stage="test", row=report.nodeid, problem=text[-1], text=text)

    options = ["-v", "-p", "no:cacheprovider", "-m", "not deep"]
    code = pytest.main([path, *options, *(["--collect-only", "-q"] if lab.dry else [])], [Told()])
    lab.say(stage="test", row=path, part=[part + 1, parts], tests=counts)
    return int(code)


def user(lab: Lab, pattern: str) -> int:
    """Rows of what a user feels, without those of the chapter's sizes and of compiled code.

    A dry run has the first, small.
    """
    from . import figures, user

    if lab.dry:
        from .. import measure

        user.SIZES, figures.SECONDS = user.TINY, 1e-3
        measure.SAMPLE_SECONDS, measure.PAUSE_SECONDS = 1e-4, 0.0
    s = user.SIZES["chapter"]
    left_out = re.escape(str((s.batch, s.target, s.source, s.hidden)).replace(" ", ""))
    wrong = 0
    rows = [
        row
        for row in user.user("cpu" if lab.dry else "cuda")
        if re.search(pattern, row.name) and not re.search(f"compiled:|{left_out}", row.name)
    ]
    for row in rows[: 1 if lab.dry else None]:
        try:
            result = row.compute()
        except Exception as error:
            result = {"problem": f"{type(error).__name__}: {error}"[:300]}
        wrong += not result.get("passed", "problem" not in result)
        lab.say(stage="user", row=row.name, **result)
    return wrong

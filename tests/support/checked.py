"""``bahdanau-fast check`` on a pretended GPU, with mistakes planted in a family of its kernels.

Its children are forked from the test. Nothing is on a stream of its own, and graphs are not
replayed: the second problem is computed. Eager is measured on as few inputs as results need.
"""

import json
import os
import signal
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch

from bahdanau_fast import check, cli
from bahdanau_fast.check import families, problems

SILENCE = 1.0  # where something hangs
WITHOUT_STREAMS = {
    "two streams": lambda of, run: [(i, run(of[i])) for i in (0, 1)],
    "replayed": lambda of, run: [(1, run(of[1]))],
}


def _raise(_):
    raise RuntimeError("planted\nbeside other words")


#: What becomes of what a family computes, by what is said of it.
MISTAKES = {
    "FAIL": lambda x: x.mul_(1.05),
    "RuntimeError: planted": _raise,
    f"no answer within {SILENCE:g} s": lambda _: time.sleep(1000),
    "its process died of SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
}


@contextmanager
def checking(*names, only=lambda _: True, **limits):
    """Inside, a GPU is checked, of these families the experiments that ``only`` takes, and no CPU.

    ``limits`` are SECONDS and SILENCE.
    """
    chosen = {
        name: family._replace(
            experiments=tuple(filter(only, family.experiments)) if name in names else ()
        )
        for name, family in families.FAMILIES.items()
    }
    has = {"name": "pretended", "major": 9, "minor": 0, "total_memory": 1 << 30}
    has |= {"multi_processor_count": 132, "shared_memory_per_block_optin": 227 << 10}
    with (
        patch.object(torch.version, "cuda", "13.0"),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**has)),
        patch.object(problems, "_DRAWS", 2),
        patch.dict(families.WAYS, WITHOUT_STREAMS),
        patch.dict(families.FAMILIES, chosen),
        patch.multiple(check, **{"SECONDS": 1000.0, "SILENCE": 300.0, **limits}),
        patch.object(check, "availability", SimpleNamespace(interpreted=lambda: False)),
        patch.object(check, "rows", partial(families.rows, device="cpu")),
        patch.object(check, "_on_cpu", lambda **_: ()),
        patch.object(check, "compiled", lambda *_: ()),
    ):
        yield


def finds(family, said, tmp_path, capsys):
    """Asserts that a check fails by this family alone, and says so in words and as JSON."""
    path = tmp_path / "report.json"
    with checking(family, only=first(family), SILENCE=SILENCE if "answer" in said else 300.0):
        assert cli.main(["check", "--json", str(path)]) == 1
    printed, report = capsys.readouterr().out, json.loads(path.read_text())
    of_family = [line for line in printed.splitlines() if line.startswith(family)]
    assert said in of_family[0]
    assert of_family[0].endswith("FAIL")
    assert f"\nwrong here: {family}: " in printed
    assert f"\nBAHDANAU_FAST_OFF={family} switches off; --json FILE" in printed
    assert printed.endswith("\nFAIL\n")
    assert (report["wrong"], report["passed"]) == ([family], False)
    assert [row["family"] for row in report["rows"] if "case" in row] == [family]
    return report


def first(family):
    """Takes the first experiment with a family."""
    return families.FAMILIES[family].experiments[:1].__contains__

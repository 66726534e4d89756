"""``make gpu-hour`` without a GPU, and what ``decide`` makes of its lines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import decide, is_wrong, rows
from benchmarks.gpu.decide import SWEEPS
from benchmarks.gpu.hour import experiments
from ptx_machine import needs_compiler

ROOT = Path(__file__).parents[2]


@needs_compiler
@pytest.mark.thorough
def test_a_dry_run_makes_every_experiment(tmp_path):
    out = tmp_path / "hour.jsonl"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.hour"]
    done = subprocess.run([*command, "--dry", "--out", out], cwd=ROOT, timeout=500, check=False)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line for line in lines if is_wrong(line) or "problem" in line] == []
    assert done.returncode == 0
    ends = {line["row"]: line for line in lines if "took" in line}
    limits = {e.name: e.seconds for e in experiments(dry=True)}
    assert ends.keys() == limits.keys()
    assert all(ends[name]["took"] <= limit and ends[name]["rows"] for name, limit in limits.items())
    assert {"torch", "python", "commit", "cpu"} <= lines[1].keys()
    for sweep in SWEEPS:  # each takes effect
        launches = {}
        for line in lines:
            if line.get("constant") == sweep.constant:
                launches.setdefault(line["call"], {})[line["way"]] = line["launches"]
        differ = any(a != b for of in launches.values() for a in of.values() for b in of.values())
        assert differ, sweep.constant
    assert not any("not in this file" in line for line in decide.report(lines))
    (found,) = rows.of_report(lines).values()  # its rows can go to benchmarks/results
    assert any("training step" in name for name in found)


def test_every_mark_has_an_experiment(tmp_path):
    marked = {constant.name for constant in decide.of_sources() if constant.marked}
    assert len(marked) >= 9
    assert marked == {sweep.constant for sweep in SWEEPS}
    for folder in decide.FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "kernels/plans.py").write_text("# not measured: it.\n_NEW = 3\n\n# not measured.\n")
    (tmp_path / "csrc/a.h").write_text(
        "// not measured: it.\nconstexpr int kA = 1 << 3,\n kB = 2;\n"
        "constexpr int kC = 3;\nconstexpr int kD = 4;  // not measured: it\n"
    )
    found = decide.of_sources(tmp_path)
    assert [constant[:3] for constant in found if constant.marked] == [
        ("_NEW", "kernels/plans.py:2", "3"),
        ("", "kernels/plans.py:5", ""),
        ("kA", "csrc/a.h:2", "1 << 3"),
        ("kB", "csrc/a.h:3", "2"),
        ("kD", "csrc/a.h:5", "4"),
    ]
    assert decide.report([], tmp_path)[:2] == [
        "kernels/plans.py:2: _NEW = 3 (not measured)",
        "    not in this file",
    ]


def measured(name, **times):
    """Rows of a constant: microseconds by way, of each call."""
    (sweep,) = (s for s in SWEEPS if s.constant == name)
    return [
        {"stage": "lab", "row": f"{name} {way}: {call}", "constant": name, "call": str(call),
         "way": way, "graph": {"median": 1e-6 * us}, "differs": 0.0}
        for way, of in times.items()
        for call, us in zip(sweep.calls, of, strict=True)
    ]  # fmt: skip


BYTES = "_PROJECT_BYTES"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        # W_q of 8, 32, 128 and 512 KB; four times 32 KB; 512 KB.
        (
            measured(BYTES, within=[1, 1, 1, 9, 1, 9], beyond=[2] * 6),
            "_PROJECT_BYTES = 128 * 1024 stays",
        ),
        (
            measured(BYTES, within=[1, 9, 9, 9, 9, 9], beyond=[2] * 6),
            "write _PROJECT_BYTES = 8192: 2.12",
        ),
        (
            measured(BYTES, within=[1] * 6, beyond=[2] * 6),
            "write _PROJECT_BYTES = 524288: 1.26 times as fast",
        ),
        (
            measured("kMostScores", **{"1024": [9], "2048": [8], "4096": [7], "8192": [6.95]}),
            "kMostScores = 4096 stays",
        ),
        (
            measured("kMostScores", **{"1024": [3], "2048": [8], "4096": [9], "8192": [10]}),
            "write kMostScores = 1024: 3 times as fast",
        ),
    ],
)
def test_a_verdict(lines, said):
    assert [line for line in decide.report(lines) if said in line]


def test_what_is_wrong_is_said_and_not_chosen():
    lines = measured("kMostScores", **{"1024": [3], "2048": [8], "4096": [9], "8192": [10]})
    lines[0]["differs"] = 0.5
    said = "\n".join(decide.report([{"stage": "check", "row": "check", "passed": False}, *lines]))
    assert said.startswith("NOT WELL: check: ")
    assert "1024: its results differ by 0.5 of the largest number" in said
    assert "write kMostScores = 2048: 1.12 times as fast" in said

"""What is said of GPUs, and what decides by it, has its row in ``benchmarks/results/gpu-*.csv``."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu import rows
from benchmarks.page import BEGIN, END

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Constants that decide on a GPU.
CONSTANTS = {
    "bahdanau_fast/backends/route.py": r"GPU_\w+",
    "kernels/plans.py": r"_?[A-Z][A-Z_]+",
    "csrc/cuda/op/attend.h": r"(?:LAB_CONSTEXPR|constexpr) \w+ k[A-Z]\w+",
}
GPU, TIME = r"GPU|H100|CUDA|Triton", r"\d\s*(?:[unm]s|µs|(?:micro|milli|nano)seconds|[TG]B/s)\b"


def unfounded(text, constant, results=rows.RESULTS):
    """Statements on such constants without a comment above that says what they rest on."""
    found, comment = [], []
    for line in text.splitlines():
        if line.startswith(("#", "//")):
            comment.append(line.lstrip("#/ "))
            continue
        if re.match(rf"(?:\w+, )*{constant}\b.* = ", line) and not is_founded(
            " ".join(comment), results
        ):
            found.append(line)
        comment = []
    return found


def is_founded(comment, results):
    """Whether all rows that a comment names are there, or it says what was not measured."""
    named = re.findall(r"(?<!not )measured: (gpu-\w+\.csv), (.*?)(?= not measured: |$)", comment)
    for file, said in named:
        names = re.findall(r'"([^"]+: [^"]+)"', said)
        if (
            not (results / file).exists()
            or not names
            or set(names) - rows.read(results / file).keys()
        ):
            return False
    return bool(named or re.search(r"not measured: \w+", comment))


@pytest.mark.parametrize("path", CONSTANTS)
def test_a_constant_names_its_rows_or_what_would_settle_it(path):
    text = (ROOT / path).read_text()
    assert unfounded(text, CONSTANTS[path]) == []
    bare = re.sub(r"(?m)^(#|//).*\n", "", text)
    assert unfounded(bare, CONSTANTS[path]) != []  # so they are looked at


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gpu-h100.csv", "gpu-x1.csv"),
        ('"cuda: beam-10', '"cuda: beam-11'),
        ('"triton: step-1 ', '"triton: step-3 '),
        ("# measured:", "# fast:"),
    ],
)
def test_a_row_that_is_not_there_is_noticed(old, new):
    text = (ROOT / "bahdanau_fast/backends/route.py").read_text()
    text = re.sub(r"(?m)^# not measured:.*\n", "", text)
    assert unfounded(text, r"GPU_\w+") == []
    assert len(unfounded(text.replace(old, new), r"GPU_\w+")) == 1


def typed(page):
    """Lines with a time on a GPU outside the marks; on docs/gpu.md every time is one."""
    text = re.sub(rf"{BEGIN}.*?{END}", "", page.read_text(), flags=re.DOTALL)
    of_gpus = "" if page.name == "gpu.md" else GPU
    return [s for s in text.splitlines() if re.search(TIME, s) and re.search(of_gpus, s)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_time_on_a_gpu_is_typed(page, tmp_path):
    assert typed(page) == []
    planted = tmp_path / page.name
    for said in ("A step takes 9 us on a GPU.", "The H100 reads 3.1 TB/s."):
        planted.write_text(f"{page.read_text()}\n{said}\n")
        assert typed(planted) == [said]


def spread(us):
    return {"median": us * 1e-6, "p20": 0.0, "p80": 1.0}


REPORT = [
    {"stage": "machine", "row": "machine", "gpu": "Planted X1, 7 multiprocessors", "cpu": "x",
     "cores": "16 (16 threads)", "torch": "2.11.0", "commit": "abc"},
    {"stage": "time", "row": "roof", rows.COPY: 2.5e12},
    {"stage": "smoke", "row": "cuda: a (1,1,1,1), step, float32", "passed": True, "worst": 0.25},
    {"stage": "smoke", "row": "cuda: b (1,1,1,1), step, float32", "passed": False, "worst": 1.5},
    {"stage": "time", "row": "cuda: a (1,1,1,1), step, forward, bfloat16", "passed": True,
     "worst": 0.5, "called": spread(12.3456), "no graph": "it failed", "of roof": 0.123456,
     "kernels": {"x": (2.0, 1.5), "y": (1.0, 4.25)}},
    {"stage": "user", "row": "cuda: module (1,1,1,1), forward, float32", "host us": 1234.56},
    {"stage": "time", "row": "cuda: c", "problem": "killed"},
]  # fmt: skip


def test_a_report_becomes_rows(tmp_path, capsys):
    report = tmp_path / "report.jsonl"
    report.write_text("\n".join(map(json.dumps, REPORT)))
    rows.main(report, tmp_path)
    path = tmp_path / "gpu-x1.csv"
    assert str(path) in capsys.readouterr().out
    assert path.read_text().splitlines() == [
        ",".join(rows.COLUMNS),
        "# Planted X1, 7 multiprocessors; copies 2.5 TB/s; x, 16 cores; torch 2.11.0; commit abc",
        'time,"cuda: a (1,1,1,1), step, forward, bfloat16",12.35,,,7.25,,0.123,0.5,no graph',
        'user,"cuda: module (1,1,1,1), forward, float32",,,,,1235,,,',
        'smoke,"cuda: smoke, float32",,,,,,,1.5,"2 calls, 1 wrong"',
    ]
    again = {
        **REPORT[4],
        "called": spread(2),
        "graph": spread(1),
        "cold": spread(3),
        "passed": False,
    }
    del again["no graph"]
    later = [{**REPORT[0], "commit": "def"}, again]
    report.write_text("\n".join(map(json.dumps, later)))
    rows.main(report, tmp_path)
    (found,) = rows.measured(folder=tmp_path)
    assert [row["where"][-3:] for row in found] == ["def", "abc", "abc"]
    assert [found[0][name] for name in (*rows.TIMES, "note")] == ["2", "1", "3", "wrong"]


def planted(stage, name, where="X1, 7; commit a", **cells):
    return {**dict.fromkeys(rows.COLUMNS, ""), "stage": stage, "row": name, "where": where, **cells}


STEP, MANY = "s (2,1,3,4), step", "m (2,9,3,4), projected"
HOUR = "X1, 7; commit b"
FOUND = [
    planted("time", f"cuda: {STEP}, forward, bfloat16", called="50", kernels="7.125"),
    planted("time", f"triton: {STEP}, forward, bfloat16", called="60", graph="8.5", kernels="8"),
    planted("time", f"triton: {MANY}, forward, float32", graph="20"),
    planted("time", f"triton: {MANY}, forward + backward, float32", graph="45678"),
    planted("rivals", f"expert: {STEP}, forward, bfloat16", called="70"),
    planted("rivals", f"d2l eager: {MANY}, forward + backward, float32", graph="99"),
    planted("smoke", "cuda: smoke, float32", worst="0.5", note="9 calls"),
    planted("smoke", "triton: smoke, float32", worst="1.5", note="4 calls, 2 wrong"),
    planted("user", f"own module: {rows.TRAINING}", HOUR, called="2000"),
    planted("user", f"drop-in: {rows.TRAINING}", HOUR, called="3000", graph="500"),
    planted("user", f"AttentionGRU: {rows.TRAINING}", HOUR, called="700", note="not measured"),
    planted("user", f"own module, graphed: {rows.TRAINING}", HOUR, called="1500"),
    planted("user", f"drop-in, graphed: {rows.TRAINING}", HOUR, called="1250"),
    planted("user", "no attention: a translator", HOUR, called="5", note="not measured: hidden"),
    planted("user", "own module: f (2,1,3,4), forward", HOUR, host="12"),
    planted("user", "drop-in, cuda: f (2,1,3,4), forward", HOUR, host="38"),
]


def test_the_tables_have_who_by_call():
    lines = [re.sub(" +", " ", line) for line in rows.block(FOUND)]
    training = rows.TRAINING.partition("), ")[2]
    assert lines == [
        "X1, 7; commit a. Of 13 checked calls 2 exceed the parity rule; the worst has 1.5 of it.",
        "",
        "| milliseconds | own module | drop-in | AttentionGRU |",
        lines[3],
        f"| {rows.TRAINING} | 2 | 3/0.5 | 0.7\\* |",
        f"| {training}, graphed | 1.5 | 1.25 | |",
        "",
        "\\* not measured.",
        "",
        "Of this table: commit b.",
        "",
        "Until a call returns, microseconds, own/CUDA C++: f (2,1,3,4), forward 12/38.",
        "",
        "| microseconds | CUDA C++ | Triton | d2l | expert |",
        lines[14],
        "| (2,1,3,4) bf16, W_q too | ~7.12 | 8.5 | | |",
        "| (2,9,3,4) fp32 | | -/45700 | -/99 | |",
    ]
    alone = rows.block([row for row in FOUND if row["stage"] in ("lab", "time")])
    assert alone[2].replace(" ", "") == "|microseconds|CUDAC++|Triton|"

"""What rows of the GPU report compute, on the CPU and in Triton's interpreter; tables of them."""

import json
import math
import os
import re
from dataclasses import replace
from functools import partial

import dry_hour
import pytest
import torch
from fresh import ROOT, python
from profiled import Operations
from torch.utils._pytree import tree_leaves

from bahdanau_fast.fuse import choice, look
from benchmarks import decoders, gpu_report, measure
from benchmarks.cases import Shape
from benchmarks.contestants import CourseAttention
from benchmarks.contestants.registry import by_name
from benchmarks.decoders import DROP_IN, FUSE, OURS, OWN
from benchmarks.gpu import is_wrong, rows, stages, user
from benchmarks.gpu.stages import GpuCase

CPU = torch.device("cpu")
TINY = Shape("tiny", 2, 1, 5, 8)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(user, "SIZES", dry_hour.TINY)
    monkeypatch.setattr(choice, "PAYS", float("inf"))  # calls as small run as written
    monkeypatch.setattr(look, "_SECONDS", 0.0)
    monkeypatch.setattr(measure, "GPU_SECONDS", 1e-3)
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0.0)


def test_a_row_says_what_a_call_has_to_move_and_its_kernels():
    # Queries, keys, values and w_v; twice and their gradients, or context and weights.
    read = 4 * (2 * 8 + 2 * 2 * 5 * 8 + 8)
    case = GpuCase("cpu", TINY, "projected", "float32")
    row = stages.timed(case, by_name("ours op"), CPU)
    assert row["bytes"] == read + 4 * 2 * (8 + 5)
    assert row["no graph"] == "no GPU"
    (named,) = (name for name in row["kernels"] if name.startswith("bahdanau_fast::"))
    assert row["kernels"][named][0] == 1
    assert stages.timed(replace(case, train=True), by_name("ours op"), CPU)["bytes"] == 3 * read


def test_every_row_has_a_name():
    for stage in gpu_report.STAGES:
        names = [row.name for row in getattr(stages, stage)("cpu")]
        assert names
        assert len(set(names)) == len(names)


def test_a_sanitizer_sees_nothing_of_the_reference(capsys):
    with Operations() as seen:
        stages.main("cpu", "float32", "cpu")
    names = {function.name() for function, _ in seen.calls}
    shapes = [shape.name for shape, *_ in stages.SMALL]
    assert re.findall(r"cpu: (small-\w+) ", capsys.readouterr().out) == shapes
    assert {"bahdanau_fast::attention", "bahdanau_fast::attention_backward"} <= names
    assert not re.search("masked_fill|tanh|softmax", " ".join(names))


@pytest.mark.parametrize("kind", ["right", "a little off", "not written"])
def test_a_wrong_result_is_wrong(kind, monkeypatch):
    case, ours = GpuCase("cpu", TINY, "projected", "float32"), by_name("ours op")
    built = ours.build("projected", stages.inputs_of(case, CPU))
    results = {
        "right": built.forward,
        "a little off": lambda: [tensor * 1.00001 for tensor in built.forward()],
        "not written": lambda: (torch.empty(2, 1, 8), torch.empty(2, 1, 5)),
    }
    changed = replace(built, forward=results[kind])
    provider = replace(ours, builders={"projected": lambda _: changed})
    monkeypatch.setattr(stages, "subject", lambda _: provider)
    result = stages.poisoned(case, CPU)
    assert result["passed"] == (result["worst"] <= 1) == (kind == "right")
    assert is_wrong(result | {"stage": "smoke"}) == (kind != "right")
    assert math.isinf(result["worst"]) == (kind == "not written")
    assert not torch.are_deterministic_algorithms_enabled()


# In Triton's interpreter, which has to be asked for before anything is imported; it knows neither
# tanh of the library nor that of the hardware.
INTERPRETED = """
import json
import torch, triton
import triton.language as tl
from benchmarks.contestants import expert
from benchmarks.contestants.registry import by_name
from benchmarks import measure
from benchmarks.gpu import stages
from benchmarks.gpu.stages import GpuCase
from benchmarks.cases import Shape

@triton.jit
def tanh(x, APPROXIMATE: tl.constexpr):
    return 2 / (1 + tl.exp(-2 * x)) - 1

measure.GPU_SECONDS, expert._tanh = 1e-3, tanh
stages.kernels.__defaults__ = (1,)  # the calls that are profiled
beam, cpu = Shape("beam", 2, 4, 100, 16, lens="drawn"), torch.device("cpu")
ours = GpuCase("triton", beam, "projected")
print(json.dumps(stages.timed(ours, stages.subject(ours), cpu)))
for train in (False, True):
    case = GpuCase("auto", beam, "projected", train=train)
    print(json.dumps(stages.built(case, by_name("expert"), cpu)))
"""


def test_rows_in_the_interpreter(tmp_path):
    file = tmp_path / "interpreted.py"
    file.write_text(INTERPRETED)
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = python("-W", "ignore", str(file), cwd=ROOT, PYTHONPATH=path, TRITON_INTERPRET="1")
    assert [json.loads(line)["passed"] for line in done.stdout.splitlines()] == [True] * 3


@pytest.mark.parametrize(("value", "same"), [(1.0, True), (None, False), (1.0000001, False)])
def test_a_graph_that_writes_nothing_or_other_bits_is_found(value, same):
    kept = torch.ones(3), None

    def replay():
        if value is not None:
            kept[0].fill_(value)
        return kept

    assert stages.repeats_bits(lambda: (torch.ones(3), None), replay) == same


# ---- what a user feels ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_rows_come_last_and_graphs_need_a_gpu(device, monkeypatch):
    monkeypatch.setattr(user, "SIZES", dry_hour.TINY | {"compiled": None})
    found = [(row.name, row.seconds) for row in user.user(device)]
    compiled = ["compiled" in name for name, _ in found]
    assert compiled == sorted(compiled)
    wanted = {user.ROW_SECONDS[device], user.COMPILED_SECONDS}
    assert {seconds for _, seconds in found} == wanted
    for part in ("graphed: training step", "compiled: training step"):
        assert any(part in name for name, _ in found) == (device == "cuda")


@pytest.mark.parametrize("who", [OWN, DROP_IN, FUSE, OURS])
def test_a_decoder_is_what_a_graph_can_be_made_of(who, monkeypatch):
    made = []

    def make(module, arguments):  # runs what CUDA would capture, and asks for the same gradients
        given, found = tree_leaves(arguments), tree_leaves(module(*arguments))
        assert all(isinstance(x, torch.Tensor) for x in given)
        outputs = [x for x in found if x.requires_grad]
        asked = [x for x in (*given, *module.parameters()) if x.requires_grad]
        made.extend(torch.autograd.grad(outputs, asked, [torch.ones_like(x) for x in outputs]))

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    result = user._decoder(f"{who}, graphed", CPU, "train", dry_hour.TINY["decoder"])
    assert result["passed"]
    assert len(made) == 12  # source and state, three of attention, seven of other layers
    assert all(x.any() for x in made)


class Wrong(CourseAttention):
    """Ignores the lengths."""

    def forward(self, queries, keys, values, valid_lens):
        return super().forward(queries, keys, values, None)


@pytest.mark.parametrize(
    "call",
    [
        "training step (3,4,5,8), float32",
        "greedy decode (3,4,5,8), float32",
        "module call (2,1,5,8), forward",
        "module call (2,1,5,8), forward + backward",
    ],
)
def test_a_wrong_decoder_or_module_is_seen(call, monkeypatch):
    wrong = partial(decoders._CourseDecoder, Wrong)
    monkeypatch.setitem(decoders.DECODERS, DROP_IN, wrong)
    monkeypatch.setattr(user.bf, "AdditiveAttention", Wrong)
    found = {row.name: row for row in user.user("cpu")}
    assert found[f"{OWN}: {call}"].compute()["passed"]
    result = found[f"{DROP_IN}: {call}"].compute()
    assert result["worst"] > 1
    assert not result["passed"]


# ---- what becomes of a report --------------------------------------------------------------------


def spread(us):
    return {"median": us * 1e-6, "p20": 0.0, "p80": 1.0}


REPORT = [
    {"stage": "machine", "row": "machine", "gpu": "Planted X1, 7 multiprocessors", "cpu": "x",
     "cores": "16 (16 threads)", "torch": "2.11.0", "commit": "abc"},
    {"stage": "time", "row": "roof", rows.COPY: 2.5e12},
    {"stage": "smoke", "row": "cuda: a (1,1,1,1), step, float32", "passed": True, "worst": 0.25},
    {"stage": "smoke", "row": "cuda: b (1,1,1,1), step, float32", "passed": False, "worst": 1.5},
    {"stage": "time", "row": "cuda: a (1,1,1,1), step, forward, bfloat16", "passed": True,
     "worst": 0.5, "called": spread(12.3456), "no graph": "it failed", "bytes": 3810333,
     "kernels": {"x": (2.0, 1.5), "y": (1.0, 4.25)}},
    {"stage": "user", "row": "cuda: module (1,1,1,1), forward, float32", "host us": 1234.56},
    {"stage": "time", "row": "cuda: c", "problem": "killed"},
]  # fmt: skip


def test_a_report_becomes_rows(tmp_path, capsys):
    report, path = tmp_path / "report.jsonl", tmp_path / "gpu-x1.csv"
    report.write_text("\n".join(map(json.dumps, REPORT)))
    rows.main(report, tmp_path)
    assert str(path) in capsys.readouterr().out
    assert path.read_text().splitlines() == [
        ",".join(rows.COLUMNS),
        "# Planted X1, 7 multiprocessors; copies 2.5 TB/s; x, 16 cores; torch 2.11.0; commit abc",
        'time,"cuda: a (1,1,1,1), step, forward, bfloat16",12.35,,,7.25,,0.123,0.5,no graph',
        'user,"cuda: module (1,1,1,1), forward, float32",,,,,1235,,,',
        'smoke,"cuda: smoke, float32",,,,,,,1.5,"2 calls, 1 wrong"',
    ]
    times = {"called": spread(2), "graph": spread(1), "cold": spread(3), "passed": False}
    again = {name: x for name, x in (REPORT[4] | times).items() if name != "no graph"}
    report.write_text("\n".join(map(json.dumps, [REPORT[0] | {"commit": "def"}, again])))
    rows.main(report, tmp_path)
    (found,) = rows.measured(folder=tmp_path)
    assert [row["where"][-3:] for row in found] == ["def", "abc", "abc"]
    assert [found[0][name] for name in (*rows.TIMES, "note")] == ["2", "1", "3", "wrong"]

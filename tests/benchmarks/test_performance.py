"""What the page, the pictures and README say is what was measured."""

import dataclasses
import json
import re
from importlib.util import find_spec

import pytest
import torch
from threads import one_thread  # noqa: F401

from bahdanau_fast import limits
from bahdanau_fast.cli import main
from bahdanau_fast.ops import whole
from bahdanau_fast.seq2seq.cli.plots import require_matplotlib
from benchmarks import command, page
from benchmarks.command import Runner
from benchmarks.contestants import peers
from benchmarks.contestants.baselines import Unavailable
from benchmarks.contestants.parity import Oracle
from benchmarks.contestants.providers import PROVIDERS
from benchmarks.printing import plots, tables
from benchmarks.studies import dispatch_limits
from benchmarks.timing import roofs
from benchmarks.timing.machine import slug
from benchmarks.timing.worker import Worker
from benchmarks.workloads.shapes import (
    AXES,
    LARGEST,
    LIMIT_SLACK,
    SWEEPS,
    TOY,
    Bound,
    Case,
    Shape,
    draw,
)

SMALL = Shape("small", 3, 2, 7, 16, lens="drawn")
EAGER_AND_OURS = [provider for provider in PROVIDERS if provider.group != "compiled"]


def test_docs_and_readme_say_what_the_committed_figures_say():
    for path, text in page.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: make performance"
        for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
            assert (path.parent / image).exists(), image


def test_every_machine_has_its_figures_in_the_readme_table():
    measured = page.runs()
    assert len(measured) >= 2
    block = page.readme_block(measured)
    line = next(x for x in block.splitlines() if "decoder step" in x)
    for data in measured:
        row = next(row for row in data["rows"] if row["table"] == "step")
        ours, d2l = (row["seconds"][name]["median"] for name in ("ours memory", "d2l eager"))
        assert tables.name_of(data) in block
        assert f"{1e3 * ours:.3g} ms" in line
        assert f"{d2l / ours:.1f}x" in line


def test_a_claim_is_worded_by_machine():
    """The sentence is made of the bounds, and names every shape where a baseline was faster."""
    for data in page.runs():
        lines = page.page([data], "").splitlines()
        at = next(i for i, line in enumerate(lines) if "bounds of `make bench` hold" in line)
        held, count = (int(n) for n in re.search(r"(\d+) of (\d+) bounds", lines[at]).groups())
        missed = [b for row in data["rows"] for b in row["bounds"] if not b["holds"]]
        missed += [c for c in data["choices"] if c["behind"]["median"] > LIMIT_SLACK]
        assert count - held == len(missed)  # memory is within its bound on each of them
        slower = [
            (row, bound)
            for row in data["rows"]
            for bound in row["bounds"]
            if row["table"] == "shapes" and bound["found"]["median"] < 1
        ]
        named = [line for line in lines[at + 1 :] if line.startswith("  - ")]
        assert len(named) == len(slower)
        for line, (row, bound) in zip(named, slower, strict=True):
            assert row["shape"]["name"] in line
            assert f"{bound['rival']} took {bound['found']['median']:.2f}x our time" in line


def test_a_new_machine_appears_by_itself(tmp_path):
    (data,) = page.runs(pattern="cpu-amd-epyc-26-2-2cores.json")
    for cpu in ("One", "Two", "Three"):
        data["machine"]["cpu"] = f"{cpu} (family 1, model 2)"
        (tmp_path / f"{slug(data['machine'])}.json").write_text(json.dumps(data))
    block = page.readme_block(page.runs(tmp_path))
    assert all(f"{cpu} (family 1, model 2), 2 cores: ours" in block for cpu in ("One", "Three"))
    assert block.count("of 68 bounds of `make bench` hold") == 3


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("AMD EPYC (family 26, model 2)", "cpu-amd-epyc-26-2-2cores"),
        ("Intel(R) Xeon(R) Processor (family 6, model 207)", "cpu-intel-xeon-6-207-2cores"),
        (
            "Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz (family 6, model 79)",
            "cpu-intel-xeon-e5-2680-v4-6-79-2cores",
        ),
    ],
)
def test_a_file_is_named_after_processor_and_cores(cpu, name):
    assert slug({"cpu": cpu, "cores": "2 (2 threads)"}) == name


def test_exponents_of_known_powers():
    sizes = (1, 4, 16, 64)
    # The first size costs far more than the power says: fixed cost, left out of the fit.
    for power in (0.0, 0.5, 1.0, 2.0):
        points = [(x, 3.0 * x**power) for x in sizes[1:]]
        assert tables.exponent([(1, 1e6), *points]) == pytest.approx(power, abs=1e-12)
    with pytest.raises(ValueError, match="at least 2, got 1"):
        tables.exponent([(1, 1.0)])


def test_memory_of_which_only_the_working_part_grows():
    peaks = [
        {
            "provider": "ours op",
            "axis": "H",
            "size": size,
            "tensors": 1000 * size,
            "resident": 1000 * size + 5 + 7 * size,
            "allocated": 1000 * size,
        }
        for size in (16, 64, 256)
    ]
    data = {"memory_growth": [*peaks, {"provider": "x", "axis": "", "error": "why"}]}
    assert tables.working_per_unit(data, "H") == {"ours op": pytest.approx(7)}
    assert tables.memory_points(data, "H")["ours op"][0] == (16, 16117)


def test_sweeps_change_one_size_and_leave_the_outputs():
    for axis, shapes in SWEEPS.items():
        for shape in shapes:
            fixed = {AXES[axis]: 0, "query_size": 0, "key_size": 0, "value_size": 256}
            assert dataclasses.replace(shape, **fixed) == dataclasses.replace(shapes[0], **fixed), (
                axis
            )
        assert len({getattr(shape, AXES[axis]) for shape in shapes}) == len(shapes) > LARGEST


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A whole run of ``bench`` in a few seconds: tiny shapes, nothing compiled."""
    require_matplotlib()
    wanted = [
        Case("step", TOY, "step", bounds=(Bound("eager", 1e-9),)),
        Case("many-queries", SMALL, "projected"),
        Case("shapes", SMALL, "full", bounds=(Bound("baseline", 1e-9),)),
        Case("overhead", TOY, "full"),
    ]
    for axis in SWEEPS:
        shapes = [dataclasses.replace(SMALL, **{AXES[axis]: size}) for size in (1, 2, 3)]
        wanted += [
            Case(f"sweep-{axis}", s, "projected", m) for m in ("forward", "train") for s in shapes
        ]
    monkeypatch.setattr(command, "cases", lambda quick, only: wanted)
    monkeypatch.setattr(
        command, "Runner", lambda: Runner(providers=EAGER_AND_OURS, seconds=1e-4, min_rounds=3)
    )
    monkeypatch.setattr(command, "PEAKS", ())
    monkeypatch.setattr("benchmarks.timing.measure.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("benchmarks.timing.measure.SAMPLE_SECONDS", 1e-4)
    tiny = {"H": tuple(dataclasses.replace(SMALL, hidden=size) for size in (8, 16, 32))}
    monkeypatch.setattr("benchmarks.studies.peak_memory.SWEEPS", tiny)
    monkeypatch.setattr(command, "growth", lambda names, _: command_growth(names[-1:], ("H",)))
    few = (dataclasses.replace(dispatch_limits.CHOICES[0], shapes=(TOY,)),)
    monkeypatch.setattr(
        command.dispatch_limits, "measure", lambda seconds: command_choices(1e-4, few)
    )
    monkeypatch.setattr(roofs, "BUFFER_BYTES", 1 << 20)
    rates = {"multiply_add": 2e11, "divide": 2e10, "tanh": 1e9}
    monkeypatch.setattr(command, "compute_roofs", lambda: rates)
    monkeypatch.setattr(command, "Reader", lambda: roofs.Reader(1 << 20))
    options = command.Options(out=tmp_path, note="a trial")
    assert command.run(options) == 0
    (path,) = tmp_path.glob("cpu-*.json")
    return tmp_path, json.loads(path.read_text())


command_growth, command_choices = command.growth, dispatch_limits.measure


def test_a_run_writes_figures_page_and_pictures(measured, capsys):
    folder, data = measured
    text = (folder / "performance.md").read_text(encoding="utf-8")
    assert "a trial" in text
    for name in ("sweeps", "speedups", "roofline", "memory"):
        file = plots.file_name(data, name)
        assert f"({file})" in text
        assert (folder / file).stat().st_size > 10_000
    assert plots.file_name(data, "peers") not in text
    (row,) = [row for row in data["rows"] if row["table"] == "overhead"]
    assert f"{1e3 * row['seconds']['ours module']['median']:.3g} (" in text
    expected = tables.exponent(tables.memory_points(data, "H")["ours op"])
    assert f"{expected:.2f}" in text
    assert "In 1 of 1 rows of the list of shapes no baseline was faster than ours." in text
    assert "1 of 1 choices are within 10% of the best" in text


def test_a_page_says_what_its_run_left_out():
    data = {
        "machine": {"cpu": "x", "cores": "2 (2 threads)", "torch": "2", "commit": "c"},
        "seconds": 1.0,
        "rows": [],
        "peak_memory": {},
    }
    text = page.page([data], "")
    assert "![" not in text
    assert text.count(page.NOTHING) >= 5
    assert "A GPU: no result of one is committed" in text


def test_a_provider_has_one_colour():
    names = {provider.name for provider in (*PROVIDERS, *peers.PROVIDERS)}
    assert {plots._family(name) for name in names} == set(plots.COLOURS)
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)


PEER = Shape("peer", 3, 1, 7, 16, lens="drawn")


@pytest.mark.parametrize("provider", peers.PROVIDERS, ids=lambda provider: provider.name)
def test_a_peer_gives_our_result_or_says_why_not(provider, monkeypatch):
    assert provider.name in peers.DIFFERENCES
    variables = dict(provider.process)
    if variables and find_spec("keras") is not None:  # one back end to a process
        with Worker(variables) as worker:
            for task in provider.builders:
                assert worker.build(peers.__name__, provider.name, task, PEER).passed
        return
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    inputs = draw(PEER)
    for task in provider.builders:
        reason = ""
        try:
            runnable = provider.build(task, inputs)
        except Unavailable as unavailable:
            reason = str(unavailable)
        if reason:
            assert "is not installed" in reason
        else:
            with torch.no_grad():
                assert Oracle(inputs, PEER, task, False).check(runnable, "peer", False).passed


def test_a_peer_has_a_process_of_its_own():
    (joey,) = [provider for provider in peers.PROVIDERS if provider.name == "JoeyNMT"]
    ours = next(provider for provider in PROVIDERS if provider.name == "ours memory")
    with Runner(providers=[ours, joey], seconds=0.001) as runner:
        row = runner.row(Case("peers", PEER, "step", extra=("JoeyNMT",)))
        assert list(runner._workers) == ["JoeyNMT"]
    assert row.timings is not None
    assert "JoeyNMT" in row.timings.samples or "is not installed" in row.skipped["JoeyNMT"]
    assert "JoeyNMT" not in runner.row(Case("step", PEER, "step")).skipped  # only where it is named


def test_choices_are_forced_and_put_back(monkeypatch):
    before = limits.LIMITS
    called = []
    plain = whole.attend
    monkeypatch.setattr(whole, "attend", lambda *given: called.append(1) or plain(*given))
    operators = next(choice for choice in dispatch_limits.CHOICES if "operators" in choice.what)
    inputs = draw(TOY)
    with torch.no_grad():
        for name, count in (("three", 0), ("one", 1)):
            called.clear()
            operators.ways[name](inputs)()
            assert len(called) == count
        limits.LIMITS = before
        assert operators.takes(draw(Shape("large", 8, 1, 224, 16))) == "three"
        assert operators.takes(inputs) == "one"
    found = dispatch_limits.measure(
        1e-4, tuple(dataclasses.replace(c, shapes=c.shapes[:1]) for c in dispatch_limits.CHOICES)
    )
    assert limits.LIMITS is before
    for choice in found:
        assert choice["takes"] in choice["seconds"]
        assert choice["behind"]["median"] >= 1 or choice["takes"] != choice["best"]


def test_roofs_are_in_the_order_of_the_hardware():
    rates = roofs.compute_roofs(seconds=0.1)
    assert all(rate > 0 for rate in rates.values())
    if "divide" in rates:  # there is a C compiler
        assert rates["multiply_add"] > rates["divide"]
    found = tables.roofs_of(rates, 1e10)
    assert found["tanh"] == rates["tanh"]


def test_nothing_of_that_name_is_one_line_and_exit_code_2(capsys, tmp_path):
    assert main(["bench", "--only", "no-such-table", "--out", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors == [
        "bahdanau_fast: error: --only must name a table or a shape, got 'no-such-table'"
    ]
    assert list(tmp_path.iterdir()) == []

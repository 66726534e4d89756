"""What the pages say of speed is what was measured, and a library is compared only if right."""

import json
from importlib.util import find_spec

import pytest
import torch
from threads import one_thread  # noqa: F401

from benchmarks import __main__ as command
from benchmarks import page
from benchmarks.__main__ import Runner
from benchmarks.cases import TOY, Case, Shape, draw
from benchmarks.contestants import Unavailable
from benchmarks.contestants.parity import Oracle, build_in
from benchmarks.contestants.registry import LIBRARIES, PROVIDERS
from benchmarks.machine import rows_text, slug
from benchmarks.tables import RESULTS, runs
from benchmarks.worker import Worker

PEER = Shape("peer", 3, 1, 7, 16, lens="drawn")


def test_docs_and_readme_say_what_the_committed_figures_say():
    measured = {path.stem for path in RESULTS.glob("cpu-*.json")}
    assert measured == {slug(run["machine"]) for run in runs()}
    assert len(measured) >= 2
    for path, text in page.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: python -m benchmarks.page"


@pytest.mark.parametrize(
    ("medians", "leads"),
    [
        ({"ours module": 2, "d2l eager": 3, "compiled": 2.5}, True),
        ({"ours module": 2, "d2l eager": 3, "compiled": 1.5}, False),
        ({"ours module": 2, "ours op": 1, "d2l eager": 3}, True),
        ({"d2l eager": 3}, False),
    ],
)
def test_ours_leads_where_no_baseline_is_faster(medians, leads):
    row = {"task": "full", "seconds": {name: {"median": t} for name, t in medians.items()}}
    assert page.leads(row) == leads


def test_a_file_has_a_line_for_each_row():
    figures = {"machine": {"cpu": "x"}, "rows": [{"a": [1, 2]}, {"a": "é"}], "none": []}
    text = rows_text(figures)
    assert json.loads(text) == figures
    assert text.splitlines()[3:5] == ['{"a": [1, 2]},', '{"a": "é"}']


def test_a_run_writes_figures_that_the_page_can_read(monkeypatch, tmp_path, capsys):
    wanted = [
        Case("step", TOY, "step"),
        Case("shapes", PEER, "full"),
        Case("bandwidth", PEER, "scan"),
    ]
    few = [provider for provider in PROVIDERS if provider.group != "compiled"]
    monkeypatch.setattr(command, "cases", lambda only: wanted)
    monkeypatch.setattr(command, "Runner", lambda: Runner(few, seconds=1e-4, min_rounds=3))
    assert command.main(["--out", str(tmp_path), "--note", "a trial"]) == 0
    (run,) = runs(tmp_path)
    text = "\n".join(page.of_machine(run))
    assert "a trial" in text
    assert f"In {page.leads(run['rows'][1]):d} of 1 rows" in text
    ours, d2l = (run["rows"][0]["seconds"][n]["median"] for n in ("ours memory", "d2l eager"))
    (line,) = (line for line in text.splitlines() if line.startswith("| one decoder step (2, 1"))
    assert f" {1e3 * ours:.3g} ms " in line
    assert f" {d2l / ours:.1f}x " in line
    row = run["rows"][2]
    rate = 4 * 3 * 7 * 32 / row["seconds"]["ours op"]["median"]
    share = rate / row["dram_read"]["bytes_per_second"]
    assert f" ours op reads {rate / 1e9:.1f} GB/s, {share:.0%} (" in text
    printed = capsys.readouterr().out
    assert "| peer (3, 1, 7, 16)   | full, forward " in printed
    assert text in printed


def test_nothing_of_that_name_is_wrong_use(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--only", "no-such-table", "--out", str(tmp_path)])
    assert "--only must name a table or a shape, got 'no-such-table'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("provider", LIBRARIES, ids=lambda provider: provider.name)
def test_a_peer_gives_our_result_or_says_why_not(provider, monkeypatch):
    assert f"- {provider.name}: " in (page.ROOT / "docs/performance.md").read_text()
    variables = dict(provider.process)
    if variables and find_spec("keras") is not None:  # one back end to a process
        with Worker(variables) as worker:
            for task in provider.builders:
                assert build_in(
                    worker, "benchmarks.contestants.registry", provider.name, task, PEER
                ).passed
        return
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    inputs = draw(PEER)
    for task in provider.builders:
        try:
            runnable = provider.build(task, inputs)
        except Unavailable as unavailable:
            assert "is not installed" in str(unavailable)  # noqa: PT017
        else:
            with torch.no_grad():
                assert Oracle(inputs, PEER, task, False).check(runnable, "peer", False).passed


def test_a_peer_has_a_process_of_its_own():
    (joey,) = [provider for provider in LIBRARIES if provider.name == "JoeyNMT"]
    ours = next(provider for provider in PROVIDERS if provider.name == "ours memory")
    with Runner(providers=[ours, joey], seconds=0.001) as runner:
        row = runner.row(Case("peers", PEER, "step", extra=("JoeyNMT",)))
        assert list(runner._workers) == ["JoeyNMT"]
        seconds, skipped = row["seconds"], row["skipped"]
        assert "JoeyNMT" in seconds or "is not installed" in skipped["JoeyNMT"]
        assert "JoeyNMT" not in runner.row(Case("step", PEER, "step"))["skipped"]  # where named

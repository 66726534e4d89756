"""The benchmarks measure what they say: a wrong result is not timed, the pages say the figures."""

import json

import pytest
import torch
from profiled import projections
from threads import one_thread  # noqa: F401

from benchmarks import __main__ as command
from benchmarks import page, tables
from benchmarks.__main__ import Runner
from benchmarks.cases import LIST, SUBJECT, TOY, Case, Shape, cases, draw
from benchmarks.contestants import TASKS, Provider, Runnable
from benchmarks.contestants.parity import Oracle
from benchmarks.contestants.registry import LIBRARIES, PROVIDERS, by_name
from benchmarks.machine import rows_text
from benchmarks.measure import Spread, Timings, interleave
from benchmarks.tables import runs

SMALL = Shape("small", 3, 2, 7, 16, value_size=5, lens="drawn")
SAME = Shape("values-are-keys", 3, 1, 7, 16, lens="full")
EAGER_AND_OURS = [p for p in PROVIDERS if p.group in ("eager", "ours") and not p.on_demand]


def wrong(change, group="ours", base="ours op"):
    """A provider whose results are changed on the way out."""

    def build(task):
        def builder(inputs):
            right = by_name(base).build(task, inputs)
            return Runnable(lambda: change(*right.forward()), right.leaves)

        return builder

    builders = {task: build(task) for task in by_name(base).builders}
    return Provider("planted", group, builders)


def failed(row):
    return [name for name, verdict in row["parity"].items() if not verdict["passed"]]


def gradient_scaled(context, weights, factor):
    # The value stays, the gradient is scaled.
    return context.detach() + factor * (context - context.detach()), weights


@pytest.mark.parametrize(
    "change",
    [
        lambda context, weights: (context * (1 + 1e-4), weights),
        lambda context, weights: (context, weights * (1 + 1e-4)),
        lambda context, weights: (context * float("nan"), weights),
        lambda context, weights: (context[:, :1].expand_as(context), weights),
        lambda context, weights: (context.sum(1, keepdim=True), weights),
        lambda context, weights: gradient_scaled(context, weights, 1 + 1e-4),
    ],
    ids=["context", "weights", "nan", "same-query", "shape", "gradient"],
)
def test_the_gate_rejects_a_wrong_provider(change):
    runner = Runner(providers=[*EAGER_AND_OURS, wrong(change)], seconds=0.001)
    row = runner.row(Case("shapes", SMALL, "full", "train"))
    assert failed(row) == ["planted"]
    assert row["seconds"] == {}
    assert any("planted FAILS parity" in line for line in tables.row_table([row]))


def test_the_gate_rejects_a_baseline_that_computes_something_else():
    planted = wrong(lambda context, weights: (context * 1.01, weights), "eager", "rewrite eager")
    assert failed(Runner([planted], seconds=0.001).row(Case("shapes", SMALL, "full"))) == [
        "planted"
    ]


def test_a_wrong_row_among_unchecked_rows_is_all_that_can_pass(monkeypatch):
    monkeypatch.setattr(
        "benchmarks.contestants.parity.CHECKED_ELEMENTS", 2 * SMALL.features // SMALL.batch
    )
    inputs = draw(SMALL)
    inputs.require_grad(True)
    oracle = Oracle(inputs, SMALL, "full", True)
    assert oracle.rows.tolist() == [0, 2]
    right = by_name("ours module").build("full", inputs)
    assert oracle.check(right, "ours").passed

    def spoil(row):
        def change(context, weights):
            return context * (1 + (torch.arange(3) == row).float()[:, None, None]), weights

        return wrong(change).build("full", inputs)

    assert not oracle.check(spoil(2), "ours").passed
    assert oracle.check(spoil(1), "ours").passed


@pytest.mark.parametrize(
    ("shape", "task"),
    # A decoder feeds the context back, so a loop needs Dv = Dq.
    [(SMALL, task) for task in TASKS if task != "loop"] + [(SAME, task) for task in TASKS],
)
def test_every_provider_passes_the_gate_and_gives_every_gradient(monkeypatch, shape, task):
    monkeypatch.setattr("benchmarks.contestants.DECODE_STEPS", 3)
    train = task != "step"
    inputs = draw(shape)
    inputs.require_grad(True)
    oracle = Oracle(inputs, shape, task, train)
    with torch.set_grad_enabled(train):
        for provider in EAGER_AND_OURS:
            if task in provider.builders:
                call, verdict = oracle.checked(provider)
                assert verdict.passed, (provider.name, verdict)
                for gradient, leaf in (
                    zip(call(), inputs.leaves(task), strict=True) if train else ()
                ):
                    assert gradient.shape == leaf.shape
                    assert gradient.abs().max() > 0


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("task", ["full", "loop"])
def test_a_module_call_is_timed_with_its_projection_of_the_keys(task, grad, monkeypatch):
    monkeypatch.setattr("benchmarks.contestants.DECODE_STEPS", 3)
    inputs = draw(Shape("cached", 4, 1, 80, 64))  # smaller calls project inside the operator
    inputs.require_grad(grad)
    runnable = by_name("ours module").build(task, inputs)
    outputs = []  # a graph that is alive keeps the projection of its keys
    with torch.set_grad_enabled(grad):
        count = projections(lambda: outputs.append(runnable.forward()), inputs.keys.shape)
        count += projections(lambda: outputs.append(runnable.forward()), inputs.keys.shape)
    assert count == 2


def test_ratios_are_taken_within_a_round():
    # The machine is ten times slower in every other round: no ratio of these shows it.
    samples = {"ours": [1.0, 10.0, 1.0, 10.0], "theirs": [2.0, 20.0, 2.0, 20.0]}
    assert Timings(samples).ratio("theirs", "ours") == Spread(2.0, 2.0, 2.0)
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == pytest.approx(Spread(3.0, 1.8, 4.2))


def test_rounds_have_orders_of_their_own(monkeypatch):
    monkeypatch.setattr("benchmarks.measure.SLOW_SECONDS", 0.0)  # one call is a sample
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    interleave(calls, seconds=0.2)
    rounds = ["".join(order[at : at + 3]) for at in range(3, len(order), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 1


def test_every_row_has_somebody_to_compare():
    for case in cases():
        able = [p for p in PROVIDERS if case.task in p.builders]
        names = [provider.name for provider in able]
        assert SUBJECT[case.task] in names
        assert set(case.extra) <= {*names, *(provider.group for provider in able)}
        assert len(names) > 1
    assert {case.shape for case in cases()} > set(LIST)
    assert {case.table for case in cases(only="loop")} == {"loop"}


def test_the_bandwidth_is_of_all_of_the_buffer(monkeypatch):
    def turns(calls, *_):
        sums.append(float(calls[command.READ]()))
        return Timings({name: [2.0, 0.5, 1.0] for name in calls})

    sums = []
    monkeypatch.setattr(command, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(command, "interleave", turns)
    row = Runner([by_name("ours op")]).row(Case("bandwidth", SMALL, "scan"))
    assert sums == [1 << 18]
    assert row["dram_read"]["bytes_per_second"] == 2 << 20


# ---- figures, pages, other libraries -------------------------------------------------------------

PEER = Shape("peer", 3, 1, 7, 16, lens="drawn")


def test_docs_and_readme_say_what_the_committed_figures_say():
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
    monkeypatch.setattr(command, "cases", lambda only: [] if only else wanted)
    monkeypatch.setattr(command, "Runner", lambda: Runner(few, seconds=1e-4, min_rounds=3))
    assert command.main(["--out", str(tmp_path)]) == 0
    (run,) = runs(tmp_path)
    text = "\n".join(page.of_machine(run))
    assert f", commit {run['machine']['commit']}." in text
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
    with pytest.raises(SystemExit, match="2"):
        command.main(["--only", "no-such-table", "--out", str(tmp_path / "none")])
    assert "--only must name a table or a shape, got 'no-such-table'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("provider", LIBRARIES, ids=lambda provider: provider.name)
def test_a_peer_gives_our_result_in_a_process_of_its_own_or_says_why_not(provider):
    ours = by_name("ours memory")
    with Runner([ours, by_name("ours op"), provider], seconds=0.001) as runner:
        for task in provider.builders:
            row = runner.row(Case("peers", PEER, task, extra=(provider.name,)))
            assert list(runner._workers) == [provider.name]
            skipped = row["skipped"].get(provider.name, "")
            assert provider.name in row["seconds"] or "is not installed" in skipped
            assert provider.name not in runner.row(Case("step", PEER, task))["skipped"]

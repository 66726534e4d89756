"""Python in the pages runs as it stands, a page from top to bottom; links lead somewhere."""

import json
import re
from pathlib import Path

import pytest
from torch import nn

from bahdanau_fast.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
PYTHON = {
    page: blocks
    for page in PAGES
    if (blocks := re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
}
TINY = "--embed-size 8 --num-hiddens 8 --epochs 1 --limit 200"


@pytest.mark.parametrize("page", PYTHON, ids=lambda path: path.name)
def test_python_in_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "Translator.load" in "".join(PYTHON[page]):
        assert main(["train", "--out", "model", *TINY.split()]) == 0
    names = {"model": nn.ModuleDict()}  # README's is the reader's
    for block in PYTHON[page]:
        exec(compile(block, page.name, "exec"), names)


def anchors(page):
    """Headings as GitHub's links name them."""
    heads = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_gain_at_the_top_is_that_of_the_table():
    readme = (ROOT / "README.md").read_text()
    (said,) = re.findall(r"loop of 50 steps at (.*) then runs ([\d.]+) times as fast", readme)
    (row,) = re.findall(r"d2l's loop of 50 steps (\(.*?\)) *\|[^|]*\| ([\d.]+)x", readme)
    assert said == row


def test_what_is_said_of_fused_modules_was_measured():
    path = ROOT / "benchmarks/results/family-amd-epyc-25-1-2cores.json"
    rows = json.loads(path.read_text())["rows"]
    gains = {
        row["who"] + row["mode"] + str(row["sizes"]): row["theirs"] / row["ours"] for row in rows
    }
    modules = [g for who, g in gains.items() if who.startswith(("SpeechBrain", "ESPnet", "coqui"))]
    (whole,) = (g for who, g in gains.items() if who.startswith("JoeyNMT"))
    page = " ".join((ROOT / "docs/family.md").read_text().split())
    assert f"were {min(modules):.2f} to {max(modules):.2f} times as fast" in page
    assert f"took {whole:.2f} of its own speed" in page


def test_what_is_said_of_a_training_step_was_measured():
    figures = json.loads((ROOT / "benchmarks/results/training-amd-epyc-2cores.json").read_text())
    medians = {
        of["setting"]["name"]: [
            of["train"][name]["median"] for name in ("course", "ours, step by step", "ours")
        ]
        for of in figures["settings"]
    }
    page = (ROOT / "docs/course.md").read_text()
    said = page[page.index("What a whole training step") :].partition("python -m benchmarks")[0]
    small = [float(x) for x in re.findall(r"([\d.]+) ms", said)]
    large = [float(x) for x in re.findall(r"([\d.]+) s\b", said)]
    assert small == [round(x * 1e3, 1) for x in medians["hidden 32"]]
    assert large == [round(x, 2) for x in medians["hidden 512"]]

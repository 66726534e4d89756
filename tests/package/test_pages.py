"""Python in the pages runs as it stands, a page from top to bottom; links lead somewhere."""

import re
from pathlib import Path

import pytest
from torch import nn

from bahdanau_fast.cli import main
from benchmarks.gpu import rows

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


def test_readme_is_short_and_its_figures_are_not_typed():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900
    typed = re.sub(r"<!-- measured: begin.*?measured: end -->", "", readme, flags=re.DOTALL)
    assert re.findall(r"[\d.]+ ?(?:x\b|times\b|ms\b|µs)", typed) == []


def felt(call):
    """Seconds of what is called, by who computes it, on the processor that was measured."""
    (found,) = rows.measured("cpu")
    named = [(*row["row"].split(": "), row["called"]) for row in found]
    return {who: float(us) * 1e-6 for who, what, us in named if us and re.fullmatch(call, what)}


def test_what_is_said_of_fused_models_was_measured():
    gains = [
        of["own module"] / of["fuse"]
        for step in ("Tacotron", "captioner")
        for way in ("forward", r"forward \+ backward")
        for of in [felt(rf"{step} step \S+, {way}")]
    ]
    whole = felt(r"training step \(64,50,50,512\), float32")
    page = " ".join((ROOT / "docs/family.md").read_text().split())
    assert f"were {min(gains):.2f} to {max(gains):.2f} times as fast" in page
    small = felt(r"greedy decode \(64,10,10,32\), float32")
    took, small_took = (of["fuse"] / of["own module"] for of in (whole, small))
    assert f"took {took:.2f} of its own time" in page
    assert f"whose calls are too small to fuse, {small_took:.2f}." in page


def test_what_is_said_of_a_training_step_was_measured():
    page = (ROOT / "docs/course.md").read_text()
    said = page[page.index("What a whole training step") :].partition("\n\n")[0]
    whos = ("own module", "drop-in", "AttentionGRU")
    small, large = (
        felt(rf"training step \(64,{sizes}\), float32") for sizes in ("10,10,32", "50,50,512")
    )
    assert re.findall(r"([\d.]+) ms\b", said) == [f"{1e3 * small[who]:.1f}" for who in whos]
    assert re.findall(r"([\d.]+) s\b", said) == [f"{large[who]:.2f}" for who in whos]

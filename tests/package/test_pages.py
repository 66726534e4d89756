"""Python in the pages runs as it stands, a page from top to bottom; links lead somewhere."""

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


def test_readme_is_short_and_its_figures_are_not_typed():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900
    typed = re.sub(r"<!-- measured: begin.*?measured: end -->", "", readme, flags=re.DOTALL)
    assert re.findall(r"[\d.]+ ?(?:x\b|times\b|ms\b|µs)", typed) == []

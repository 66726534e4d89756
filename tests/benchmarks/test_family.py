"""What docs/family.md says of the speed of others' modules is what was measured."""

import json
from pathlib import Path

import pytest

from benchmarks import family

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("family-*.json"))


def test_two_machines_are_there():
    assert len(RESULTS) >= 2


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_the_page_has_the_figures(result):
    found = json.loads(result.read_text())
    assert len(found["rows"]) == len(family.PEERS) * len(family.SIZES) * len(family.MODES) + 4
    page = (ROOT / "docs" / "family.md").read_text()
    assert "\n".join(family.lines(found["rows"])) in page
    assert found["machine"]["commit"] in page
    assert result.name in page


@pytest.mark.parametrize("words", family.GAINS)
def test_the_first_table_has_the_gains(words):
    rows = [row for result in RESULTS for row in json.loads(result.read_text())["rows"]]
    page = (ROOT / "docs" / "family.md").read_text().splitlines()
    (line,) = (line for line in page if line.startswith("|") and words in line)
    assert line.endswith(f" {family.gains(rows, family.GAINS[words])} |")

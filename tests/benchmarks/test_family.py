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
def test_a_result_has_every_row(result):
    rows = json.loads(result.read_text())["rows"]
    assert len(rows) == len(family.PEERS) * len(family.SIZES) * len(family.MODES) + 4


@pytest.mark.parametrize("words", family.GAINS)
def test_the_table_has_the_gains(words):
    rows = [row for result in RESULTS for row in json.loads(result.read_text())["rows"]]
    page = (ROOT / "docs" / "family.md").read_text().splitlines()
    (line,) = (line for line in page if line.startswith("|") and words in line)
    assert line.endswith(f" {family.gains(rows, family.GAINS[words])} |")

"""What docs/family.md says of the speed of others' modules is what was measured."""

import json
from pathlib import Path

from benchmarks import family

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_figures():
    found = json.loads(
        (ROOT / "benchmarks/results/family-intel-xeon-6-207-2cores.json").read_text()
    )
    assert len(found["rows"]) == len(family.PEERS) * len(family.SIZES) * len(family.MODES) + 4
    page = (ROOT / "docs" / "family.md").read_text()
    assert "\n".join(family.lines(found["rows"])) in page
    assert found["machine"]["commit"] in page

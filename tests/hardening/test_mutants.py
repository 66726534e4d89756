"""``make mutants``: what it plants can still be planted, and its page says what it found."""

import json
from pathlib import Path

import mutants_page
from planted import cpu, cuda, find_tests, triton

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = cpu.MUTANTS + triton.MUTANTS + cuda.MUTANTS

# Survivors that still need a test: races that ThreadSanitizer ought to see, and does not.
OPEN = {
    "cuda decode_backward: before the sums of the warps",
    "cuda grad_tanh: after the scores are loaded",
}


def test_every_mistake_has_its_place():
    for mutant in MUTANTS:
        places = (ROOT / mutant.file).read_text().count(mutant.old)
        assert places == 1, f"{mutant.file} has changed: plant {mutant.name!r} elsewhere"
        assert mutant.old != mutant.new
        assert find_tests(ROOT, mutant.tests[0]).exists()


def test_no_two_mistakes_are_the_same():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_the_page_says_what_was_found():
    results = json.loads(mutants_page.RESULTS.read_text())
    assert mutants_page.PAGE.read_text() == mutants_page.page(results)
    rows = {f"{row['kernel']}: {row['what'] or row['kind']}": row for row in results["mutants"]}
    survived = {name for name, row in rows.items() if row["verdict"] != "killed"}
    assert survived <= OPEN
    assert list(rows) == [mutant.name for mutant in MUTANTS]  # those planted since too

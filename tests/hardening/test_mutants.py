"""``make mutants``: what it plants can still be planted, and its page says what it found."""

import json
from pathlib import Path

import mutants_page
from mutants import LANES
from planted import find_tests
from planted.guards import EXPLAINED, FACTORS, scan

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = [mutant for lane in LANES for mutant in lane]


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
    assert mutants_page.PAGE.read_text() == mutants_page.whole()
    results = json.loads(mutants_page.RESULTS.read_text())
    rows = {f"{row['kernel']}: {row['what'] or row['kind']}": row for row in results["mutants"]}
    assert {name for name, row in rows.items() if row["verdict"] != "killed"} == set()
    assert list(rows) == [mutant.name for mutant in MUTANTS]  # those planted since too


def test_wrong_guards_are_found_or_explained():
    results = json.loads(mutants_page.GUARDS.read_text())
    verdicts = {(row["guard"], row["became"]): row["verdict"] for row in results["guards"]}
    assert set(verdicts) <= {(guard.name, way) for guard in scan(ROOT) for way in FACTORS}
    # What survived is explained; no explanation is left of what is killed by now.
    survived = {key for key, verdict in verdicts.items() if verdict != "killed"}
    assert survived == set(EXPLAINED)


def test_the_scan_finds_what_decides(tmp_path):
    folder = tmp_path / "csrc" / "cpu" / "kernels"
    folder.mkdir(parents=True)
    (folder / "sample.h").write_text(
        "constexpr float kMost = 9.5f, kUnused = 3.0f;  // x <= 7.5\n"
        "template <class A>\nconstexpr A kLeast = sizeof(A) == 4 ? A(0.5) : A(0.25);\n"
        "bool f(float x) { return x <= kMost && x >= kLeast<float> && x < A(1) && x > 0.0f; }\n"
        "float g(float x) { return clamp(2.0f * x, 25.0f) + (x < (x > 1 ? 3e-16 : 1e-13)); }\n"
    )
    found = [guard.text for guard in scan(tmp_path)]
    assert found == ["9.5f", "0.5", "0.25", "1", "25.0f", "3e-16", "1e-13"]

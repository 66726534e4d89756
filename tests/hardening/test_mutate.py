"""What ``mutate.py`` names is there."""

import mutate

from build import ROOT


def test_paths():
    for start, tests in mutate.NARROW.items():
        assert list(ROOT.glob(f"{start}*")), start
        assert all((ROOT / test).exists() for test in tests), tests
    for test in [test for suite in mutate.SUITES.values() for test in suite]:
        assert (ROOT / test).is_dir(), test

"""The example of README.md runs as it stands."""

import re
from pathlib import Path

import pytest

from ptx_machine import PtxError, needs_compiler

pytestmark = [needs_compiler, pytest.mark.thorough]

(EXAMPLE,) = re.findall(
    r"^```python\n(.*?)^```",
    (Path(__file__).parents[1] / "README.md").read_text(),
    re.DOTALL | re.MULTILINE,
)


def test_the_example_runs():
    exec(compile(EXAMPLE, "README.md", "exec"), {})


def test_its_barrier_is_missed():
    with pytest.raises(PtxError, match="where nothing was written"):
        exec(compile(EXAMPLE.replace("bar.sync 0;", ""), "README.md", "exec"), {})

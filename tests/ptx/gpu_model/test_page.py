"""docs/gpu-model.md says what it is, and holds every shape."""

import re

from benchmarks.workloads.shapes import TOY
from gpu_model.__main__ import MARK, PAGE, SAID, SHAPES, call_row, constants, kernel_rows, problem
from gpu_model.gpus import GPUS, SOURCES
from gpu_model.rivals import eager
from gpu_model.times import Work, modelled

WORK = Work("a kernel", 132, 8, 32, 0, {"fma": 1e6}, sectors=1e7, moved=3.2e8)
FOUND = {name: [(WORK, modelled(gpu, WORK))] for name, gpu in GPUS.items()}


def test_every_table_says_that_it_is_modelled():
    above, below = PAGE.read_text().split(MARK)
    assert "modelled, not measured" in above
    sections = re.split(r"^### ", below, flags=re.MULTILINE)[1:]
    assert len(sections) >= 4
    assert all(SAID in section.split("|")[0] for section in sections)


def test_all_shapes_are_there():
    below = PAGE.read_text().split(MARK)[1]
    assert len(SHAPES) == 19
    assert all(f"| {shape} |" in below for shape in SHAPES)


def test_rows():
    (row,) = kernel_rows(TOY, FOUND)
    assert row[:2] == ["d2l-toy (2,1,10,8)", "a kernel (132)"]
    assert len(row) == 2 + len(GPUS)
    assert re.fullmatch(r"[\d.]+, DRAM, \d\d %", row[4])
    assert call_row(TOY, FOUND, [eager(problem(TOY))])[:2] == ["d2l-toy (2,1,10,8)", "1, 320"]


def test_constants_are_written_with_their_sources():
    text = "\n".join(constants())
    assert all(f"| `{name}` |" in text for name in SOURCES)
    assert "| `loaded` | 1.5 |" in text

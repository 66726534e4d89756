"""Of cases that differ in little, one runs by default and all with ``-m thorough``."""

import random

import pytest
from parity import DTYPES


def one_of_each(groups):
    """Parameters of all cases, each a tuple; of each group one, drawn by a seed, by default.

    The seed is fixed: all workers of a run and both runs of .ci/run have to draw the same.
    """
    draw, found = random.Random(0), []
    for group in map(list, groups):
        chosen = draw.randrange(len(group))
        for number, case in enumerate(group):
            marks = () if number == chosen else pytest.mark.thorough
            found.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return found


def every_dtype(rows, backends):
    """Parameters (row, dtype, backend); the reference, code of torch, by default in one dtype."""
    ours = [name for name in backends if name != "reference"]
    groups = [[(row, dtype, name)] for row in rows for dtype in DTYPES for name in ours]
    if "reference" in backends:
        groups += [[(row, dtype, "reference") for dtype in DTYPES] for row in rows]
    return one_of_each(groups)

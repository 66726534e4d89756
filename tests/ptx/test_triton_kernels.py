"""The PTX that Triton makes of the kernels, run without a GPU: right and without races."""

import platform
import re
import shutil

import pytest
from cases import measure_with
from machine.parse import PtxError
from tritoned import TritonPtx

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("g++") is None,
    reason="the machine's core is compiled by g++ for x86-64",
)

# A part of what make ptx runs; each row compiles its kernels for itself.
FEW = [
    (80, "lens per query", "bf16"),
    (80, "decoder step", "fp32"),
    (80, "split keys, lens inside a chunk", "fp16"),
    (
        90,
        "decoder step",
        "fp32",
    ),  # wgmma, which products of half types take there, is not known yet
]


@pytest.mark.parametrize(("arch", "row", "dtype"), FEW, ids=str)
def test_contract(arch, row, dtype):
    machine = TritonPtx(arch)
    assert measure_with(machine.attend, row, dtype) <= 1
    names = {name for name, _ in machine.reports}
    assert {"step_kernel", "grad_tanh_kernel"} <= names or {
        "scores_kernel",
        "softmax_kernel",
    } <= names


def planted(text, number):
    """PTX without the barrier of a number."""
    places = [m.span() for m in re.finditer(r"bar\.sync\s+0;", text)]
    if number >= len(places):
        return text
    start, end = places[number]
    return text[:start] + text[end:]


@pytest.mark.parametrize("number", range(3))
def test_barriers_that_are_left_out_are_found(number):
    machine = TritonPtx(80, change=lambda text: planted(text, number))
    with pytest.raises(PtxError, match=r"race:|where nothing was written"):
        measure_with(machine.attend, "decoder step", "fp32")

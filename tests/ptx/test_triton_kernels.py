"""The PTX that Triton makes of the kernels, run without a GPU: right and without races."""

import platform
import re
import shutil

import pytest
from cases import ROWS, measure_row, measure_step
from machine.parse import PtxError
from table import PAGE, short, triton_places
from tritoned import TritonPtx

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("g++") is None,
    reason="the machine's core is compiled by g++ for x86-64",
)

MANY = {"scores_kernel", "softmax_kernel", "tables_kernel"}
STEP = {"step_kernel", "grad_tanh_kernel"}
# A part of what make ptx runs, and kernels that it takes; each compiles its kernels for itself.
FEW = [
    ("80", "lens per query", "bf16", MANY),
    ("80", "values is keys", "fp32", MANY),
    ("80", "decoder step", "fp32", STEP),
    ("80", "split keys, lens inside a chunk", "fp16", STEP | {"combine_kernel"}),
    ("90", "decoder step", "fp32", STEP),
    ("90", "no lens", "bf16", MANY | {"grad_values_kernel"}),
    ("90", "keys of many features", "fp16", {"step_kernel"}),
]


def measured(machine, case, dtype):
    return (measure_row if case in ROWS else measure_step)(machine, case, dtype)


@pytest.mark.parametrize(
    ("arch", "case", "dtype", "taken"), FEW, ids=[" ".join(x[:3]) for x in FEW]
)
def test_contract(arch, case, dtype, taken):
    machine = TritonPtx(arch)
    assert measured(machine, case, dtype) <= 1
    assert taken <= {name for _, name in machine.took()}


@pytest.mark.parametrize("case", ["decoder step", "keys of many features"])
def test_half_types_take_products_of_warpgroups(case):
    seen = []
    machine = TritonPtx("90", change=lambda text: seen.append("wgmma.mma_async" in text) or text)
    assert measured(machine, case, "bf16") <= 1
    assert any(seen)


def test_the_page_has_every_kernel():
    page, places = PAGE.read_text(), triton_places("80")
    assert len(places) == 35  # nine kernels, four kinds of numbers; sums in fp64 read no tables
    assert [short(*place) for place in places if f"| {short(*place)} |" not in page] == []


def left_out(text, instruction, number):
    """PTX without an instruction of a number, where it has as many."""
    places = [m.span() for m in re.finditer(instruction, text)]
    if number >= len(places):
        return text
    start, end = places[number]
    return text[:start] + text[end:]


BARRIER, COPIED = r"bar\.sync\s+0;", r"cp\.async\.wait_group\s+\d+;"
PROXY, FENCE, GROUP, WAIT = (
    r"fence\.proxy\.async[.:\w]*;", r"wgmma\.fence[.\w]*;", r"wgmma\.commit_group[.\w]*;",
    r"wgmma\.wait_group[.\w]*\s+\d+;",
)  # fmt: skip
SHARED = r"race:|where nothing was written"


@pytest.mark.parametrize("number", range(3))
def test_barriers_that_are_left_out_are_found(number):
    machine = TritonPtx("80", change=lambda text: left_out(text, BARRIER, number))
    with pytest.raises(PtxError, match=SHARED):
        measured(machine, "decoder step", "fp32")


# What kernels with products of warpgroups do without: the gradient of values of a decoder step, and
# a step whose keys are copied while products run.
LEFT_OUT = {
    **{f"barrier {number}": ("decoder step", BARRIER, number, SHARED) for number in range(4)},
    "the fence between proxies": ("decoder step", PROXY, 0, r"without fence\.proxy\.async"),
    "the fence": ("decoder step", FENCE, 0, r"no wgmma\.fence"),
    "the group": ("decoder step", GROUP, 0, "has not awaited"),
    "the wait": ("decoder step", WAIT, 0, "has not awaited"),
    "the wait of a loop": ("keys of many features", WAIT, 0, "read that is under way and write"),
    "the wait after a loop": ("keys of many features", WAIT, 1, "has not awaited"),
    "the wait for copies": ("keys of many features", COPIED, 0, SHARED),
}


@pytest.mark.parametrize("place", LEFT_OUT)
def test_what_products_of_warpgroups_need_is_found(place):
    case, instruction, number, said = LEFT_OUT[place]

    def change(text):
        return left_out(text, instruction, number) if "wgmma.mma_async" in text else text

    with pytest.raises(PtxError, match=said):
        measured(TritonPtx("90", change=change), case, "bf16")

"""The machine code that Triton makes of the kernels, run without a GPU: right and without races.

Here every kernel runs once, in bf16; ``make ptx`` runs every case in every dtype.
"""

import re

import pytest
from built import needs_compiler
from cases import measured
from machine.parse import PtxError
from tritoned import TritonPtx, kernels

pytestmark = needs_compiler

FEW = "lens per query", "decoder step", "split keys, lens inside a chunk"


def test_every_kernel_is_right():
    machine = TritonPtx("90")
    shares = {name: measured(machine, name, "bf16") for name in FEW}
    assert {name: share for name, share in shares.items() if not share <= 1} == {}
    assert kernels() - {name for _, name in machine.took()} == set()


@pytest.mark.deep
@pytest.mark.parametrize("case", ["decoder step", "keys of many features"])
def test_half_types_take_products_of_warpgroups(case):
    seen = []
    machine = TritonPtx("90", change=lambda text: seen.append("wgmma.mma_async" in text) or text)
    assert measured(machine, case, "bf16") <= 1
    assert any(seen)


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


@pytest.mark.deep
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


@pytest.mark.deep
@pytest.mark.parametrize("place", LEFT_OUT)
def test_what_products_of_warpgroups_need_is_found(place):
    case, instruction, number, said = LEFT_OUT[place]

    def change(text):
        return left_out(text, instruction, number) if "wgmma.mma_async" in text else text

    with pytest.raises(PtxError, match=said):
        measured(TritonPtx("90", change=change), case, "bf16")

"""The machine code that Triton makes of the kernels, run without a GPU: right and without races.

In the suite every kernel runs once, in bf16 where that has it; as compiled for sm_75 in fp16.
"""

import re

import pytest
import torch
from contract import LARGE
from parity import Case
from projected import case_of
from targets import every
from tritoned import TritonPtx

from ptx_machine import PtxError, needs_compiler

pytestmark = [needs_compiler, pytest.mark.thorough]

MANY = "lens per query"
FEW = (
    MANY, "decoder step", "split keys, lens inside a chunk", "mask per query",
    "mask, split keys, chunks without any", "queries projected, beams",
)  # fmt: skip


PRODUCTS = {"rational_terms_kernel", "rational_scores_kernel", "grad_fourier_kernel"}


@pytest.mark.parametrize(
    ("arch", "dtype", "never"), [("90", "bf16", set()), ("75", "fp16", PRODUCTS)]
)
def test_every_kernel_is_right(arch, dtype, never):
    machine = TritonPtx(arch)
    shares = {name: machine.worst(name, dtype) for name in FEW}
    shares["many queries, fp32"] = machine.worst(MANY, "fp32")
    assert {name: share for name, share in shares.items() if not share <= 1} == {}
    assert machine.places() - machine.launched == never


@pytest.mark.parametrize(("name", "dtype", "arch"), every(("75", "80", "90")))
def test_every_case(name, dtype, arch):
    assert TritonPtx(arch).worst(name, dtype) <= 1


@pytest.mark.parametrize("activation", ["leaky_relu", "sigmoid"])
@pytest.mark.parametrize("queries", [2, 18])
def test_other_activations_are_right(queries, activation):
    sizes = {**LARGE, "Tq": queries, "activation": activation, "negative_slope": 0.2}
    TritonPtx("90").check(Case(**sizes), "bf16")


@pytest.mark.parametrize("kind", ["opposite 4.0 0.1", "normal 30.0", "far 20.0 1.0"])
def test_tiles_that_are_computed_again(kind):
    case = case_of(kind, torch.bfloat16, B=1, Tq=18, Tk=20)
    TritonPtx("90").check(case, "bf16")


def edited(text, instruction, number, new):
    """PTX with ``new`` in the place of an instruction of a number, where it has as many.

    In ``new`` an ampersand is the instruction, SUM a register of the first product.
    """
    places = list(re.finditer(instruction, text))
    if number >= len(places):
        return text
    start, end = places[number].span()
    register = re.compile(r"wgmma\.mma_async[^{;]*\{(%r\d+)").search(text)
    new = new.replace("&", text[start:end]).replace("SUM", register[1] if register else "")
    return text[:start] + new + text[end:]


BARRIER, COPIED = r"bar\.sync\s+0;", r"cp\.async\.wait_group\s+\d+;"
PROXY, FENCE, GROUP, WAIT = (
    r"fence\.proxy\.async[.:\w]*;", r"wgmma\.fence[.\w]*;", r"wgmma\.commit_group[.\w]*;",
    r"wgmma\.wait_group[.\w]*\s+\d+;",
)  # fmt: skip
SHARED = r"race:|where nothing was written"


# Mistakes in the kernels with products of warpgroups, of many queries.
USED, READS = "mov.b32 SUM, SUM;", r"without fence\.proxy\.async"
MISTAKES = {
    **{f"no barrier {number}": (BARRIER, number, "", SHARED) for number in range(4)},
    "no fence between proxies": (PROXY, 0, "", READS),
    "no fence": (FENCE, 0, "", r"no wgmma\.fence"),
    "a sum is used after the fence": (FENCE, 0, "&" + USED, r"no wgmma\.fence"),
    "no group": (GROUP, 0, "", "has not awaited"),
    "a sum is used before the wait": (WAIT, 0, f"{USED}&", "has not awaited"),
    "no wait": (WAIT, 0, "", "has not awaited"),
    "a wait for earlier groups": (WAIT, 0, "wgmma.wait_group.sync.aligned 1;", "has not awaited"),
}


@pytest.mark.deep
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_with_products_of_warpgroups_are_found(mistake):
    *place, said = MISTAKES[mistake]

    def change(text):
        return edited(text, *place) if "wgmma.mma_async" in text else text

    with pytest.raises(PtxError, match=said):
        TritonPtx("90", change=change).worst(MANY, "bf16")


@pytest.mark.parametrize("kernel", ["decode", "step_values", "step_keys"])
def test_a_step_waits_for_its_copies(kernel):
    def change(text):
        return edited(text, COPIED, 0, "") if f"{kernel}_kernel" in text else text

    with pytest.raises(PtxError, match=SHARED):
        TritonPtx("90", change=change).worst("large step", "bf16")


@pytest.mark.deep
def test_the_fence_between_proxies_may_come_after_the_barrier():
    def change(text):
        return re.sub(rf"({PROXY})(\s*)({BARRIER})", r"\3\2\1", text)

    assert TritonPtx("90", change=change).worst(MANY, "bf16") <= 1

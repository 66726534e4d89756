"""All steps of a decoder in one launch on a GPU.

Where there is none, tests/ptx/test_persistent.py runs the machine code.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from decoding import BF16, FP16, Case, by_operators, cast, check, check_tokens
from entry_points import dispatched
from torch.utils._pytree import tree_map_only

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

SIZES = {
    "translation": {"B": 64, "T": 12, "Tk": 50, "F": 512, "Dv": 512, "H": 512},
    "large units": {"B": 32, "T": 4, "Tk": 75, "F": 1024, "Dv": 1024, "H": 1024},
    "many rows": {"B": 300, "T": 4, "Tk": 9, "F": 256, "Dv": 256, "H": 256},
    "long": {"B": 16, "T": 6, "Tk": 400, "F": 512, "Dv": 512, "H": 512},
    "wide values": {"B": 7, "T": 30, "Tk": 33, "F": 96, "Dv": 2048, "H": 160},
    "toy": {"B": 2, "T": 60, "Tk": 10, "F": 32, "Dv": 32, "H": 32},
}
OPTIONS = {
    "plain": lambda B, Tk: {},
    "lens": lambda B, Tk: {"lens": torch.arange(B) % (Tk + 1)},
    "mask": lambda B, Tk: {"mask": torch.rand(B, 1, Tk) < 0.5},
    "dropout": lambda B, Tk: {"dropout_p": 0.3, "lens": torch.arange(B) % (Tk + 1)},
}


def call(name, *arguments):
    arguments = tree_map_only(torch.Tensor, torch.Tensor.cuda, arguments)
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, dispatched(name, *arguments))


@pytest.mark.parametrize("lstm", [False, True], ids=["gru", "lstm"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_parity(size, option, dtype, lstm):
    sizes = SIZES[size]
    check(call, Case(lstm, **sizes, **OPTIONS[option](sizes["B"], sizes["Tk"])), dtype)


@pytest.mark.parametrize("lstm", [False, True], ids=["gru", "lstm"])
def test_tokens(lstm):
    for seed in range(4):
        check_tokens(call, Case(lstm, B=40, H=256, F=256), seed, most=40)


def queue_products(x):
    for _ in range(60):
        torch.mm(x, x)


def queue_a_sleeper(_):
    torch.cuda._sleep(1 << 28)  # clocks


@pytest.mark.parametrize("work", [queue_products, queue_a_sleeper])
def test_beside_other_work_they_give_the_same_bits(work):
    """A launch waits for empty multiprocessors, and neither waits for ever."""
    case = Case(False, **SIZES["translation"])
    given = cast(*case.draw(BF16), BF16)
    first = by_operators(call, case, *given)
    x = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    for _ in range(10):
        with torch.cuda.stream(torch.cuda.Stream()):
            work(x)
        for name, found in by_operators(call, case, *given).items():
            assert torch.equal(found, first[name]), name


@pytest.mark.parametrize("threads", [1, 4])
def test_side_by_side_and_again_they_give_the_same_bits(threads):
    """Launches on streams of their own wait for nobody's blocks."""
    case = Case(False, **SIZES["translation"])
    given = cast(*case.draw(BF16), BF16)

    def run(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            return by_operators(call, case, *given)

    with ThreadPoolExecutor(threads) as pool:
        first, *others = pool.map(run, range(40))
    for other in others:
        for name, x in first.items():
            assert torch.equal(x, other[name]), name

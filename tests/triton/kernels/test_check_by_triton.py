"""``bahdanau-fast check`` on a GPU that is pretended: Triton, in its interpreter."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import triton
from checked import MISTAKES, checking, finds
from triton.runtime.interpreter import InterpretedFunction
from triton_target import Launched

from bahdanau_fast import cli
from bahdanau_fast.backends.triton import launch as launches
from bahdanau_fast.check import families
from bahdanau_fast.check.problems import Case
from bahdanau_fast.kernels import plans

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")

BF16 = torch.bfloat16
NAMES = "triton", "terms", "waves", "kept-launches"
# What kernels write, and of which family they are where they are not launched again.
WRITES = {
    "decode": ("triton", "context"),
    "rational_scores": ("terms", "scores"),
    "grad_fourier": ("waves", "out"),
}
# As many queries as there are in the longest, whose kernels the interpreter takes seconds for.
SHORT = families.attention(Case("short queries", 1, 17, 20, 16, (8, 8, 8)))


@pytest.fixture
def planted():
    """What becomes of what a kernel writes, by family."""
    mistakes, run = {}, InterpretedFunction.run

    def launch(kernel, grid, named, family=None):
        run(kernel, grid=grid, warmup=False, **named)
        own, writes = WRITES.get(kernel.__name__.removesuffix("_kernel"), (None, None))
        if writes is not None and named[writes] is not None:
            mistakes.get(family or own, id)(named[writes])

    def first(kernel, *, grid, warmup, **named):
        def again(grid, _, arguments):
            named = dict(zip(kernel.arg_names, arguments, strict=True))
            launch(kernel, tuple(grid), named, "kept-launches")

        launch(kernel, grid, named)
        return Launched(again)

    driver = SimpleNamespace(get_current_stream=lambda _: 0, get_current_device=lambda: 0)
    short = families._experiment(SHORT, BF16)
    waves = families.FAMILIES["waves"]._replace(experiments=(short,))
    with (
        patch.object(InterpretedFunction, "run", first),
        patch.object(triton.runtime, "driver", SimpleNamespace(active=driver)),
        patch.object(launches, "_current_device", lambda: 0),
        patch.object(plans, "pays_by_fourier", lambda *_: True),
        patch.dict(families.FAMILIES, waves=waves),
    ):
        yield mistakes


def test_all_is_right(planted, capsys):
    several = [families.FAMILIES[name].experiments[:2] for name in NAMES]
    with checking(*NAMES, only=lambda each: any(each in some for some in several)):
        assert cli.main(["check"]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("PASS\n")
    for name in NAMES:
        assert f"\n{name:<15}bfloat16  " in printed


@pytest.mark.parametrize("said", MISTAKES)
@pytest.mark.parametrize("family", NAMES)
def test_a_mistake_is_found_and_named(family, said, planted, tmp_path, capsys):
    planted[family] = MISTAKES[said]
    finds(family, said, tmp_path, capsys)

"""What ``bahdanau-fast check`` tries on a GPU keeps the parity rule as machine code."""

import pytest
from built import needs_compiler
from checked_cuda import NAMES, aside, served
from driven import CudaPtx, needs_nvcc

from bahdanau_fast import switches
from bahdanau_fast.check import families
from bahdanau_fast.ops.operator import operators

pytestmark = [needs_compiler, needs_nvcc, pytest.mark.thorough]


@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("family", NAMES)
def test_experiments(family, arch, monkeypatch):
    kernels = CudaPtx(arch)

    def run(name, _, *args):
        kernels.begin(4, operators[name].named(*args)["keys"].dtype)
        with aside():
            made = [x.clone() for x in kernels.operator(name, *args)]
        return tuple(x.cuda() for x in made)

    monkeypatch.setattr(switches, "OFF", families.beside(family))
    with served(run):
        for each in families.FAMILIES[family].experiments:
            if not each.name.endswith(("replayed", "two streams")):
                kernels.begin(4, each.dtype)
                assert each.absent("cuda", "cuda") is None
                found = each.judge("cuda", "cuda")
                assert found.ours <= 1.0, (each.name, each.dtype, found)
    assert ("persistent" in " ".join(kernels.launched)) == (family == "one-launch")

"""What ``bahdanau-fast check`` tries on a GPU keeps the parity rule as machine code."""

import pytest
from driven import CudaPtx, needs_nvcc
from host_only import routed
from tritoned import TritonPtx

from bahdanau_fast import backends, switches
from bahdanau_fast.backends.triton import TRITON
from bahdanau_fast.check import families
from bahdanau_fast.ops.operator import operators
from ptx_machine import needs_compiler

pytestmark = [needs_compiler, pytest.mark.thorough]


def of(backend):
    """The families of a backend."""
    return [name for name, family in families.FAMILIES.items() if family.backend == backend]


def experiments(family):
    """Those that take no stream, which the machine has not."""
    for each in families.FAMILIES[family].experiments:
        if not each.name.endswith(("replayed", "two streams")):
            yield each


@needs_nvcc
@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("family", of("cuda"))
def test_cuda(family, arch, monkeypatch):
    kernels = CudaPtx(arch)

    def run(name, _, *args):
        kernels.begin(4, operators[name].named(*args)["keys"].dtype)
        return tuple(x.clone() for x in kernels.operator(name, *args))

    monkeypatch.setattr(switches, "OFF", families.beside(family))
    with routed("cuda", run):
        for each in experiments(family):
            kernels.begin(4, each.dtype)
            assert each.absent("cuda", "cpu") is None
            found = each.judge("cuda", "cpu")
            assert found.ours <= 1.0, (each.name, each.dtype, found)
    assert any("persistent" in name for name in kernels.launched) == (family == "one-launch")


@pytest.mark.parametrize("family", of("triton"))
def test_triton(family, monkeypatch):
    monkeypatch.setattr(switches, "OFF", families.beside(family))
    monkeypatch.setattr(TRITON, "device", "cpu")  # which serves the CPU
    monkeypatch.setattr(backends, "why_not", {"cuda": "it is left out"}.get)
    kernels = TritonPtx("90")
    with kernels.here():
        for each in experiments(family):
            if "Attention" not in each.name:  # a decoder is for GPUs
                kernels.begin(4, each.dtype)
                found = each.judge("triton", "cpu")
                assert found.ours <= 1.0, (each.name, each.dtype, found)
    by_rational_terms, by_fourier = (
        {f"{name}_kernel"} <= kernels.launched for name in ("rational_terms", "grad_fourier")
    )
    assert (by_rational_terms, by_fourier) == (family == "terms", family == "waves")

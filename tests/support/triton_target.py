"""Triton on a machine without its GPU: it compiles for a target that is not here."""

import functools
import os
import sys
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from sysconfig import get_paths
from types import SimpleNamespace
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler.compiler import CompiledKernel

from bahdanau_fast.backends.triton import call, launch, register  # noqa: F401  loads the kernels
from bahdanau_fast.kernels import plans
from ptx_machine import built

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (75, 80, 86, 90, 100)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942", "gfx950")},
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
#: KiB of shared memory that a block may have there, by NVIDIA's and AMD's tables of their GPUs.
KIB = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_90": 227, "sm_100": 227}
KIB |= {"gfx90a": 64, "gfx942": 64, "gfx950": 160, "gfx1100": 64}
SHARED = {name: size << 10 for name, size in KIB.items()}


@functools.cache
def _utils():
    """What Triton's driver has in C, on a CUDA driver whose launches do nothing."""
    triton_own = Path(driver.__file__).parent
    files = triton_own / "driver.c", ROOT / "tests/cuda/mock_cuda/driver.c"
    includes = [f"-I{folder}" for folder in (triton_own / "include", get_paths()["include"])]
    command = ["gcc", "-O2", "-w", "-fPIC", "-shared", "-Wl,-Bsymbolic", *includes]
    path = str(built("mock_cuda/cuda_utils", files, [*command, *map(str, files)]))
    spec = spec_from_file_location("cuda_utils", loader=ExtensionFileLoader("cuda_utils", path))
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # functions of the driver that nothing calls are not there
    try:
        module = module_from_spec(spec)
    finally:
        sys.setdlopenflags(flags)
    with (
        patch.object(driver, "compile_module_from_file", lambda **_: module),
        patch.object(driver, "library_dirs", list),
    ):
        return driver.CudaUtils()


class _Driver:
    """Triton's driver, as far as compiling and launching ask for one; its launches do nothing."""

    launcher_cls = driver.CudaLauncher
    launch = property(lambda _: _utils().launch)
    build_signature_metadata = property(lambda _: _utils().build_signature_metadata)

    def __init__(self, target):
        self.target, self.utils = target, self

    def get_current_target(self):
        return TARGETS[self.target]

    def get_current_device(self):
        return self.target  # kernels are kept by device

    def get_current_stream(self, _device):
        return 0

    def get_device_properties(self, _device):
        return {"max_shared_mem": SHARED[self.target]}

    def load_binary(self, *_):
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, most threads of a block


class Launched(CompiledKernel):
    """A kernel that was not compiled; ``launched(grid, stream, arguments)`` takes its launches."""

    def __init__(self, launched):
        self.launched, self.module, self.metadata = launched, None, SimpleNamespace()
        self.function, self.packed_metadata = object(), object()

    def _run(self, *given):
        *grid, stream, function, packed, _, _, _ = given[:9]
        assert (function, packed) == (self.function, self.packed_metadata)
        self.launched(grid, stream, given[9:])

    run = property(lambda self: self._run)

    def launch_metadata(self, *_):
        return None


@contextmanager
def target_is(target):
    """Inside, kernels are compiled for a target of TARGETS, as they would be launched there."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(target))
    try:
        with (
            patch.object(call, "gpu", lambda _: plans.Gpu(132, SHARED[target], target)),
            patch.object(launch, "plans", {}),
        ):
            yield
    finally:
        triton.runtime.driver._active = before

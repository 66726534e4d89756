"""Triton on a machine without its GPU: it compiles for a target that is not here."""

from contextlib import contextmanager
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget

from bahdanau_fast import limits
from bahdanau_fast.backends.triton import call

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FAMILIES = {"sm_100": "sm_90", "gfx942": "other"}


def limits_of(target):
    """Those that launches on a target are planned by."""
    return limits.GPU_FAMILIES[FAMILIES.get(target, target)]


class _Driver:
    """Triton's driver, as far as compiling and launching ask for one."""

    def __init__(self, target):
        self.target, self.utils = target, self

    def get_current_target(self):
        return TARGETS[self.target]

    def get_current_device(self):
        return self.target  # kernels are kept by device

    def get_current_stream(self, _device):
        return 0

    def get_device_properties(self, _device):
        return {"max_shared_mem": limits_of(self.target).shared}


@contextmanager
def target_is(target):
    """Inside, kernels are compiled for a target of TARGETS, as they would be launched there."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(target))
    try:
        with (
            patch.object(call, "native", lambda: target.startswith("sm")),
            patch.object(limits, "of_gpu", lambda device: limits_of(target)),
        ):
            yield
    finally:
        triton.runtime.driver._active = before

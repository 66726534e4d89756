"""The Triton kernels as a backend; :mod:`register` loads them, where they are needed."""

from __future__ import annotations

from bahdanau_fast.backends import availability
from bahdanau_fast.backends.backend import Backend

__all__ = ["TRITON"]


class Triton(Backend):
    """Serves calls of all sizes, in all dtypes but fp64; interpreted, CPU tensors, on request."""

    name = "triton"
    # Triton, too, reads the variable once.
    device = "cpu" if availability.interpreted() else "cuda"
    serves = "Triton kernels for CUDA and ROCm tensors; not float64"
    if device == "cpu":
        serves = "Triton kernels in its interpreter, on the CPU; not float64"

    def problem(self) -> str | None:
        """As :func:`availability.triton_problem`."""
        return availability.triton_problem()


TRITON = Triton()

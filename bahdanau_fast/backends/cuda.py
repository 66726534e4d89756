"""The CUDA C++ kernels as a backend."""

from __future__ import annotations

import torch

from bahdanau_fast.backends import availability
from bahdanau_fast.backends.backend import Backend
from bahdanau_fast.backends.route import GPU_STEP_HIDDEN, GPU_STEP_QUERIES

_STEPS = (
    f"steps of at most {GPU_STEP_QUERIES} queries and {GPU_STEP_HIDDEN} hidden units, with nothing "
    "but tanh inside"
)


class Cuda(Backend):
    """Serves a decoder's steps alone (:func:`route.is_step`), in all dtypes but fp64."""

    name = "cuda"
    serves = f"CUDA C++ for CUDA tensors, up to {GPU_STEP_QUERIES} queries; not float64"

    def problem(self) -> str | None:
        """As :func:`availability.cuda_problem`."""
        return availability.cuda_problem()

    def refuses(self, dtype: torch.dtype, step: bool) -> str | None:
        """As every backend's kernels for a GPU, and what is no step."""
        return super().refuses(dtype, step) or (None if step else f"serve more than {_STEPS}")


CUDA = Cuda()

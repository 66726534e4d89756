"""The Triton backend: importing this module makes it an implementation of the operators."""

from bahdanau_fast.backends.availability import interpreted
from bahdanau_fast.backends.triton.backward import attend_backward, attend_scores_backward
from bahdanau_fast.backends.triton.forward import (
    attend,
    attend_counted,
    attend_scores,
    attend_step,
)
from bahdanau_fast.ops.operator import implement

_key = "CPU" if interpreted() else "CUDA"
implement(
    "triton",
    _key,
    attend=attend,
    **{"attend.counted": attend_counted},
    attend_backward=attend_backward,
    attend_scores=attend_scores,
    attend_scores_backward=attend_scores_backward,
    attend_step=attend_step,
)

"""The Triton backend: importing this module makes it an implementation of the operators."""

from bahdanau_fast import ops
from bahdanau_fast.loading import interpreted
from bahdanau_fast.triton_backward import attend_backward
from bahdanau_fast.triton_forward import attend

ops.implement("triton", attend, attend_backward, None if interpreted() else "CUDA")

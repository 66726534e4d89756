"""The Triton backend: importing this module makes it an implementation of the operators."""

from bahdanau_fast import ops
from bahdanau_fast.backends.availability import cuda_problem, interpreted
from bahdanau_fast.backends.triton.backward import attend_backward
from bahdanau_fast.backends.triton.forward import attend

# Behind the dispatch key stands the CUDA C++ backend, where it is there.
behind_key = not interpreted() and cuda_problem() is not None
ops.implement("triton", attend, attend_backward, "CUDA" if behind_key else None)

"""Importing this module takes Triton in: it makes it an implementation of the operators."""

from bahdanau_fast.backends.availability import interpreted
from bahdanau_fast.backends.triton.backward import attend_scores_backward, attention_backward
from bahdanau_fast.backends.triton.forward import attend_scores, attention, recorded
from bahdanau_fast.ops.operator import implement

implement(
    "triton",
    "CPU" if interpreted() else "CUDA",
    decomposed=not interpreted(),
    attention=attention,
    **{"attention.recorded": recorded},
    attention_backward=attention_backward,
    attend_scores=attend_scores,
    attend_scores_backward=attend_scores_backward,
)

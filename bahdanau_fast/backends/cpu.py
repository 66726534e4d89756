"""The C++ kernels for CPU tensors as a backend."""

from __future__ import annotations

import importlib
import platform

from bahdanau_fast.backends import availability
from bahdanau_fast.backends.backend import Backend, Facts
from bahdanau_fast.backends.route import TABLE_QUERIES
from bahdanau_fast.checks import TorchState

# A call of up to so many multiplications in its projections is one operator, which saves nodes of
# the graph in training; of pooling, which projects no queries, fewer pay there.
ONE_OPERATOR_WORK, ONE_OPERATOR_WORK_TO_TRAIN, POOLED_WORK_TO_TRAIN = 1 << 17, 1 << 20, 1 << 18
# A step without gradients projects its queries in its operator, up to so many of them; or, where
# they are narrow, up to so many multiplications.
STEP_ROWS, STEP_WORK = 8, 1 << 20
# Activations of pooling up to which its operator takes less time than chunks.
MOST_POOLED = 1 << 22
# Those from which on it takes less than plain operations, in training without lengths and mask.
LEAST_POOLED_TO_TRAIN = 1 << 15
# Elements of projected keys from which on a table of their exponentials is kept for later steps.
TABLE_ELEMENTS = 513

_problem = availability.cpu_problem()
_kernels = platform.machine()
if _problem is None:
    _binary = importlib.import_module("bahdanau_fast._C_cpu")
    _kernels = f"{_binary.instruction_set()} kernels"


class Cpu(Backend):
    """Serves all dtypes. Whether it loads is found out once, with the package."""

    name, device = "cpu", "cpu"
    serves = f"fused C++ for CPU tensors, {_kernels}"
    takes_fp64 = convolves = remembers_keys = trains_on_fp32_weights = True

    def problem(self) -> str | None:
        """What kept the extension from being loaded, or None."""
        return _problem

    def form(self, facts: Facts) -> tuple[str, str]:
        """By the sizes: what is small is one operator, and what is large goes through oneDNN."""
        sizes = facts.sizes
        if facts.queries_projected:
            return "projected", "queries are projected already"
        queries = sizes.batch * sizes.queries_len * sizes.query_size
        if not facts.keys_projected:
            work = (queries + sizes.batch * sizes.keys_len * sizes.key_size) * sizes.hidden
            most = ONE_OPERATOR_WORK_TO_TRAIN if facts.state.records else ONE_OPERATOR_WORK
            if work <= most:
                return "one operator", f"{work} multiplications to project, of at most {most}"
        if facts.state.records:
            return "projected", "autograd is on, and takes gradients of the projections by itself"
        if facts.drops:
            return "projected", "weights are dropped"
        most = max(STEP_ROWS * sizes.query_size, STEP_WORK // max(sizes.hidden, 1))
        if queries <= most:
            return "step", f"{queries} elements of queries, of at most {most}"
        return "projected", f"{queries} elements of queries, more than {most}"

    def pooling_form(
        self, activations: int, size: int, state: TorchState, masked: bool
    ) -> str | None:
        """The form of :class:`route.PoolingRoute`, or None; ``size`` are the features of a key."""
        if activations > MOST_POOLED:
            return None
        if state.records and not masked and activations < LEAST_POOLED_TO_TRAIN:
            return None if state.autocast else "operations"
        most = POOLED_WORK_TO_TRAIN if state.records else ONE_OPERATOR_WORK
        one_operator = activations * size <= most and not state.autocast
        return "one operator" if one_operator else "projected"

    def keeps_table(self, elements: int, queries_len: int) -> bool:
        """Where few queries read many keys."""
        return queries_len < TABLE_QUERIES and elements >= TABLE_ELEMENTS


CPU = Cpu()

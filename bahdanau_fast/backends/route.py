"""How a call is computed: one decision, from facts about the call and the limits of the processor.

:func:`route` is pure and is asked once a call, for a call of a module, of a function or of a
memory; whoever executes its answer asks nothing again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from bahdanau_fast import checks

__all__ = [
    "NAMES",
    "Cells",
    "DecoderFacts",
    "DecoderRoute",
    "Facts",
    "Generation",
    "Route",
    "choose_backend",
    "is_cuda_step",
    "is_gpu_step",
    "keeps_table",
    "route",
    "route_decoder",
]

#: Backends, fastest first.
NAMES = ("cuda", "triton", "cpu", "reference")

# A call of up to so many multiplications in both projections is one operator.
ONE_OPERATOR_WORK = 32768
# A step without gradients projects its queries in its operator, up to so many of them; or, where
# they are narrow, up to so many multiplications.
STEP_ROWS, STEP_WORK = 8, 1 << 20
# Elements of projected keys from which on a table of their exponentials is kept for later steps,
# and queries per row of the batch from which on kernels make them as they go.
TABLE_ELEMENTS, TABLE_QUERIES = 513, 16
# Elements of the keys from which on the projection of unchanged keys is remembered.
REUSE_ELEMENTS = 513
# Elements of a decoder's recurrent weights from which on one operator, which puts them in order and
# packs them at each call, takes longer for a single step with gradients, or for few steps without:
# up to so many, or fewer rows of all steps.
ORDERED_WEIGHTS, FEW_STEPS, FEW_STEP_ROWS = 1 << 19, 3, 8

# On GPUs one launch serves up to so many queries per row of the batch, hidden units and features of
# the values. CUDA C++ serves these calls alone.
# measured: gpu-h100.csv, called, "cuda: beam-10 (64,10,50,512), step, forward, bfloat16" takes less
# than "triton: beam-10 (64,10,50,512), step, forward, bfloat16", as every step does; on the
# device alone Triton is ahead in "triton: step-1 (1,1,1000,512), step, forward, float32" and in
# "triton: step-256 (256,1,400,512), projected, forward + backward, bfloat16".
# not measured: more than 10 queries or 1024 units; in both backends (64,16,50,512), (64,1,50,2048).
GPU_STEP_QUERIES, GPU_STEP_HIDDEN, GPU_STEP_FEATURES = 16, 2048, 2048


class Facts(NamedTuple):
    """What decides about a call. Sizes are 0 while code is traced, where none may decide."""

    device: str  # "cpu", "cuda", ...
    dtype: torch.dtype  # of the queries
    batch: int
    queries_len: int
    keys_len: int
    query_size: int  # H where the queries are projected
    key_size: int  # likewise
    value_size: int
    hidden: int
    traced: bool  # torch.compile or torch.export is tracing the call
    records: bool  # a gradient may be asked for
    # Only plain operations will do: under ``torch.func``, forward mode, ``torch.jit.trace`` and
    # ``torch.onnx.export``.
    plain_only: bool
    autocast: bool  # matrix products take another dtype
    # No operator takes such inputs: a recorded call with tensors of inference mode, or DTensors
    # where the scores are the result or depend on a location.
    plain_inputs: bool
    general: bool  # scores are the result, or have features or not tanh inside
    asked: str | None  # a backend by name
    there: tuple[str, ...]  # backends that can serve calls in this process
    interpreted: bool  # Triton kernels run in its interpreter, on the CPU
    queries_projected: bool
    keys_projected: bool
    called: bool  # w_v is a layer that has to be called
    drops: bool  # weights are dropped


class Route(NamedTuple):
    """How a call is computed.

    Forms: "one operator" takes queries and keys as they are given and projects what has a weight;
    "step" raw queries and projected keys; "projected" both, by matrix products in front. "called"
    calls the layer w_v on every (query, key) pair; "reference" has plain PyTorch operations.
    """

    backend: str  # a name from NAMES
    form: str
    fused: bool  # an operator computes it, not plain operations
    reuse: bool  # the projection of the keys may be remembered for the next call
    share: bool  # calls with a gradient share one node of the graph for keys, values and w_v
    table: bool  # keys that are asked for again get a table of exponentials
    traced: bool  # as in Facts; likewise the next two
    records: bool
    general: bool
    # The weights are fp32 whatever the context is: autocast gives a softmax so on GPUs alone.
    fp32_weights: bool
    narrow: bool  # the operator gives weights in the dtype of the context
    reason: str  # why, in words


def route(facts: Facts) -> Route:
    """The way to compute a call; a ValueError where no backend by the name asked for serves it."""
    step = is_cuda_step(facts.traced, facts.queries_len, facts.hidden, facts.general)
    step = step or (facts.traced and facts.asked == "cuda" and not facts.general)
    backend, why = choose_backend(
        facts.asked, facts.device, facts.dtype, facts.there, facts.plain_only, facts.interpreted,
        step,
    )  # fmt: skip
    if facts.plain_inputs and backend != "reference":
        backend, why = "reference", "inference tensors to be recorded, or DTensors of a location"
    form, because = _form(facts, backend)
    keys = facts.batch * facts.keys_len
    reuse = (  # by a decoder's loop, which has few queries at a time
        form in ("step", "projected")
        and not facts.traced
        and not facts.keys_projected
        and facts.queries_len < facts.keys_len
        and keys * facts.key_size >= REUSE_ELEMENTS
    )
    share = not facts.traced and facts.queries_len < TABLE_QUERIES
    elements = keys * facts.hidden
    table = not (facts.traced or facts.general)  # operators for general scores read no table
    table = table and keeps_table(backend, elements, facts.queries_len)
    # For a single query the kernels compute tanh in less time than it takes to read keys that came
    # projected and see that they are those of the table.
    alone = facts.keys_projected and facts.queries_len == 1 and not facts.records
    table = table and not (alone and facts.dtype != torch.float64)
    fp32_weights = facts.device == "cuda" and facts.autocast
    # On the CPU backward is given weights of fp32, which are more exact.
    narrow = not (fp32_weights if backend != "cpu" else facts.records or facts.traced)
    reason = f"{backend}: {why}; {form}: {because}"
    fused = backend != "reference" and form != "called"
    of_facts = facts.traced, facts.records, facts.general
    return Route(backend, form, fused, reuse, share, table, *of_facts, fp32_weights, narrow, reason)


def choose_backend(
    asked: str | None, device: str, dtype: torch.dtype, there: tuple[str, ...], plain_only: bool,
    interpreted: bool, step: bool,
) -> tuple[str, str]:  # fmt: skip
    """The backend that serves a call, and why; with ``step``, CUDA C++ serves such calls."""
    if asked is not None and asked != "auto":
        _check_serves(asked, device, dtype, plain_only, interpreted, step)
        return asked, "asked for by name"
    if plain_only:
        return "reference", "a transform, a trace or an export knows plain operations only"
    found, why = "reference", f"no kernels for {device} tensors are there"
    if device == "cpu" and "cpu" in there:
        found, why = "cpu", "the fastest for CPU tensors"
    elif device == "cuda" and dtype == torch.float64:
        why = f"{dtype} has no GPU kernels"
    elif device == "cuda" and "cuda" in there:
        if step:
            return "cuda", "the fastest for CUDA tensors"
        why = f"CUDA C++ has {_STEPS} alone"
        if "triton" in there:
            return "triton", why
        why = f"{why}, and Triton is not there"
    elif device == "cuda" and "triton" in there:
        found, why = "triton", "the CUDA C++ kernels are not there"
    return found, why


_STEPS = (
    f"steps of at most {GPU_STEP_QUERIES} queries and {GPU_STEP_HIDDEN} hidden units, with nothing "
    "but tanh inside,"
)


def is_cuda_step(traced: bool, queries_len: int, hidden: int, general: bool) -> bool:
    """Whether CUDA C++ serves such calls; the sizes of traced code may change."""
    return is_gpu_step(queries_len, hidden, 0) and not (traced or general)


def _check_serves(
    asked: str, device: str, dtype: torch.dtype, plain_only: bool, interpreted: bool, step: bool
) -> None:
    serves = {"cpu": "cpu", "cuda": "cuda", "triton": "cpu" if interpreted else "cuda"}
    where = "under torch.func, forward-mode differentiation, tracing and torch.onnx.export"
    for refused, need in (
        (device != serves.get(asked, device), f"serve {device} tensors"),
        (asked in ("cuda", "triton") and dtype == torch.float64, f"serve {dtype} tensors"),
        (asked == "cuda" and not step, f"serve more than {_STEPS}"),
        (asked != "reference" and plain_only, f"be 'reference' or left to 'auto' {where}"),
    ):
        if refused:
            checks.reject(ValueError, "backend", need, repr(asked))


def _form(facts: Facts, backend: str) -> tuple[str, str]:
    if facts.called:
        return "called", "the layer w_v is more than its weight"
    if backend == "reference":
        return "reference", "as asked" if facts.asked == "reference" else "no kernels serve it"
    in_front = None
    if facts.general:
        in_front = "scores, features and other activations take projected queries and keys"
    elif facts.traced:
        in_front = "one operator in compiled code, whatever the sizes"
    elif facts.autocast:
        in_front = "autocast gives the projections a dtype of their own"
    if in_front is not None:
        return "projected", in_front
    if backend != "cpu":
        return "one operator", "its products are launches like the others"
    return _form_on_cpu(facts)


def _form_on_cpu(facts: Facts) -> tuple[str, str]:
    if facts.queries_projected:
        return "projected", "queries are projected already"
    queries = facts.batch * facts.queries_len * facts.query_size
    if not facts.keys_projected:
        work = (queries + facts.batch * facts.keys_len * facts.key_size) * facts.hidden
        if work <= ONE_OPERATOR_WORK:
            return "one operator", (
                f"{work} multiplications to project, of at most {ONE_OPERATOR_WORK}"
            )
    if facts.records:
        return "projected", "autograd is on, and takes gradients of the projections by itself"
    if facts.drops:
        return "projected", "weights are dropped"
    most = max(STEP_ROWS * facts.query_size, STEP_WORK // max(facts.hidden, 1))
    if queries <= most:
        return "step", f"{queries} elements of queries, of at most {most}"
    return "projected", f"{queries} elements of queries, more than {most}"


def is_gpu_step(queries_len: int, hidden: int, features: int) -> bool:
    """Whether one launch on a GPU serves a call of such Tq, H and Dv."""
    few = queries_len <= GPU_STEP_QUERIES and hidden <= GPU_STEP_HIDDEN
    return few and features <= GPU_STEP_FEATURES


def keeps_table(backend: str, elements: int, queries_len: int) -> bool:
    """Whether so many elements of projected keys get a table; only the CPU's kernels read one."""
    return backend == "cpu" and queries_len < TABLE_QUERIES and elements >= TABLE_ELEMENTS


class DecoderFacts(NamedTuple):
    """What decides whether all steps of a decoder are one operator, and on a GPU one launch."""

    plain: bool  # nothing but the parameters of its layers decides what they compute
    device: str  # as in Facts; likewise autocast, traced and plain_only
    backend: str  # that serves its attention
    dtypes: frozenset[torch.dtype]  # of inputs, projected keys and values, as products take them
    autocast: bool
    empty: bool  # a size is zero
    traced: bool
    plain_only: bool
    layers: int
    records: bool  # as in Facts
    steps: int  # 0 where tokens are written until they end
    batch: int
    recurrent_weights: int  # elements
    # What the CUDA extension has against one launch; asked if nothing else is against it.
    problem: Callable[[], str | None]


class Cells(NamedTuple):
    """The recurrent layers of a decoder."""

    lstm: bool = False
    layers: int = 0
    units: int = 0  # H
    input_size: int = 0  # of the first layer


class Generation(NamedTuple):
    """Greedy decoding, whose inputs are the tokens before."""

    vocabulary: int
    max_steps: int


class DecoderRoute(NamedTuple):
    """How all steps of a decoder are computed.

    Kinds: "one operator" takes all steps, on a GPU as "one launch"; in "a loop of launches" the
    backend attends and no layer is called; "step by step" calls the layers.
    """

    kind: str
    backend: str  # that serves its attention
    dtype: torch.dtype | None  # that operators or launches compute in
    reason: str  # in words

    @property
    def loop_backend(self) -> str | None:
        """The backend that attends in a loop of launches; None where there is no such loop."""
        return self.backend if self.kind == "a loop of launches" else None


def route_decoder(facts: DecoderFacts) -> DecoderRoute:
    """How all steps of a decoder are computed."""
    dtype, *others = facts.dtypes
    of_cpu = facts.backend == "cpu"
    if of_cpu and facts.autocast:  # more exact, and one operator in fp32 is the faster way
        dtype = torch.float32
    why = _first(
        (facts.traced, "traced code takes them one by one"),
        (facts.plain_only, "a transform or a trace knows plain operations only"),
        (facts.backend == "reference", "the reference has no operator for all of them"),
        (not of_cpu and facts.device != "cuda", "torch's cells are one kernel on a GPU alone"),
        (bool(others), "dtypes differ"),
        (of_cpu and dtype.itemsize < 4, f"no operator takes {dtype} on a CPU"),
        (facts.empty, "there is nothing to compute"),
        (of_cpu and _has_few_steps(facts), "so few take less time than weights put in order"),
        (not facts.plain, "a layer is more than its parameters"),
    )
    if why is not None:
        return DecoderRoute("step by step", facts.backend, None, f"step by step: {why}")
    if of_cpu:
        reason = "one operator: its C++ takes all steps"
        return DecoderRoute("one operator", facts.backend, dtype, reason)
    why = _first(
        (facts.backend != "cuda", "CUDA C++ alone has it"),
        (dtype.itemsize > 2, f"it has no {dtype}"),
        (facts.layers > 1, f"it has one layer, not {facts.layers}"),
    )
    why = why or facts.problem()
    if why is None:
        reason = "one launch: all that a step needs stays on the GPU"
        return DecoderRoute("one launch", facts.backend, dtype, reason)
    reason = f"a loop of launches, no layer called; not one launch: {why}"
    return DecoderRoute("a loop of launches", facts.backend, dtype, reason)


def _has_few_steps(facts: DecoderFacts) -> bool:
    large = facts.recurrent_weights >= ORDERED_WEIGHTS
    if facts.steps == 1:
        return large or not facts.records
    few = facts.steps <= FEW_STEPS or facts.steps * facts.batch < FEW_STEP_ROWS
    return large and few and facts.steps > 0 and not facts.records


def _first(*against: tuple[bool, str]) -> str | None:
    """The reason of the first that holds, or None."""
    return next((reason for holds, reason in against if holds), None)

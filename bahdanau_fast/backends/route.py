"""How a call is computed: one decision, from facts about the call and the limits of the processor.

:func:`route` is pure and is asked once a call, for a call of a module, of a function or of a
memory; whoever executes its answer asks nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bahdanau_fast import checks
from bahdanau_fast.backends.backend import Backend, Facts

# Queries per row of the batch from which on kernels make a table of exponentials as they go.
TABLE_QUERIES = 16
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


class Route(NamedTuple):
    """How a call is computed.

    Forms: "one operator" takes queries and keys as they are given and projects what has a weight;
    "step" raw queries and projected keys; "projected" both, by matrix products in front. "called"
    calls the layer w_v on every (query, key) pair; "reference" has plain PyTorch operations.
    """

    backend: str  # its name
    form: str
    fused: bool  # an operator computes it, not plain operations
    convolves: bool  # the operator computes features that depend on a location
    reuse: bool  # the projection of the keys may be remembered for the next call
    share: bool  # calls with a gradient share one node of the graph for keys, values and w_v
    table: bool  # keys that are asked for again get a table of exponentials
    # Keys that came projected share a node of the graph though no table is derived from them.
    meet: bool
    traced: bool  # as in TorchState; likewise the next one
    records: bool
    general: bool  # as in Facts
    # The weights are fp32 whatever the context is: autocast gives a softmax so on GPUs alone.
    fp32_weights: bool
    narrow: bool  # the operator gives weights in the dtype of the context
    reason: str  # why, in words


def route(facts: Facts, step: bool) -> Route:
    """The way to compute a call; a ValueError where the requested backend does not serve it."""
    sizes, state = facts.sizes, facts.state
    backend, why = choose_backend(
        facts.requested, facts.device, facts.dtype, facts.available, state.plain_only, step
    )
    if (facts.sharded or state.of_inference) and backend.fused:
        backend = facts.available[-1]
        why = "inference tensors to be recorded, or DTensors of a location"
    form, because = _form(facts, backend)
    keys = sizes.batch * sizes.keys_len
    reuse = (  # by a decoder's loop, which has few queries at a time
        backend.remembers_keys
        and form in ("step", "projected")
        and not state.traced
        and not facts.keys_projected
        and sizes.queries_len < sizes.keys_len
        and keys * sizes.key_size >= REUSE_ELEMENTS
    )
    eager = not state.traced
    # Operators for general scores read no table.
    table = eager and not facts.general
    table = table and backend.keeps_table(keys * sizes.hidden, sizes.queries_len)
    # For a single query the kernels compute tanh in less time than it takes to read keys that came
    # projected and see that they are those of the table.
    alone = facts.keys_projected and sizes.queries_len == 1 and not state.records
    fp32_weights = facts.device == "cuda" and state.autocast
    recorded = backend.trains_on_fp32_weights and (state.records or state.traced)
    return Route(
        backend=backend.name,
        form=form,
        fused=backend.fused and form != "called",
        convolves=backend.convolves,
        reuse=reuse,
        share=eager and sizes.queries_len < TABLE_QUERIES,
        table=table and not (alone and facts.dtype != torch.float64),
        meet=backend.remembers_keys and facts.general and state.records and eager,
        traced=state.traced,
        records=state.records,
        general=facts.general,
        fp32_weights=fp32_weights,
        narrow=not (recorded if backend.trains_on_fp32_weights else fp32_weights),
        reason=f"{backend.name}: {why}; {form}: {because}",
    )


def choose_backend(
    requested: str | None,
    device: str,
    dtype: torch.dtype,
    available: Sequence[Backend],
    plain_only: bool,
    step: bool,
) -> tuple[Backend, str]:
    """The backend that serves a call, and why; for ``step`` see :func:`is_step`.

    ``available`` has the requested one first, or those that serve the device; the reference last.
    """
    if requested is not None and requested != "auto":
        backend, need = available[0], available[0].refuses(dtype, step)
        if backend.device not in (None, device):
            need = f"serve {device} tensors"
        elif need is None and plain_only and backend.fused:
            where = "under torch.func, forward-mode differentiation, tracing and torch.onnx.export"
            need = f"be 'reference' or left to 'auto' {where}"
        if need is not None:
            checks.reject(ValueError, "backend", need, repr(requested))
        return backend, "requested by name"
    if plain_only:
        return available[-1], "a transform, a trace or an export knows plain operations only"
    why = None
    for backend in available:
        need = backend.refuses(dtype, step)
        if need is None:  # the reference refuses nothing
            break
        why = f"{backend.name} does not {need}"
    if why is None and backend.fused:
        why = f"the fastest for {device.upper()} tensors"
    return backend, why or f"no kernels for {device} tensors are available"


def is_step(traced: bool, queries_len: int, hidden: int, general: bool) -> bool:
    """Whether a call is a decoder's step, as CUDA C++ serves it; traced sizes may change."""
    return is_gpu_step(queries_len, hidden, 0) and not (traced or general)


def _form(facts: Facts, backend: Backend) -> tuple[str, str]:
    if facts.called:
        return "called", "the layer w_v is more than its weight"
    if backend.fused:
        if facts.projected_only:
            return "projected", "scores and locations take projected queries and keys"
        if facts.state.traced:
            return "projected", "one operator in compiled code, whatever the sizes"
        if facts.state.autocast:
            return "projected", "autocast gives the projections a dtype of their own"
    return backend.form(facts)


def is_gpu_step(queries_len: int, hidden: int, features: int) -> bool:
    """Whether one launch on a GPU serves a call of such Tq, H and Dv."""
    few = queries_len <= GPU_STEP_QUERIES and hidden <= GPU_STEP_HIDDEN
    return few and features <= GPU_STEP_FEATURES


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


class PoolingRoute(NamedTuple):
    """How the CPU pools keys without a query.

    Forms: "one operator" takes the keys as they are, and "projected" is one of those behind both
    layers; "operations" are plain ones.
    """

    form: str
    records: bool  # as in Facts
    backend: str = "cpu"
    traced: bool = False


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

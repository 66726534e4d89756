"""Which implementation serves a call, and why.

``auto`` takes the fastest backend that is there for the device and dtype of the data. A backend
can be requested by name, for one call (``backend="cpu"``) or for a block (``with use("cpu")``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import bahdanau_fast.ops  # noqa: F401  defines the operators that the backends implement
from bahdanau_fast import checks, limits, switches
from bahdanau_fast.backends import availability
from bahdanau_fast.backends.backend import Backend, Facts, Sizes
from bahdanau_fast.backends.cpu import CPU
from bahdanau_fast.backends.cuda import CUDA
from bahdanau_fast.backends.reference import REFERENCE
from bahdanau_fast.backends.route import (
    Cells,
    DecoderFacts,
    DecoderRoute,
    Generation,
    PoolingRoute,
    Route,
    choose_backend,
    is_step,
    route,
    route_decoder,
)
from bahdanau_fast.backends.triton import TRITON
from bahdanau_fast.call import Call
from bahdanau_fast.checks import TorchState
from bahdanau_fast.ops.decode_arguments import padded_size
from bahdanau_fast.reference import TANH

__all__ = [
    "BACKENDS",
    "Backend",
    "Cells",
    "DecoderRoute",
    "Generation",
    "PoolingRoute",
    "Route",
    "available",
    "decide",
    "decide_decoder",
    "decide_pooling",
    "explain",
    "keeps_table",
    "resolve",
    "use",
]

#: By name, fastest first.
BACKENDS: dict[str, Backend] = {one.name: one for one in (CUDA, TRITON, CPU, REFERENCE)}

# What loads with the package: Triton's interpreter is only for tests.
_ON_CPU = tuple(
    one
    for one in BACKENDS.values()
    if one.device in (None, "cpu") and one is not TRITON and one.problem() is None
)

# Process-wide like torch's own backend flags: a plain global is what torch.compile can guard on.
_forced: str | None = None

if (_cpu_problem := CPU.problem()) is not None:
    warnings.warn(
        f"bahdanau_fast: {_cpu_problem}; using the slower reference backend. "
        "`python -m bahdanau_fast info` says more.",
        RuntimeWarning,
        stacklevel=2,
    )


def available() -> tuple[str, ...]:
    """Names of the backends that can serve calls in this process, fastest first.

    >>> "reference" in available()
    True
    """
    return tuple(name for name in BACKENDS if why_not(name) is None)


def why_not(name: str) -> str | None:
    """What keeps a backend from being available; None when nothing does."""
    return BACKENDS[name].problem()


# A constant of compiled code, as torch.compiler.assume_constant_result says, which takes as long to
# import as all of torch.
why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explain(device: str | torch.device | None = None) -> str:
    """One line per backend: whether it is there, why not, which one ``auto`` takes; what is off.

    Args:
        device: the device of the data ``auto`` would be asked about; unless given, a GPU if there
            is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = resolve(torch.device(device))
    lines = [f"auto takes {chosen!r} for {torch.device(device).type} tensors"]
    for name, backend in BACKENDS.items():
        problem = why_not(name)
        state = f"not available: {problem}" if problem else f"available: {backend.serves}"
        lines.append(f"  {name:<10} {state}")
    if switches.OFF:
        lines.append(f"  off by {switches.VARIABLE}: {', '.join(sorted(switches.OFF))}")
    if _forced is not None:
        lines.append(f"  forced to {_forced!r} by backends.use()")
    return "\n".join(lines)


def resolve(
    device: torch.device,
    name: str | None = None,
    dtype: torch.dtype = torch.float32,
    step: bool = True,
) -> str:
    """The backend that serves a call on ``device``.

    Args:
        device: where the data is.
        name: a backend requested by name; None takes that of ``use()``, else the fastest.
        dtype: of the data.
        step: CUDA C++ could serve it, by its size.

    Raises:
        ValueError: the name is unknown, or that backend cannot serve this device or dtype here.
    """
    requested = _requested(name)
    served_by = _available(device, requested, step)
    plain_only = checks.plain_only()
    backend, _ = choose_backend(requested, device.type, dtype, served_by, plain_only, step)
    return backend.name


def decide(call: Call) -> Route:
    """How a call is computed: collects the facts and asks :func:`route.route`, once a call.

    Raises:
        ValueError: as :func:`resolve`.
    """
    queries, keys, values, w_v, w_q, w_k, bias, _, _, dropout_p, *_ = call
    terms, located, scores_only = call.terms, call.located, call.scores_only
    scored = w_v if isinstance(w_v, Tensor) else None
    inputs: tuple[Tensor | None, ...] = (queries, keys, values, scored, w_q, w_k, bias)
    general = scores_only or terms is not TANH
    if general:  # not tanh alone, as far as anybody can see at once
        general = scores_only or terms.features is not None or terms.activation != "tanh"
        general, inputs = general or located is not None, (*inputs, *terms[:2], *(located or ()))
    device = queries.device
    state = checks.torch_state(device, inputs, scored is None)
    requested = None
    if call.backend is not None or _forced is not None:
        requested = _requested(call.backend)
    projected_only = scores_only or located is not None
    sharded = projected_only and checks.is_sharded(queries)
    kinds = (projected_only, w_q is None, w_k is None, scored is None, dropout_p > 0.0)
    if state.traced:  # no size may decide, or traced code would be compiled anew for each
        none = (0, 0, 0), (0, 0, 0), 0, 0
        return _decided(device, queries.dtype, none, state, requested, sharded, general, kinds)
    hidden = queries.shape[2] if scored is None else scored.shape[-1]
    shapes = queries.shape, keys.shape, values.shape[2], hidden
    # Looked up rather than decided again: a small call takes little longer than the decision. What
    # is available may change with `why_not` alone.
    key = why_not, device, queries.dtype, shapes, state, requested, sharded, general, kinds
    result = _routes.get(key)
    if result is None:
        if len(_routes) >= MOST_ROUTES:
            _routes.clear()
        result = _routes[key] = _decided(*key[1:])
    return result


def _decided(
    device: torch.device, dtype: torch.dtype, shapes: Any, state: TorchState,
    requested: str | None, sharded: bool, general: bool, kinds: tuple[bool, ...],
) -> Route:  # fmt: skip
    (batch, queries_len, query_size), (_, keys_len, key_size), value_size, hidden = shapes
    step = is_step(state.traced, queries_len, hidden, general)
    step = step or (state.traced and requested == CUDA.name and not general)
    sizes = Sizes(batch, queries_len, keys_len, query_size, key_size, value_size, hidden)
    backends = _available(device, requested, step)
    return route(
        Facts(device.type, dtype, sizes, state, sharded, general, requested, backends, *kinds), step
    )


_routes: dict[tuple[Any, ...], Route] = {}
MOST_ROUTES = 4096


def keeps_table(backend: str, projected_keys: Tensor) -> bool:
    """Whether the projected keys (B,Tk,H) of a memory get a table of exponentials."""
    if checks.is_exporting():  # the precision of a table goes by the size
        return False
    return BACKENDS[backend].keeps_table(projected_keys.numel(), queries_len=1)


_POOLING = (None, "auto", CPU.name)  # requests under which the CPU's operator pools


def decide_pooling(
    keys: Tensor, values: Tensor, parameters: Sequence[Any], masked: bool
) -> PoolingRoute | None:
    """The operator that pools keys (B,Tk,D) with these parameters of both layers and the scores.

    None for what serves every call: without that operator, where PyTorch traces the call, and
    where chunks take less time.
    """
    if type(keys) not in (Tensor, Parameter) or not keys.is_cpu or CPU not in _ON_CPU:
        return None
    if _forced not in _POOLING:
        return None
    state = checks.torch_state(keys.device, (keys, values, *parameters), False)
    if state.traced or state.plain_only or state.of_inference:
        return None
    hidden = parameters[0].shape[0]
    batch, keys_len, size = keys.shape
    activations = batch * keys_len * (hidden if parameters[2] is None else 2 * hidden)
    form = CPU.pooling_form(activations, size, state, masked)
    return None if form is None else PoolingRoute(form, state.records)


def decide_decoder(
    plain: bool,
    dtype: torch.dtype,
    projected_keys: Tensor,
    values: Tensor,
    cells: Cells,
    steps: int,
    generation: Generation | None = None,
) -> DecoderRoute:
    """The route of a decoder.

    Args:
        plain: as in :class:`route.DecoderFacts`.
        dtype: of the inputs.
        projected_keys: (B,Tk,F).
        values: (B,Tk,Dv).
        cells: without sizes unless ``plain``.
        steps: of the inputs; 0 in a generation.
        generation: of greedy decoding, None with inputs.

    Raises:
        ValueError: as :func:`resolve`.
    """
    device, layers, units = values.device, cells.layers, cells.units
    gates = 4 if cells.lstm else 3
    records = torch.is_grad_enabled() and generation is None

    def problem() -> str | None:
        sizes = projected_keys.shape[2], values.shape[2], units
        shape = *values.shape[:2], *(padded_size(size, device.type) for size in sizes)
        tokens = generation or (0, 0)
        return availability.one_launch_problem(device, cells.lstm, records, (*shape, *tokens))

    step = is_step(False, 1, projected_keys.shape[2], general=False)
    dtypes = {dtype, projected_keys.dtype, values.dtype}
    autocast = checks.autocast_dtype(device)
    if torch.float64 in dtypes:  # which autocast leaves alone
        autocast = None
    facts = DecoderFacts(
        plain=plain,
        device=device.type,
        backend=resolve(device, dtype=autocast or dtype, step=step),
        dtypes=frozenset(dtypes if autocast is None else {autocast}),
        autocast=autocast is not None,
        empty=0 in values.shape,
        traced=torch.compiler.is_compiling(),
        plain_only=checks.in_transform(),
        layers=layers,
        records=records,
        steps=steps,
        batch=values.shape[0],
        recurrent_weights=gates * units * (cells.input_size + (2 * layers - 1) * units),
        problem=problem,
    )
    return route_decoder(facts)


def _requested(name: str | None) -> str | None:
    name = name or _forced
    if name is not None and name != "auto":
        _check_name(name)
    return name


def _available(device: torch.device, requested: str | None, step: bool) -> tuple[Backend, ...]:
    """Backends for the tensors of a device, fastest first, or the requested one; see `is_step`."""
    if requested is not None and requested != "auto":
        return BACKENDS[requested], REFERENCE
    if device.type == "cpu":
        return _ON_CPU
    result: list[Backend] = []
    for name, backend in BACKENDS.items():
        # Triton, which takes a while to load, is loaded where it is needed.
        skipped = backend is TRITON and step and CUDA in result
        serves = backend.device in (None, device.type) and not skipped
        if serves and why_not(name) is None and not availability.is_too_old(name, device):
            result.append(backend)
    return tuple(result)


def _check_name(name: str) -> None:
    if name not in BACKENDS:
        names = ", ".join(map(repr, ("auto", *BACKENDS)))
        checks.reject(ValueError, "backend", f"be one of {names}", repr(name))
    problem = why_not(name)
    if problem is not None:
        checks.reject(ValueError, "backend", "be available here", f"{name!r}: {problem}")


@contextmanager
def use(name: str) -> Iterator[None]:
    """Make every call in the block take one backend; process-wide, like torch's own flags.

    Args:
        name: "auto", "cuda", "triton", "cpu" or "reference".

    Raises:
        ValueError: unknown, or not available here.

    >>> with use("reference"):
    ...     resolve(torch.device("cpu"))
    'reference'
    """
    global _forced
    if name != "auto":
        _check_name(name)
    before, _forced = _forced, name
    try:
        # Layers around the reference, too, are products of torch's.
        with limits.using(few_rows=0) if name == "reference" else nullcontext():
            yield
    finally:
        _forced = before

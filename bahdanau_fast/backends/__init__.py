"""Which implementation serves a call, and why.

``auto`` takes the fastest backend that is there for the device and dtype of the data. A backend
can be asked for by name, for one call (``backend="cpu"``) or for a block (``with use("cpu")``).
"""

from __future__ import annotations

import importlib
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import bahdanau_fast.ops  # noqa: F401  defines the operators that the backends implement
from bahdanau_fast import checks, limits
from bahdanau_fast.backends import availability
from bahdanau_fast.backends.route import (
    GPU_STEP_QUERIES,
    NAMES,
    DecoderFacts,
    Facts,
    Route,
    choose_backend,
    is_cuda_step,
    route,
    route_decoder,
)
from bahdanau_fast.backends.route import keeps_table as _keeps_table
from bahdanau_fast.call import Call
from bahdanau_fast.reference import TANH

__all__ = [
    "NAMES",
    "Route",
    "available",
    "decide",
    "decide_decoder",
    "explain",
    "keeps_table",
    "resolve",
    "use",
]

# Process-wide like torch's own backend flags: a plain global is what torch.compile can guard on.
_forced: str | None = None


_cpu_problem = availability.cpu_problem()
_cpu_ready = _cpu_problem is None
# Triton, too, reads it once.
_INTERPRETED = availability.interpreted()
_ON_CPU = ("cpu", "reference") if _cpu_ready else ("reference",)

if _cpu_problem is not None:
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
    return tuple(name for name in NAMES if why_not(name) is None)


def why_not(name: str) -> str | None:
    """What keeps a backend from being available; None when nothing does."""
    if name == "cuda":
        return availability.cuda_problem()
    if name == "triton":
        return availability.triton_problem()
    return _cpu_problem if name == "cpu" else None


# A constant of compiled code, as torch.compiler.assume_constant_result says, which takes as long to
# import as all of torch.
why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explain(device: str | torch.device | None = None) -> str:
    """One line per backend: whether it is there, why not, and which one ``auto`` takes.

    Args:
        device: the device of the data ``auto`` would be asked about; unless given, a GPU if there
            is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = resolve(torch.device(device))
    where = "in its interpreter, on the CPU" if _INTERPRETED else "for CUDA and ROCm tensors"
    what = {
        "cuda": f"CUDA C++ for CUDA tensors, up to {GPU_STEP_QUERIES} queries; not float64",
        "triton": f"Triton kernels {where}; not float64",
        "cpu": f"fused C++ for CPU tensors, {_instruction_set()}",
        "reference": "plain PyTorch, any device",
    }
    lines = [f"auto takes {chosen!r} for {torch.device(device).type} tensors"]
    for name in NAMES:
        problem = why_not(name)
        state = f"available: {what[name]}" if problem is None else f"not available: {problem}"
        lines.append(f"  {name:<10} {state}")
    if _forced is not None:
        lines.append(f"  forced to {_forced!r} by backends.use()")
    return "\n".join(lines)


def _instruction_set() -> str:
    if not _cpu_ready:
        return platform.machine()
    name: str = importlib.import_module("bahdanau_fast._C_cpu").instruction_set()
    return f"{name} kernels"


def resolve(
    device: torch.device,
    name: str | None = None,
    dtype: torch.dtype = torch.float32,
    step: bool = True,
) -> str:
    """The backend that serves a call on ``device``.

    Args:
        device: where the data is.
        name: a backend asked for by name; None takes that of ``use()``, else the fastest.
        dtype: of the data.
        step: CUDA C++ could serve it, by its size.

    Raises:
        ValueError: the name is unknown, or that backend cannot serve this device or dtype here.
    """
    kind = device.type
    there = _there(kind, step)
    backend, _ = choose_backend(
        _asked(name), kind, dtype, there, checks.plain_only(), _INTERPRETED, step=step
    )
    return backend


def decide(call: Call) -> Route:
    """How a call is computed: collects the facts and asks :func:`route.route`, once a call.

    Args:
        call: what is to be computed.

    Raises:
        ValueError: as :func:`resolve`.
    """
    queries, keys, values, w_v, w_q, w_k, bias, _, _, dropout_p = call[:10]
    inside, located, scores_only = call.inside, call.located, call.scores_only
    scored = w_v if isinstance(w_v, Tensor) else None
    inputs: tuple[Tensor | None, ...] = (queries, keys, values, scored, w_q, w_k, bias)
    general = scores_only or inside is not TANH
    if general:  # not tanh alone, as far as anybody can see at once
        general = scores_only or inside.features is not None or inside.activation != "tanh"
        general, inputs = general or located is not None, (*inputs, *inside[:2], *(located or ()))
    device = queries.device
    doing = checks.what_torch_does(device, inputs, scored is None)
    asked = None if call.backend is None and _forced is None else _asked(call.backend)
    sharded = (scores_only or located is not None) and checks.is_sharded(queries)
    kinds = (queries.dtype, w_q is None, w_k is None, scored is None, dropout_p > 0.0)
    if doing[0]:
        return _decided(device, kinds, doing, asked, sharded, general)
    hidden = queries.shape[2] if scored is None else scored.shape[-1]
    sizes = queries.shape, keys.shape, values.shape[2], hidden
    # Looked up rather than decided again: a small call takes little longer than the decision. What
    # is there may change with `why_not` alone.
    known = why_not, device, kinds, doing, asked, sharded, general, sizes
    found = _routes.get(known)
    if found is None:
        if len(_routes) >= MOST_ROUTES:
            _routes.clear()
        found = _routes[known] = _decided(*known[1:])
    return found


def _decided(
    device: torch.device,
    kinds: tuple[Any, ...],
    doing: tuple[bool, ...],
    asked: str | None,
    sharded: bool,
    general: bool,
    # While code is traced no size may decide, or it would be compiled anew for each.
    sizes: tuple[Any, ...] = ((0, 0, 0), (0, 0, 0), 0, 0),
) -> Route:
    (batch, queries_len, query_size), (_, keys_len, key_size), value_size, hidden = sizes
    dtype, queries_projected, keys_projected, called, drops = kinds
    traced, records, of_inference, plain_only, autocast = doing
    step = is_cuda_step(traced, queries_len, hidden, general)
    return route(
        Facts(
            device=device.type,
            dtype=dtype,
            batch=batch,
            queries_len=queries_len,
            keys_len=keys_len,
            query_size=query_size,
            key_size=key_size,
            value_size=value_size,
            hidden=hidden,
            queries_projected=queries_projected,
            keys_projected=keys_projected,
            called=called,
            records=records,
            drops=drops,
            traced=traced,
            plain_only=plain_only,
            autocast=autocast,
            asked=asked,
            there=_there(device.type, step),
            interpreted=asked is not None and _INTERPRETED,
            plain_inputs=of_inference or sharded,
            general=general,
        )
    )


_routes: dict[tuple[Any, ...], Route] = {}
MOST_ROUTES = 4096


def keeps_table(backend: str, projected_keys: Tensor, queries_len: int = 1) -> bool:
    """Whether the keys of a memory get a table of exponentials.

    Args:
        backend: that serves the calls on it.
        projected_keys: (B,Tk,H).
        queries_len: Tq of the calls to come.
    """
    if checks.is_exporting():  # the precision of a table goes by the size
        return False
    return _keeps_table(backend, projected_keys.numel(), queries_len)


def decide_decoder(
    plain: bool, dtype: torch.dtype, projected_keys: Tensor, values: Tensor
) -> tuple[str, torch.dtype | None, str]:
    """The backend that attends in a decoder, the dtype of one operator for all steps, and why.

    Args:
        plain: nothing but the parameters of its layers decides what they compute.
        dtype: of the inputs.
        projected_keys: (B,Tk,H) of its memory.
        values: (B,Tk,Dv) of its memory.

    Returns:
        The backend; the dtype, or None where steps go one by one; the reason.

    Raises:
        ValueError: as :func:`resolve`.
    """
    step = is_cuda_step(False, 1, projected_keys.shape[2], general=False)
    dtypes = {dtype, projected_keys.dtype, values.dtype}
    autocast = checks.autocast_dtype(values.device)
    if torch.float64 in dtypes:  # which autocast leaves alone
        autocast = None
    facts = DecoderFacts(
        plain=plain,
        device=values.device.type,
        backend=resolve(values.device, dtype=autocast or dtype, step=step),
        dtypes=frozenset(dtypes if autocast is None else {autocast}),
        autocast=autocast is not None,
        empty=0 in values.shape,
        traced=torch.compiler.is_compiling(),
        plain_only=checks.in_transform(),
    )
    return facts.backend, *route_decoder(facts)


def _asked(name: str | None) -> str | None:
    wanted = name or _forced
    if wanted is not None and wanted != "auto":
        _check_name(wanted)
    return wanted


def _there(device: str, step: bool) -> tuple[str, ...]:
    """The backends that may serve tensors of a kind of device."""
    found: tuple[str, ...] = _ON_CPU if device != "cuda" else _on_gpu(step)
    return found


def _on_gpu(step: bool = True) -> tuple[str, ...]:
    """The backends that can serve CUDA tensors; a step that CUDA C++ serves needs no other."""
    has_cuda = why_not("cuda") is None
    if has_cuda and step:  # Triton is loaded where it is needed
        return ("cuda", "reference")
    has_triton = why_not("triton") is None
    return (*["cuda"] * has_cuda, *["triton"] * has_triton, "reference")


def _check_name(name: str) -> None:
    if name not in NAMES:
        known = ", ".join(repr(n) for n in ("auto", *NAMES))
        checks.reject(ValueError, "backend", f"be one of {known}", repr(name))
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

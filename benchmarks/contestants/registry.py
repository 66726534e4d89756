"""The registry: who computes what."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bahdanau_fast as bf
from bahdanau_fast import backends, run
from bahdanau_fast.call import Call
from bahdanau_fast.memory import ProjectedKeys, project

from ..cases import Inputs
from . import (
    MASKED,
    TASKS,
    Attention,
    Builder,
    CourseAttention,
    Outputs,
    Provider,
    Runnable,
    Unavailable,
    compiled,
    course_attend,
    decode,
    function,
    rewrite,
)

Module = CourseAttention | bf.AdditiveAttention


def by_name(name: str) -> Provider:
    """The provider of that name."""
    return next(provider for provider in PROVIDERS if provider.name == name)


# --- functions ----------------------------------------------------------------------------------


def _tuned() -> Attention:
    from torch._inductor import config

    config.coordinate_descent_tuning = True
    return compiled(rewrite, "max-autotune-no-cudagraphs")


def _course_projected(
    queries: Tensor, keys: Tensor, values: Tensor, w_v: Tensor, valid_lens: Tensor | None
) -> Outputs:
    return course_attend(queries, keys, values, partial(F.linear, weight=w_v), valid_lens)


def _expert() -> Attention:
    from .expert import Attention  # Triton may not be there

    def attention(queries: Tensor, *rest: Any) -> Outputs:
        given, (w_q,) = rest[:4], rest[4:] or (None,)
        return Attention.apply(queries if w_q is None else F.linear(queries, w_q), *given)

    return attention


def additive(
    queries: Tensor, keys: Tensor, values: Tensor, w_v: Tensor, valid_lens: Tensor | None,
    w_q: Tensor, w_k: Tensor, **more: Any,
) -> Outputs:  # fmt: skip
    """Our public function, its arguments in the order of the others."""
    return bf.additive_attention(queries, keys, values, w_q, w_k, w_v, valid_lens, **more)


def _masked(*given: Any) -> Outputs:
    """Ours with its lengths as a mask."""
    (_, keys, _, _, lens), weights = given[:5], given[5:]
    mask = torch.arange(keys.shape[1], device=lens.device) < lens[:, None]
    return additive(*given[:4], None, *weights, mask=mask)


def _in_front(*given: Any) -> Outputs:
    """A step of ours whose queries are projected by the library."""
    queries, keys, *rest, w_q = given
    backend = backends.resolve(keys.device)
    projected = ProjectedKeys(keys, None, None)
    return attend_projected(backend, F.linear(queries, w_q), projected, *rest)


def _op_projected(inputs: Inputs, ready: bool = False) -> Runnable:
    backend = backends.resolve(inputs.keys.device)
    if inputs.keys.is_cuda:  # bench-compare runs this with older versions of the package, too
        from bahdanau_fast.backends.route import is_step

        step = is_step(False, inputs.queries.shape[1], inputs.w_v.shape[1], general=False)
        backend = backends.resolve(inputs.keys.device, step=step)
    projected = inputs.projected_keys
    prepared = ProjectedKeys(projected, None, None)
    if ready:
        prepared = project(projected, backends.keeps_table(backend, projected))
    rest = inputs.values, inputs.w_v, inputs.valid_lens
    call = partial(attend_projected, backend, inputs.projected_queries, prepared, *rest)
    return Runnable(call, inputs.leaves("projected"))


def attend_projected(
    backend: str, queries: Tensor, keys: ProjectedKeys, values: Tensor, w_v: Tensor,
    valid_lens: Tensor | None,
) -> Outputs:  # fmt: skip
    """Ours, after the projections of queries (B,Tq,H) and keys."""
    given = Call(
        queries, keys.keys, values, w_v, valid_lens=valid_lens, projected=keys, backend=backend
    )
    return run.attend(given)


# --- modules ------------------------------------------------------------------------------------


def _with_parameters(inputs: Inputs, module: nn.Module) -> tuple[Tensor, ...]:
    """The leaves of the full task, the weights being those of a module."""
    own = ("W_q.weight", "W_k.weight", "w_v.weight")
    return inputs.leaves("full")[: -len(own)] + tuple(map(module.get_parameter, own))


def _sharing_weights(cls: type[Module], inputs: Inputs) -> Module:
    """A module of a class, on the same storage of weights as every other provider."""
    (hidden, query_size), key_size = inputs.w_q.shape, inputs.w_k.shape[1]
    module = cls(key_size, query_size, hidden).eval()
    for name in ("W_q", "W_k", "w_v"):
        weight: Tensor = getattr(inputs, name.lower())
        getattr(module, name).weight = nn.Parameter(weight.detach())
    return module


_course = partial(_sharing_weights, CourseAttention)
_ours = partial(_sharing_weights, bf.AdditiveAttention)


def _fused(inputs: Inputs) -> Module:
    """The course's module after ``bf.fuse``."""
    module = _course(inputs)
    bf.fuse(module, (inputs.queries, inputs.keys, inputs.values, inputs.valid_lens))
    return module


def _weights(module: Module) -> Tensor:
    if module.attention_weights is None:
        raise RuntimeError("the module left no attention_weights")
    return module.attention_weights


def _forget(module: Module) -> None:
    """Our module keeps the projection of its last keys: those of the next call are new to it."""
    if isinstance(module, bf.AdditiveAttention):
        module._cache._entry = module._cache._last = None


def _on_new_keys(make: Callable[[Inputs], Module], inputs: Inputs, steps: bool = False) -> Runnable:
    """A module's call on new keys, or with ``steps`` a loop of calls on the same keys."""
    module = make(inputs)

    def step(query: Tensor) -> Outputs:
        context = module(query, inputs.keys, inputs.values, inputs.valid_lens)
        return context, _weights(module)

    def forward() -> Outputs:
        _forget(module)
        return decode(step, inputs.queries) if steps else step(inputs.queries)

    return Runnable(forward, _with_parameters(inputs, module))


def _on_memory(inputs: Inputs, steps: bool = False) -> Runnable:
    """A step on a memory, or with ``steps`` a loop, its memory included."""
    module = _ours(inputs)

    def remember() -> Any:
        return module.memory(inputs.keys, inputs.values, inputs.valid_lens)

    def step(query: Tensor, memory: Any) -> Outputs:
        return module.attend(query, memory), _weights(module)

    if steps:
        leaves = _with_parameters(inputs, module)
        return Runnable(lambda: decode(partial(step, memory=remember()), inputs.queries), leaves)
    with torch.no_grad():
        memory = remember()
    return Runnable(lambda: step(inputs.queries, memory), ())


def _module(make: Callable[[Inputs], Module]) -> dict[str, Builder]:
    call = partial(_on_new_keys, make)
    return {"full": call, "loop": partial(call, steps=True)}


# --- other libraries ----------------------------------------------------------------------------

# On the same tensors, each in a process of its own. The libraries are optional (group ``peers``); a
# row names those that are missing. Only forward passes are compared. docs/performance.md says how
# formula or result differ from ours.


def imported(name: str, package: str) -> Any:
    """A module of an optional package.

    Raises:
        Unavailable: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{package} is not installed ({error})") from error


def _mask(inputs: Inputs) -> Tensor | None:
    """(B,Tk), true where a key counts."""
    if inputs.valid_lens is None:
        return None
    return torch.arange(inputs.keys.shape[1]) < inputs.valid_lens[:, None]


def _ready(inputs: Inputs) -> list[Tensor]:
    """Projected queries and keys, and values."""
    given = inputs.projected_queries, inputs.projected_keys, inputs.values
    return [tensor.detach() for tensor in given]


def _keras(backend: str, inputs: Inputs) -> Runnable:
    if os.environ.get("KERAS_BACKEND") != backend:
        raise Unavailable(f"KERAS_BACKEND must be {backend} from the start of the process")
    jax = imported("jax", "jax") if backend == "jax" else None
    keras = imported("keras", "keras")
    (query, key, value), mask = _ready(inputs), _mask(inputs)
    layer = keras.layers.AdditiveAttention(use_scale=True)
    layer.build([tuple(query.shape), tuple(value.shape), tuple(key.shape)])
    layer.set_weights([inputs.w_v.detach().reshape(-1).numpy()])

    def call(query: Any, value: Any, key: Any, mask: Any) -> Any:
        masks = None if mask is None else [None, mask]
        return layer([query, value, key], mask=masks, return_attention_scores=True)

    if jax is None:
        return Runnable(lambda: call(query, value, key, mask), ())
    given = [x if x is None else jax.numpy.asarray(x.numpy()) for x in (query, value, key, mask)]
    jitted = jax.jit(call)

    def forward() -> Outputs:
        context, weights = jax.block_until_ready(jitted(*given))
        return torch.from_dlpack(context), torch.from_dlpack(weights)

    return Runnable(forward, ())


def _joeynmt(inputs: Inputs) -> Runnable:
    attention = imported("joeynmt.attention", "joeynmt").BahdanauAttention
    (hidden, query_size), key_size = inputs.w_q.shape, inputs.w_k.shape[1]
    module = attention(hidden_size=hidden, key_size=key_size, query_size=query_size).eval()
    module.query_layer.weight = nn.Parameter(inputs.w_q.detach())
    module.key_layer.weight = nn.Parameter(inputs.w_k.detach())
    module.energy_layer.weight = nn.Parameter(inputs.w_v.detach())
    with torch.no_grad():
        module.compute_proj_keys(inputs.keys)
    mask = _mask(inputs)
    if mask is None:
        mask = torch.ones(inputs.keys.shape[:2], dtype=torch.bool)
    mask = mask[:, None]
    return Runnable(lambda: module(inputs.queries, mask, inputs.values), ())


def _keops(inputs: Inputs) -> Runnable:
    lazy: Any = imported("pykeops.torch", "pykeops").LazyTensor
    query, key, value = _ready(inputs)
    query = query[:, :, None].contiguous()  # (B,Tq,1,H)
    key, value = key[:, None].contiguous(), value[:, None].contiguous()  # (B,1,Tk,H)
    w_v = inputs.w_v.detach().reshape(1, 1, 1, -1)
    mask = _mask(inputs)
    bias = None if mask is None else torch.where(mask, 0.0, MASKED)[:, None, :, None]

    def forward() -> tuple[Tensor, None]:
        doubled = 2 * (lazy(query) + lazy(key))
        scores = ((1 - 2 / (1 + doubled.exp())) * lazy(w_v)).sum(-1)
        if bias is not None:
            scores = scores + lazy(bias.contiguous())
        return scores.sumsoftmaxweight(lazy(value), axis=2), None

    return Runnable(forward, ())  # type: ignore[arg-type]  # the parity check allows missing weights


class _Graph(nn.Module):
    """The rewrite as the module that torch.onnx exports."""

    def forward(self, *given: Any) -> Outputs:
        return rewrite(*given)


def _onnx(step: bool, inputs: Inputs) -> Runnable:
    runtime = imported("onnxruntime", "onnxruntime")
    for package in ("onnx", "onnxscript"):
        imported(package, package)
    queries, keys, values = _ready(inputs)
    given = (queries, keys, values, inputs.w_v.detach(), inputs.valid_lens)
    if step:
        given = (inputs.queries.detach(), *given[1:], inputs.w_q.detach())
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "attention.onnx"))
        torch.onnx.export(_Graph().eval(), given, path, dynamo=True, verbose=False)
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    tensors = [x.numpy() for x in given if x is not None]
    feeds = dict(zip(names, tensors, strict=True))

    def forward() -> Outputs:
        context, weights = session.run(None, feeds)
        return torch.from_numpy(context), torch.from_numpy(weights)

    return Runnable(forward, ())


def _peer(name: str, builders: dict[str, Builder], **variables: str) -> Provider:
    return Provider(name, "peer", builders, on_demand=True, process=tuple(variables.items()))


LIBRARIES: tuple[Provider, ...] = (
    _peer("Keras (torch)", {"projected": partial(_keras, "torch")}, KERAS_BACKEND="torch"),
    _peer("Keras (JAX)", {"projected": partial(_keras, "jax")}, KERAS_BACKEND="jax"),
    _peer("JoeyNMT", {"step": _joeynmt}),
    _peer("KeOps", {"projected": _keops}),
    _peer("ONNX Runtime", {task: partial(_onnx, task == "step") for task in ("projected", "step")}),
)

# --- the registry -------------------------------------------------------------------------------

_D2L = _module(_course)
PROVIDERS: tuple[Provider, ...] = (
    Provider(
        "d2l eager",
        "eager",
        {**_D2L, "step": _D2L["full"], **function(lambda: _course_projected, "projected")},
    ),
    Provider("rewrite eager", "eager", function(lambda: rewrite, *TASKS)),
    Provider("compiled", "compiled", function(lambda: compiled(rewrite), *TASKS)),
    Provider(
        "compiled max-autotune",
        "compiled",
        function(lambda: compiled(rewrite, "max-autotune"), *TASKS),
        on_demand=True,
    ),
    Provider("ours module", "ours", _module(_ours)),
    Provider("ours memory", "ours", {"step": _on_memory, "loop": partial(_on_memory, steps=True)}),
    Provider(
        "ours op",
        "ours",
        {
            **function(lambda: additive, "full"),
            "projected": _op_projected,
            "scan": partial(_op_projected, ready=True),
        },
    ),
    # On a GPU.
    Provider("expert", "expert", function(_expert, "projected", "step"), on_demand=True),
    Provider("compiled, tuned", "compiled", function(_tuned, *TASKS), on_demand=True),
    Provider(
        "ours compiled", "compiled", function(lambda: compiled(additive), "full"), on_demand=True
    ),
    Provider("W_q in front", "ours", function(lambda: _in_front, "step"), on_demand=True),
    Provider("ours, masked", "ours", function(lambda: _masked, "full"), on_demand=True),
    Provider("d2l fused", "ours", _module(_fused), on_demand=True),
    *LIBRARIES,
)

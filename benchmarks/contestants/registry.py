"""The registry: who computes what."""

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
    return next(provider for provider in PROVIDERS if provider.name == name)


# --- functions ----------------------------------------------------------------------------------


def _tuned() -> Attention:
    from torch._inductor import config

    config.coordinate_descent_tuning = True
    return compiled(rewrite, "max-autotune-no-cudagraphs")


def _course_projected(*given: Any) -> Outputs:
    *sources, w_v, valid_lens = given
    return course_attend(*sources, partial(F.linear, weight=w_v), valid_lens)


def _expert() -> Attention:
    from .expert import Attention  # Triton may not be there

    def attention(queries: Tensor, *rest: Any) -> Outputs:
        given, (w_q,) = rest[:4], rest[4:] or (None,)
        return Attention.apply(queries if w_q is None else F.linear(queries, w_q), *given)

    return attention


def _additive(*given: Any) -> Outputs:
    """Our public function, its arguments in the order of the others."""
    queries, keys, values, w_v, valid_lens, w_q, w_k = given
    return bf.additive_attention(queries, keys, values, w_q, w_k, w_v, valid_lens)


def _op_projected(inputs: Inputs, ready: bool = False) -> Runnable:
    """Ours, after the projections of queries (B,Tq,H) and keys; ``ready``: with its table."""
    backend, keys = backends.resolve(inputs.keys.device), inputs.projected_keys
    if keys.is_cuda:  # bench-compare runs this with older versions of the package, too
        from bahdanau_fast.backends.route import is_step

        step = is_step(False, inputs.queries.shape[1], inputs.w_v.shape[1], general=False)
        backend = backends.resolve(keys.device, step=step)
    projected = ProjectedKeys(keys, None, None)
    if ready:
        projected = project(keys, backends.keeps_table(backend, keys))
    given = inputs.projected_queries, projected.keys, inputs.values, inputs.w_v
    more = {"valid_lens": inputs.valid_lens, "projected": projected, "backend": backend}
    return Runnable(lambda: run.attend(Call(*given, **more)), inputs.leaves("projected"))


# --- modules ------------------------------------------------------------------------------------


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


def _on_new_keys(make: Callable[[Inputs], Module], inputs: Inputs, steps: bool = False) -> Runnable:
    """A module's call on new keys, or with ``steps`` a loop of calls on the same keys."""
    module: Any = make(inputs)

    def step(query: Tensor) -> Outputs:
        context = module(query, inputs.keys, inputs.values, inputs.valid_lens)
        return context, module.attention_weights

    def forward() -> Outputs:
        if isinstance(module, bf.AdditiveAttention):  # which keeps the projection of its last keys
            module._cache._entry = module._cache._last = None
        return decode(step, inputs.queries) if steps else step(inputs.queries)

    own = map(module.get_parameter, ("W_q.weight", "W_k.weight", "w_v.weight"))
    return Runnable(forward, (*inputs.leaves("full")[:-3], *own))


def _on_memory(inputs: Inputs) -> Runnable:
    module: Any = _ours(inputs)
    with torch.no_grad():
        memory = module.memory(inputs.keys, inputs.values, inputs.valid_lens)
    return Runnable(lambda: (module.attend(inputs.queries, memory), module.attention_weights), ())


def _module(make: Callable[[Inputs], Module]) -> dict[str, Builder]:
    call = partial(_on_new_keys, make)
    return {"full": call, "loop": partial(call, steps=True)}


# --- other libraries ----------------------------------------------------------------------------

# On the same tensors, each in a process of its own. The libraries are optional (group ``peers``); a
# row names those that are missing. Only forward passes are compared. docs/performance.md says how
# formula or result differ from ours.


def imported(name: str, package: str) -> Any:
    """A module of an optional package, or Unavailable."""
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
_D2L |= {"step": _D2L["full"], **function(lambda: _course_projected, "projected")}
_OP = {"projected": _op_projected, "scan": partial(_op_projected, ready=True)}
PROVIDERS: tuple[Provider, ...] = (
    Provider("d2l eager", "eager", _D2L),
    Provider("rewrite eager", "eager", function(lambda: rewrite, *TASKS)),
    Provider("compiled", "compiled", function(lambda: compiled(rewrite), *TASKS)),
    Provider(
        "compiled max-autotune",
        "compiled",
        function(lambda: compiled(rewrite, "max-autotune"), *TASKS),
        on_demand=True,
    ),
    Provider("ours module", "ours", _module(_ours)),
    Provider("ours memory", "ours", {"step": _on_memory}),
    Provider("ours op", "ours", function(lambda: _additive, "full") | _OP),
    # On a GPU.
    Provider("expert", "expert", function(_expert, "projected", "step"), on_demand=True),
    Provider("compiled, tuned", "compiled", function(_tuned, *TASKS), on_demand=True),
    *LIBRARIES,
)

"""Additive attention of other libraries on the same tensors, each in a process of its own.

The libraries are optional (extra ``peers``); a row names those that are missing. Only
forward passes are compared. ``DIFFERENCES`` says how formula or result differ from ours.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..workloads.shapes import Inputs
from . import baselines
from .baselines import Unavailable
from .providers import Outputs, Provider, Runnable

DIFFERENCES = {
    "Keras (torch)": "no W_q and W_k of its own, so it is given projected queries and keys; run as "
    "Keras runs it, eagerly",
    "Keras (JAX)": "the same layer, compiled by XLA for the CPU under jax.jit",
    "JoeyNMT": "one query per row; masked scores are -inf, so a row with no valid key is NaN",
    "KeOps": "has no tanh, which is written 1 - 2 / (1 + exp(2x)); gives the context alone, no "
    "weights",
    "ONNX Runtime": "the rewrite, exported by torch.onnx and run by the CPU provider",
}


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


# --- Keras --------------------------------------------------------------------------------------


def _keras(backend: str, inputs: Inputs) -> tuple[Any, Callable[..., Any]]:
    if os.environ.get("KERAS_BACKEND") != backend:
        raise Unavailable(f"KERAS_BACKEND must be {backend} from the start of the process")
    keras = imported("keras", "keras")
    query, key, value = inputs.projected_queries, inputs.projected_keys, inputs.values
    layer = keras.layers.AdditiveAttention(use_scale=True)
    layer.build([tuple(query.shape), tuple(value.shape), tuple(key.shape)])
    layer.set_weights([inputs.w_v.detach().reshape(-1).numpy()])

    def call(query: Any, value: Any, key: Any, mask: Any) -> Any:
        masks = None if mask is None else [None, mask]
        return layer([query, value, key], mask=masks, return_attention_scores=True)

    return keras, call


def _keras_torch(inputs: Inputs) -> Runnable:
    _, call = _keras("torch", inputs)
    mask = _mask(inputs)
    tensors = [t.detach() for t in (inputs.projected_queries, inputs.values, inputs.projected_keys)]
    return Runnable(lambda: call(*tensors, mask), ())


def _keras_jax(inputs: Inputs) -> Runnable:
    jax = imported("jax", "jax")
    _, call = _keras("jax", inputs)
    mask = _mask(inputs)
    tensors = (inputs.projected_queries, inputs.values, inputs.projected_keys)
    arrays = [jax.numpy.asarray(tensor.detach().numpy()) for tensor in tensors]
    arrays.append(None if mask is None else jax.numpy.asarray(mask.numpy()))
    jitted = jax.jit(call)

    def forward() -> Outputs:
        context, weights = jax.block_until_ready(jitted(*arrays))
        return torch.from_dlpack(context), torch.from_dlpack(weights)

    return Runnable(forward, ())


# --- JoeyNMT ------------------------------------------------------------------------------------


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


# --- KeOps --------------------------------------------------------------------------------------


def _keops(inputs: Inputs) -> Runnable:
    lazy: Any = imported("pykeops.torch", "pykeops").LazyTensor
    query = inputs.projected_queries.detach()[:, :, None].contiguous()  # (B,Tq,1,H)
    key = inputs.projected_keys.detach()[:, None].contiguous()  # (B,1,Tk,H)
    value = inputs.values.detach()[:, None].contiguous()
    w_v = inputs.w_v.detach().reshape(1, 1, 1, -1)
    mask = _mask(inputs)
    bias = None if mask is None else torch.where(mask, 0.0, baselines.MASKED)[:, None, :, None]

    def forward() -> tuple[Tensor, None]:
        doubled = 2 * (lazy(query) + lazy(key))
        scores = ((1 - 2 / (1 + doubled.exp())) * lazy(w_v)).sum(-1)
        if bias is not None:
            scores = scores + lazy(bias.contiguous())
        return scores.sumsoftmaxweight(lazy(value), axis=2), None

    return Runnable(forward, ())  # type: ignore[arg-type]  # the parity check allows missing weights


# --- ONNX Runtime -------------------------------------------------------------------------------


class _Graph(nn.Module):
    """A function of tensors as the module that torch.onnx exports."""

    def __init__(self, function: Callable[..., Outputs]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Outputs:
        return self.function(*tensors)


def _onnx(
    function: Callable[..., Outputs], tensors: tuple[Tensor, ...], lens: Tensor | None
) -> Runnable:
    runtime = imported("onnxruntime", "onnxruntime")
    for package in ("onnx", "onnxscript"):
        imported(package, package)
    arguments = tuple(tensor.detach() for tensor in tensors)
    arguments += () if lens is None else (lens,)
    module = _Graph(lambda *given: function(*given, *(() if lens is not None else (None,)))).eval()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "attention.onnx"))
        torch.onnx.export(module, arguments, path, dynamo=True, verbose=False)
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, arguments, strict=True)}

    def forward() -> Outputs:
        context, weights = session.run(None, feeds)
        return torch.from_numpy(context), torch.from_numpy(weights)

    return Runnable(forward, ())


def _onnx_projected(inputs: Inputs) -> Runnable:
    tensors = (inputs.projected_queries, inputs.projected_keys, inputs.values, inputs.w_v)
    return _onnx(baselines.rewrite, tensors, inputs.valid_lens)


def _onnx_step(inputs: Inputs) -> Runnable:
    def step(w_q: Tensor, *given: Any) -> Outputs:
        return baselines.rewrite(*given, w_q)

    tensors = (inputs.w_q, inputs.queries, inputs.projected_keys, inputs.values, inputs.w_v)
    return _onnx(step, tensors, inputs.valid_lens)


def _peer(
    name: str, builders: dict[str, Callable[[Inputs], Runnable]], **variables: str
) -> Provider:
    return Provider(name, "peer", builders, on_demand=True, process=tuple(variables.items()))


PROVIDERS: tuple[Provider, ...] = (
    _peer("Keras (torch)", {"projected": _keras_torch}, KERAS_BACKEND="torch"),
    _peer("Keras (JAX)", {"projected": _keras_jax}, KERAS_BACKEND="jax"),
    _peer("JoeyNMT", {"step": _joeynmt}),
    _peer("KeOps", {"projected": _keops}),
    _peer("ONNX Runtime", {"projected": _onnx_projected, "step": _onnx_step}),
)

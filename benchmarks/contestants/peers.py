"""Additive attention of other libraries on the same tensors, each in a process of its own.

The libraries are optional (extra ``peers``); a row names those that are missing. Only
forward passes are compared. docs/performance.md says how formula or result differ from ours.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..cases import Inputs
from .baselines import MASKED, Unavailable, rewrite
from .provider import Builder, Outputs, Provider, Runnable


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


def _projected(inputs: Inputs) -> list[Tensor]:
    """Projected queries and keys, and values."""
    given = inputs.projected_queries, inputs.projected_keys, inputs.values
    return [tensor.detach() for tensor in given]


def _keras(backend: str, inputs: Inputs) -> Runnable:
    if os.environ.get("KERAS_BACKEND") != backend:
        raise Unavailable(f"KERAS_BACKEND must be {backend} from the start of the process")
    jax = imported("jax", "jax") if backend == "jax" else None
    keras = imported("keras", "keras")
    (query, key, value), mask = _projected(inputs), _mask(inputs)
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
    query, key, value = _projected(inputs)
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
    queries, keys, values = _projected(inputs)
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


PROVIDERS: tuple[Provider, ...] = (
    _peer("Keras (torch)", {"projected": partial(_keras, "torch")}, KERAS_BACKEND="torch"),
    _peer("Keras (JAX)", {"projected": partial(_keras, "jax")}, KERAS_BACKEND="jax"),
    _peer("JoeyNMT", {"step": _joeynmt}),
    _peer("KeOps", {"projected": _keops}),
    _peer("ONNX Runtime", {task: partial(_onnx, task == "step") for task in ("projected", "step")}),
)

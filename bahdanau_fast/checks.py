"""Before anything is computed: are the inputs right, and what is torch doing?

Input checks are shared by the functions and the modules; a message reads
"<argument> must <requirement>, got <actual>".

Fused operators and custom backward formulas know nothing of ``torch.func``, forward mode and
``torch.jit.trace``: called under one of them they would drop a tangent without a word, or raise an
error about something else. Plain PyTorch operations do what they should.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: What may be applied to the sum inside a score.
ACTIVATIONS = ("tanh", "relu", "leaky_relu", "sigmoid")
#: What lengths may be, beside floating.
INTEGER = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)
LENGTHS = "be None, a tensor or a list of numbers"
MASK = (
    "be bool, True where a query may look (mask == 0 for a float mask of 0 and -inf, mask != 0 for "
    "one of 0 and 1)"
)


def reject(error: type[Exception], name: str, requirement: str, actual: object) -> NoReturn:
    """Raise ``error`` with a message in the form of this package."""
    raise error(f"{name} must {requirement}, got {actual}")


def probability(name: str, value: float) -> None:
    """A number in [0, 1]."""
    _number(name, value)
    if not 0.0 <= value <= 1.0:
        reject(ValueError, name, "be between 0 and 1", value)


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        reject(TypeError, name, "be a number", type(value).__name__)


def finite(name: str, value: float) -> None:
    """A finite number."""
    _number(name, value)
    if not abs(value) < math.inf:  # the compiler cannot trace isfinite of a number that changes
        reject(ValueError, name, "be finite", value)


def positive_int(name: str, value: int) -> None:
    """An integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, int):
        reject(TypeError, name, "be an integer", type(value).__name__)
    if value < 1:
        reject(ValueError, name, "be at least 1", value)


def _no_tensor(name: str, value: object) -> NoReturn:
    of_lstm = " (of an LSTM's state (h, c) pass h[-1])"
    hint = of_lstm if name == "queries" and isinstance(value, tuple) else ""
    reject(TypeError, name, f"be a tensor{hint}", type(value).__name__)


def _floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        _no_tensor(name, tensor)
    if tensor.dtype not in FLOATING:
        reject(TypeError, name, "be float32, bfloat16, float16 or float64", tensor.dtype)
    if tensor.layout != torch.strided:
        reject(TypeError, name, "be a dense (strided) tensor", tensor.layout)


def rows(name: str, tensor: Tensor, of: str = "batch, length, features") -> None:
    """A floating tensor of three dimensions."""
    _floating(name, tensor)
    if tensor.dim() != 3:
        reject(ValueError, name, f"have 3 dimensions ({of})", _shape(tensor))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _is_one_of(shape: tuple[int, ...], *shapes: tuple[int, ...]) -> bool:
    """Whether a shape is one of some; ``in`` cannot compare symbolic sizes in compiled code."""
    if not torch.compiler.is_compiling():
        return shape in shapes
    alike = (other for other in shapes if len(other) == len(shape))
    return any(all(a == b for a, b in zip(shape, other, strict=True)) for other in alike)


def inputs(queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None) -> None:
    """Ranks, batch and length sizes, dtypes and devices of the inputs of attention."""
    rows("queries", queries)
    rows("keys", keys)
    rows("values", values)
    batch, queries_len, _ = queries.shape
    keys_batch, keys_len, _ = keys.shape
    values_batch, values_len, _ = values.shape
    if keys_batch != batch:
        cure = _cure(queries, keys)
        if queries_len == keys_batch and keys_len != batch:
            need = f"have the batch size of keys, {keys_batch}"
            reject(ValueError, "queries", need, f"{_shape(queries)}{cure}")
        need = f"have the batch size of queries, {batch}"
        reject(ValueError, "keys", need, f"{_shape(keys)}{cure}")
    if values_batch != batch or values_len != keys_len:
        need = f"have the batch size and length of keys, ({batch}, {keys_len})"
        reject(ValueError, "values", need, _shape(values))
    same_kind("keys", keys, "queries", queries)
    same_kind("values", values, "queries", queries)
    lens(valid_lens, batch, queries_len, queries.device)


def _cure(queries: Tensor, keys: Tensor) -> str:
    """What may be meant by queries and keys of different batch sizes, and the line to write."""
    (batch, queries_len, _), (keys_batch, keys_len, _) = queries.shape, keys.shape
    of_all = f"; queries of all rows are queries.expand({keys_batch}, -1, -1)" * (batch == 1)
    if keys_len == batch:
        return f": the batch comes first, keys.transpose(0, 1){of_all}"
    if queries_len == keys_batch:
        return f": the last layer of an RNN's state is hidden[-1]{of_all}"
    return ""


def queries_for(
    queries: Tensor, keys: Tensor, valid_lens: Tensor | None, mask: Tensor | None
) -> None:
    """Queries for a memory: its keys (B,Tk,H), lengths and mask were checked before."""
    rows("queries", queries)
    batch, queries_len, _ = queries.shape
    if keys.shape[0] != batch:
        need = f"have the batch size of the memory, {keys.shape[0]}"
        reject(ValueError, "queries", need, f"{_shape(queries)}{_cure(queries, keys)}")
    same_kind("queries", queries, "the memory", keys)
    lens(valid_lens, batch, queries_len, queries.device)
    if mask is not None:
        as_mask(mask, queries.shape[1], keys)


def keys_and_values(
    keys: Tensor, values: Tensor, valid_lens: Tensor | None, mask: Tensor | None = None
) -> Tensor | None:
    """Keys, values, lengths and mask of a memory, without queries; the mask in three dimensions."""
    rows("keys", keys)
    if values is not keys:
        inputs(keys, keys, values, None)
    if mask is not None:
        per_query = isinstance(mask, Tensor) and mask.dim() == 3  # of any number of queries
        queries_len = mask.shape[1] if per_query else 1
        mask = as_mask(mask, queries_len, keys)
    queries_len = 0
    if isinstance(valid_lens, Tensor) and valid_lens.dim() == 2:
        queries_len = valid_lens.shape[1]
    lens(valid_lens, keys.shape[0], queries_len, keys.device)
    return mask


def same_kind(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """One argument must have the device of another and, without autocast, its dtype."""
    if tensor.dtype != other.dtype and autocast_dtype(other.device) is None:
        reject(TypeError, name, f"have the dtype of {other_name}, {other.dtype}", tensor.dtype)
    if tensor.device != other.device:
        need = f"be on the device of {other_name}, {other.device}"
        reject(ValueError, name, need, tensor.device)


def lens(valid_lens: Tensor | None, batch: int, queries_len: int, device: torch.device) -> None:
    """Lengths: None, (B,) or (B,Tq), real numbers, on the device of the data."""
    if valid_lens is None:
        return
    if not isinstance(valid_lens, Tensor):
        reject(TypeError, "valid_lens", LENGTHS, type(valid_lens).__name__)
    if valid_lens.dtype not in INTEGER and valid_lens.dtype not in FLOATING:
        need = "have an integer dtype or float32, bfloat16, float16 or float64"
        mask = " (a bool mask is given as mask=)" if valid_lens.dtype == torch.bool else ""
        reject(TypeError, "valid_lens", need + mask, valid_lens.dtype)
    shape = tuple(valid_lens.shape)
    if not _is_one_of(shape, (batch,), (batch, queries_len)):
        need = f"have shape ({batch},) or ({batch}, {queries_len})"
        reject(ValueError, "valid_lens", need, shape)
    if valid_lens.device != device:
        need = f"be on the device of the data, {device}"
        reject(ValueError, "valid_lens", need, valid_lens.device)


def as_mask(mask: Tensor, queries_len: int, keys: Tensor) -> Tensor:
    """A mask over keys as bool (B,1,Tk) or (B,Tq,Tk)."""
    mask = spread_mask(mask, (keys.shape[0],), queries_len, keys.shape[1])
    if mask.device != keys.device:
        reject(ValueError, "mask", f"be on the device of the data, {keys.device}", mask.device)
    return mask


def spread_mask(mask: Tensor, batch: tuple[int, ...], queries_len: int, keys_len: int) -> Tensor:
    """A mask over keys as bool (*batch,1,Tk) or (*batch,Tq,Tk): itself, or a view of it.

    It is (*batch,Tk), which comes first; or (Tq,Tk) or (1,Tk); or it broadcasts to (*batch,Tq,Tk),
    with as many dimensions.
    """
    if not isinstance(mask, Tensor):
        _no_tensor("mask", mask)
    if mask.dtype != torch.bool:
        reject(TypeError, "mask", MASK, mask.dtype)
    shape, full = _shape(mask), (*batch, queries_len, keys_len)
    if _is_one_of(shape, (*batch, keys_len)):
        return mask.unsqueeze(-2)
    if _is_one_of(shape, (*batch, 1, keys_len), full):
        return mask
    fits = len(shape) == len(full) and all(
        _is_one_of((n,), (1,), (size,)) for n, size in zip(shape, full, strict=True)
    )
    if not fits and not _is_one_of(shape, (1, keys_len), (queries_len, keys_len)):
        need = f"have shape {(*batch, keys_len)} or broadcast to {full}"
        reject(ValueError, "mask", need, shape)
    return mask.expand(*batch, shape[-2], keys_len)


def weight(
    name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor, like_name: str = "queries"
) -> None:
    """A weight matrix: shape, dtype and device."""
    _floating(name, tensor)
    if _shape(tensor) != shape:
        reject(ValueError, name, f"have shape {shape}", _shape(tensor))
    same_kind(name, tensor, like_name, like)


def weights(
    queries: Tensor,
    keys: Tensor,
    w_q: Tensor | None,
    w_k: Tensor | None,
    w_v: Tensor,
    bias: Tensor | None,
) -> int:
    """The weights of a function's call; returns H."""
    if not isinstance(w_v, Tensor):
        _no_tensor("w_v", w_v)
    if w_v.dim() == 1 or (w_v.dim() == 2 and w_v.shape[0] == 1):
        hidden = w_v.shape[-1]
    else:  # it is wrong: others know H
        sizes = [w.shape[0] for w in (w_q, w_k) if isinstance(w, Tensor) and w.dim() == 2]
        hidden = sizes[0] if sizes else queries.shape[-1]
    weight("w_v", w_v, (hidden,) if w_v.dim() == 1 else (1, hidden), queries)
    for name, w, of, x in (("w_q", w_q, "queries", queries), ("w_k", w_k, "keys", keys)):
        if w is not None:
            weight(name, w, (hidden, x.shape[-1]), queries)
        elif x.shape[-1] != hidden:
            need = f"have feature size {hidden} (that of w_v) where {name} is None"
            reject(ValueError, of, need, _shape(x))
    if bias is not None:
        weight("bias", bias, (hidden,), queries)
    return hidden


def features(name: str, tensor: Tensor, size: int) -> None:
    """The feature size of queries or keys must be that of their weight."""
    if tensor.shape[-1] != size:
        of = {"queries": ", query_size", "keys": ", key_size"}.get(name, "")
        need = f"have feature size {size} (that of its weight{of})"
        reject(ValueError, name, need, _shape(tensor))


def known_activation(activation: str, negative_slope: float) -> None:
    """One of :data:`ACTIVATIONS`."""
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        reject(ValueError, "activation", f"be one of {names}", repr(activation))
    finite("negative_slope", negative_slope)


def score_terms(
    features: Tensor | None,
    w_f: Tensor | None,
    activation: str,
    negative_slope: float,
    keys: Tensor,
    hidden: int,
) -> None:
    """Features of the keys (B,Tk,C) with their weight (H,C), and the activation of a score."""
    known_activation(activation, negative_slope)
    if features is None:
        if w_f is not None:
            reject(ValueError, "w_f", "be given with features only", "features None")
        return
    rows("features", features)
    if features.shape[:2] != keys.shape[:2]:
        need = f"have the batch size and length of keys, {_shape(keys)[:2]}"
        reject(ValueError, "features", need, _shape(features))
    same_kind("features", features, "keys", keys)
    if w_f is None:
        reject(ValueError, "w_f", "be given with features", None)
    weight("w_f", w_f, (hidden, features.shape[2]), keys, "keys")


def is_exporting() -> bool:
    """Whether ``torch.export`` is at work."""
    # Dynamo of torch 2.10 takes torch.compiler.is_exporting() for true wherever it compiles.
    return torch.compiler._is_exporting_flag


def in_transform(compiling: bool | None = None) -> bool:
    """Whether ``torch.func``, a forward-mode level or ``torch.jit.trace`` is at work."""
    if compiling is None:
        compiling = torch.compiler.is_compiling()
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (not compiling and torch._C._is_tracing())
    )


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these inputs."""
    if torch.compiler.is_compiling():  # by what the compiler can trace
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return (
        torch.is_grad_enabled()
        and bool(torch._C._any_requires_grad(*tensors))
        and not torch.is_inference_mode_enabled()  # even within enable_grad()
    )


class TorchState(NamedTuple):
    """What torch does around a call."""

    traced: bool = False  # torch.compile or torch.export is tracing it
    records: bool = False  # a gradient may be asked for
    of_inference: bool = False  # and an input is a tensor of inference mode
    # Only plain operations will do: under ``torch.func``, forward mode, ``torch.jit.trace`` and
    # ``torch.onnx.export``.
    plain_only: bool = False
    autocast: bool = False  # matrix products take another dtype


_RECORDED, _UNRECORDED = TorchState(records=True), TorchState()


def torch_state(
    device: torch.device, inputs: tuple[Tensor | None, ...], called: bool
) -> TorchState:
    """Around a call with these inputs, or ``called``, of a layer of unknown parameters."""
    # All of it at once: a small call costs little more than these questions.
    if torch.compiler.is_compiling():
        records = torch.is_grad_enabled() and (called or needs_gradient(*inputs))
        return TorchState(True, records, False, plain_only(), autocast_dtype(device) is not None)
    # Nothing is recorded in inference mode, even within enable_grad().
    records = torch.is_grad_enabled() and (
        called or (torch._C._any_requires_grad(*inputs) and not torch.is_inference_mode_enabled())
    )
    of_inference = False
    if records:
        for tensor in inputs:
            if tensor is not None and tensor.is_inference():
                of_inference = True
    autocast = torch._C._is_any_autocast_enabled() and autocast_dtype(device) is not None
    plain = in_transform(False)
    if of_inference or autocast or plain:
        return TorchState(False, records, of_inference, plain, autocast)
    return _RECORDED if records else _UNRECORDED


def plain_only() -> bool:
    """Whether only plain PyTorch operations will do: ONNX has only standard operators."""
    return in_transform() or (is_exporting() and torch.onnx.is_in_onnx_export())


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) is Tensor or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast gives matrix products on a device, None where it is off."""
    kind = device.type  # is_autocast_enabled raises for a device without autocast (meta)
    # Dynamo of torch 2.11 cannot trace is_autocast_available.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if kind == "meta" or not available or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def softmax_in_fp32(device: torch.device) -> bool:
    """Whether autocast gives the result of a softmax in fp32: on GPUs it does, on the CPU not."""
    return device.type == "cuda" and torch.is_autocast_enabled("cuda")

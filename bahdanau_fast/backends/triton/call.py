"""What the Triton kernels of one call have in common: inputs laid out, types, lengths, dropout."""

from __future__ import annotations

import functools
import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks, limits
from bahdanau_fast.backends import availability
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.softmax import lengths_kernel
from bahdanau_fast.kernels.tables import tables_kernel

__all__ = [
    "DTYPES",
    "Call",
    "Table",
    "lengths",
    "make_table",
    "precision",
    "processors",
    "rows",
    "strides",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_DROPOUT: dict[str, Any] = {"seed": None, "threshold": 0, "scale_bits": 0}


class Call:
    """What the kernels of one call have in common.

    Args:
        queries: (B,Tq,H), or raw queries; the others likewise, as the operators have them.
        keys: (B,Tk,H).
        values: (B,Tk,Dv).
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq).
        mask: None, or bool (B,Tk), (B,1,Tk) or (B,Tq,Tk).
        seed: (1,) int64, with dropout.
        dropout_p: probability of dropping a weight.
        features: None, or (B,Tk,C), whose projection is added to the keys.
        w_f: (H,C); with features.
        activation: a place in ``checks.ACTIVATIONS``.
        negative_slope: of leaky ReLU.

    Raises:
        TypeError: a dtype that these kernels do not compute, or of lengths or a mask.
        ValueError: lengths, a mask or features of another shape or device; no such activation.

    Attributes:
        inside: features and w_f, or None; ``plain_keys`` are the keys without them.
        seen: lengths and mask as kernels take them, by name; what is absent is None.
        dropout: the seed and the numbers of dropout, likewise.
        counted: where forward writes how many keys the lengths leave, likewise.
    """

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        w_v: Tensor,
        valid_lens: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None = None,
        dropout_p: float = 0.0,
        features: Tensor | None = None,
        w_f: Tensor | None = None,
        activation: int = 0,
        negative_slope: float = 0.0,
    ) -> None:
        if queries.dtype not in DTYPES:
            checks.reject(TypeError, "queries", "be float32, bfloat16 or float16", queries.dtype)
        if features is not None or w_f is not None or activation != 0:
            name = dict(enumerate(checks.ACTIVATIONS)).get(activation, str(activation))
            checks.inside(features, w_f, name, negative_slope, keys, w_v.numel())
        self.inside: tuple[Tensor, Tensor] | None = None
        if features is not None and w_f is not None:
            self.inside = rows(features), w_f.contiguous()
        self.queries, self.plain_keys, self.values = map(rows, (queries, keys, values))
        self.w_v = w_v.reshape(-1).contiguous()
        self.batch, self.queries_len = queries.shape[:2]
        self.hidden = w_v.numel()
        self.keys_len, self.features = values.shape[1:]
        # The kernels would read whatever comes as lengths, also past its end.
        checks.lens(valid_lens, self.batch, self.queries_len, queries.device)
        mask = None if mask is None else checks.as_mask(mask, queries, values)
        self.device, self.size = queries.device, queries.element_size()
        self.limits = limits.of_gpu(queries.device)
        self.kind: dict[str, Any] = {"slope": float(negative_slope), "ACTIVATION": activation}
        self.kind |= {"PRECISE": queries.dtype == torch.float32, "NATIVE": native()}
        self.seen: dict[str, Any] = {"lens": valid_lens, **strides(lens=valid_lens)}
        self.seen |= {"mask": mask, **strides(mask=mask)}
        self.seen["mask_key"] = 0 if mask is None else mask.stride(2)
        self.counted: dict[str, Any] = {"counts": None, "counts_row": 0}
        self.dropout = NO_DROPOUT
        if dropout_p > 0.0:
            scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
            (bits,) = struct.unpack("q", struct.pack("d", scale))
            threshold = -int(-dropout_p * 2**32 // 1)
            self.dropout = {"seed": seed, "threshold": threshold, "scale_bits": bits}

    @functools.cached_property
    def keys(self) -> Tensor:
        """The keys, with the projected features added."""
        keys = self.plain_keys
        if self.inside is not None:
            features, w_f = self.inside
            keys = torch.addmm(keys.flatten(0, 1), features.flatten(0, 1), w_f.t())
            keys = keys.view_as(self.plain_keys)
        return keys

    @functools.cached_property
    def precision(self) -> str:
        """How products are made."""
        return precision()

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor beside the inputs, of the type computed in unless told."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def guard(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device: make that the one of the inputs."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class Table(NamedTuple):
    """Of projected rows exp(2 x), in fp32 tanh(x) after them, and max|x| of each; or neither."""

    entries: Tensor | None
    largest: Tensor | None


def rows(x: Tensor) -> Tensor:
    """``x`` with its features side by side, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def strides(**tensors: Tensor | None) -> dict[str, int]:
    """The first two strides of each, as kernels name them; 0 where a tensor is the same for all."""
    found = {}
    for name, x in tensors.items():
        several = x is not None and x.dim() > 1 and x.shape[1] > 1
        found[f"{name}_batch"] = 0 if x is None else x.stride(0)
        found[f"{name}_row"] = x.stride(1) if x is not None and several else 0
    return found


def lengths(call: Call) -> dict[str, Any]:
    """Lengths up to the last key that is seen, as kernels take them, by name."""
    lens, mask = call.seen["lens"], call.seen["mask"]
    if mask is not None:
        per_query = mask.shape[1] > 1 or (lens is not None and lens.dim() == 2)
        last = call.new(call.batch, call.queries_len if per_query else 1, dtype=torch.int32)
        lengths_kernel[(last.numel(),)](
            out=last, rows=last.shape[1], Tk=call.keys_len, **call.seen, BLOCK_K=1024
        )
        lens = last
    return {"lens": lens, **strides(lens=lens)}


def make_table(call: Call, x: Tensor) -> Table:
    """Exponentials of projected rows, for tanh."""
    if call.kind["ACTIVATION"]:
        return Table(None, None)
    batch, length, hidden = x.shape
    precise = call.kind["PRECISE"]
    entries = call.new(1 + precise, batch, length, hidden)
    largest = call.new(batch, length)
    blocks = plans.tables(hidden)
    tables_kernel[(batch * -(-length // blocks["BLOCK_R"]),)](
        x=x, table=entries, largest=largest, second=x.numel(), T=length, H=hidden, **strides(x=x),
        PRECISE=precise, **blocks,
    )  # fmt: skip
    return Table(entries, largest)


def precision() -> str:
    """How fp32 products are made, as kernels/products.py says: TF32 where the user allows it."""
    if availability.interpreted():
        return "host"
    # Not allow_tf32: torch raises at reading it once a user has set the newer fp32_precision. This
    # one knows what was set by either, and by torch.set_float32_matmul_precision.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@functools.cache
def native() -> bool:
    """Whether the kernels may hold NVIDIA instructions."""
    return not availability.interpreted() and torch.version.hip is None


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a large one's where kernels are interpreted."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count

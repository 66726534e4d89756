"""What the Triton kernels of one call have in common: inputs laid out, types, lengths, dropout."""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bahdanau_fast import checks, limits
from bahdanau_fast.backends import availability
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.tables import tables_kernel

__all__ = ["DTYPES", "Call", "Table", "make_table", "precision", "processors", "rows"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Call:
    """What the kernels of one call have in common.

    Args:
        queries: (B,Tq,H), or raw queries; the others likewise, as the operators have them.
        keys: (B,Tk,H).
        values: (B,Tk,Dv).
        w_v: (1,H) or (H,).
        valid_lens: None, (B,) or (B,Tq).
        mask: has to be None.
        seed: (1,) int64, with dropout.
        dropout_p: probability of dropping a weight.
        features: have to be None.
        activation: has to be 0, tanh.

    Raises:
        TypeError: a dtype that these kernels do not compute, or lengths that are bool.
        ValueError: a mask, features or another activation, or lengths of another shape or device.
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
        activation: int = 0,
    ) -> None:
        if mask is not None or features is not None or activation != 0:
            need = "take no mask, no features and no activation but tanh"
            checks.reject(ValueError, "Triton kernels", need, "one")
        if queries.dtype not in DTYPES:
            checks.reject(TypeError, "queries", "be float32, bfloat16 or float16", queries.dtype)
        self.queries, self.keys, self.values = map(rows, (queries, keys, values))
        self.w_v = w_v.reshape(-1).contiguous()
        self.batch, self.queries_len = queries.shape[:2]
        self.hidden = w_v.numel()
        self.keys_len, self.features = values.shape[1:]
        # The kernels would read whatever comes as lengths, also past its end.
        checks.lens(valid_lens, self.batch, self.queries_len, queries.device)
        self.device, self.size = queries.device, queries.element_size()
        self.limits = limits.of_gpu(queries.device)
        self.kind = {"PRECISE": queries.dtype == torch.float32, "NATIVE": native()}
        self.precision = precision()
        # Where there are no lengths or no dropout the kernels read neither.
        self.has_lens, self.drops = valid_lens is not None, dropout_p > 0.0
        self.lens = self.queries if valid_lens is None else valid_lens
        per_query = valid_lens is not None and valid_lens.dim() == 2
        self.lens_strides = (
            self.lens.stride(0) if self.has_lens else 0,
            self.lens.stride(1) if per_query else 0,
        )
        self.seed = self.queries if seed is None else seed
        scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
        (bits,) = struct.unpack("q", struct.pack("d", scale))
        self.dropout = (-int(-dropout_p * 2**32 // 1), bits)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor beside the inputs, of the type computed in unless told."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def guard(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device: make that the one of the inputs."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class Table(NamedTuple):
    """exp(2 x) of projected rows, in fp32 tanh(x) after them, and max|x| of each row.

    Of no use where FACTORED is false.
    """

    entries: Tensor
    largest: Tensor
    factored: bool


def rows(x: Tensor) -> Tensor:
    """``x`` with its features side by side, as the kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def make_table(call: Call, x: Tensor) -> Table:
    """Exponentials of projected rows, where the kernels take them."""
    batch, length, hidden = x.shape
    precise = call.kind["PRECISE"]
    entries = call.new(1 + precise, batch, length, hidden)
    largest = call.new(batch, length)
    blocks = plans.tables(hidden)
    tables_kernel[(batch * -(-length // blocks["BLOCK_R"]),)](
        x, entries, largest, x.numel(), length, hidden, *x.stride()[:2], PRECISE=precise, **blocks
    )
    return Table(entries, largest, True)


def precision() -> str:
    """How fp32 products are made, as kernels/products.py says: TF32 where the user allows it."""
    if availability.interpreted():
        return "host"
    # Not allow_tf32: torch raises at reading it once a user has set the newer fp32_precision. This
    # one knows what was set by either, and by torch.set_float32_matmul_precision.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def native() -> bool:
    """Whether the kernels may hold NVIDIA instructions."""
    return not availability.interpreted() and torch.version.hip is None


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a large one's where kernels are interpreted."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count

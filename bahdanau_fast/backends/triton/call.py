"""What the Triton kernels of one call have in common: checked inputs, lengths, dropout, tables."""

from __future__ import annotations

import copy
import functools
import struct
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bahdanau_fast import checks
from bahdanau_fast.backends import availability
from bahdanau_fast.backends.route import is_gpu_step
from bahdanau_fast.backends.triton.launch import Steps, precision
from bahdanau_fast.kernels import plans
from bahdanau_fast.kernels.masking import lengths_kernel
from bahdanau_fast.kernels.tiles import tables_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What a size of compiled code is taken for that has no hint.
_ANY = 64
# Bytes of shared memory of AMD's GPUs, where torch does not say what a block may have.
_SHARED = 64 << 10
# What kernels call the first two strides of a tensor.
_STRIDES = {
    "queries": "q", "keys": "k", "values": "v", "features": "f", "grad_context": "gc",
    "grad_weights": "gw", "rows": "r", "others": "o", "x": "x", "lens": "lens", "mask": "mask",
}  # fmt: skip


class Table(NamedTuple):
    """Of projected rows exp(2 x), tanh(x) after them, and max|x| per row; or neither."""

    entries: Tensor | None
    largest: Tensor | None


class KernelCall:
    """What the kernels of one call have in common; its arguments are those of the operators.

    Kernels make what a table holds in registers: ``table`` and ``keys_max`` are not read.

    Attributes:
        queries: laid out for the kernels, and raw with ``w_q``; likewise keys.
        features: and ``w_f``, laid out likewise; or None.
        is_step: whether the kernels of a step serve the call.
        by_products: whether tanh of many queries is made of products.
        args: what is the same for all its kernels, by the names that those have.
    """

    def __init__(
        self, steps: Steps, queries: Tensor, keys: Tensor, values: Tensor, w_v: Tensor,
        w_q: Tensor | None, w_k: Tensor | None, bias: Tensor | None, features: Tensor | None,
        w_f: Tensor | None, valid_lens: Tensor | None, mask: Tensor | None, table: Tensor | None,
        keys_max: Tensor | None, seed: Tensor | None, dropout_p: float, activation: int,
        negative_slope: float,
    ) -> None:  # fmt: skip
        if queries.dtype not in DTYPES:
            checks.reject(TypeError, "queries", "be float32, bfloat16 or float16", queries.dtype)
        checks.inputs(queries, keys, values, valid_lens)
        self.hidden = checks.weights(queries, keys, w_q, w_k, w_v, bias)
        if bias is not None and w_k is None:
            checks.reject(ValueError, "bias", "be given with w_k only", "w_k None")
        name = dict(enumerate(checks.ACTIVATIONS)).get(activation, str(activation))
        checks.score_terms(features, w_f, name, negative_slope, keys, self.hidden)
        checks.probability("dropout_p", dropout_p)
        if mask is not None and checks.as_mask(mask, queries.shape[1], values) is not mask:
            checks.reject(ValueError, "mask", "have 3 dimensions", tuple(mask.shape))
        self.steps, self.w_q, self.w_k, self.bias = steps, w_q, w_k, bias
        self.lens, self.mask = valid_lens, mask
        self.batch, self.queries_len, self.query_size = queries.shape
        self.keys_len, self.value_size = values.shape[1:]
        sizes = self.queries_len, self.hidden, self.value_size
        self.is_step = {*map(type, sizes)} == {int} and is_gpu_step(*sizes)
        self.size, self.dtype = queries.element_size(), queries.dtype
        self.gpu = gpu(queries.device)
        self.queries, self.keys, values = map(self.rows, (queries, keys, values))
        self.w_v, self.features, self.w_f = self.whole(w_v), None, None
        if features is not None and w_f is not None:
            self.features, self.w_f = self.rows(features), self.whole(w_f)
        self.precise = queries.dtype == torch.float32
        self.by_products = self.gpu.halves and not (self.precise or activation)
        self.args: dict[str, Any] = {
            "values": values, "w_v": self.w_v, "Tk": self.keys_len, "H": self.hidden,
            "Dv": self.value_size, "slope": float(negative_slope), "ACTIVATION": activation,
            "PRECISE": self.precise, "NATIVE": self.gpu.native,
            "PRECISION": self.gpu.precision(self.size, precision() == "tf32"),
            "seed": None, "threshold": 0, "scale_bits": 0,
        }  # fmt: skip
        if dropout_p > 0.0:
            if seed is None:
                checks.reject(ValueError, "seed", "be given with dropout", None)
            self.check("seed", seed, (1,), torch.int64)
            scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
            (bits,) = struct.unpack("q", struct.pack("d", scale))
            threshold = -int(-dropout_p * 2**32 // 1)
            self.args |= {"seed": seed, "threshold": threshold, "scale_bits": bits}

    @classmethod
    def of_scores(cls, steps: Steps, *args: Any) -> KernelCall:
        """Where the scores are all that is computed, from the arguments of ``attend_scores``."""
        queries, keys, w_v, features, w_f, activation, slope, _ = args
        absent = (None,) * 5
        inputs = queries, keys, keys, w_v, *absent[:3], features, w_f, *absent
        return cls(steps, *inputs, 0.0, activation, slope)

    def launch(self, kernel: Any, *grid: int, **more: Any) -> None:
        """Launch a kernel with these arguments and those that it shares with others."""
        mask, (names, pick, strided) = self.mask, _parameters(kernel)
        args = {
            **self.args, "queries": self.queries, "Tq": self.queries_len, "lens": self.lens,
            "mask": mask, "mask_key": 0 if mask is None else mask.stride(2), **more,
        }  # fmt: skip
        for name, batch, row in strided:
            args[batch], args[row] = _strides(args[name])
        self.steps.launch(kernel, *grid, **dict(zip(names, pick(args), strict=True)))

    def rows(self, x: Tensor) -> Tensor:
        """``x`` with its features side by side, as the kernels read it."""
        if x.stride(-1) == 1 or x.shape[-1] <= 1:
            return x
        return self.steps.make(Tensor.contiguous, x)

    def whole(self, x: Tensor) -> Tensor:
        """``x`` without gaps, as the kernels read weights."""
        return x if x.is_contiguous() else self.steps.make(Tensor.contiguous, x)

    def check(
        self, name: str, x: Tensor | None, shape: tuple[int, ...], *dtypes: torch.dtype
    ) -> None:
        """Refuse a tensor of another shape, dtype (or two), or device than that of the queries."""
        if x is None:
            return
        if tuple(x.shape) != shape:
            checks.reject(ValueError, name, f"have shape {shape}", tuple(x.shape))
        if x.dtype not in dtypes:
            checks.reject(TypeError, name, f"be {' or '.join(map(str, dtypes))}", x.dtype)
        if x.device != self.steps.device:
            need = f"be on the device of queries, {self.steps.device}"
            checks.reject(ValueError, name, need, x.device)

    def split(self, plan: plans.StepPlan, in_tiles: bool = False) -> tuple[int, int]:
        """How many splits a plan has, and keys of one.

        Compiled code has one of both for all lengths of keys: the second where splits are tiles.
        """
        if type(self.keys_len) is int:
            return plan.splits, plan.split_keys
        tile = plan.blocks["BLOCK_K"]
        tiles = -(-self.keys_len // tile)
        return (tiles, tile) if in_tiles else (plan.splits, -(-tiles // plan.splits) * tile)

    def of_queries(self, first: int, count: int) -> KernelCall:
        """The call of some of its queries, without the weights."""
        part, narrow = copy.copy(self), functools.partial(self.steps.make, torch.narrow)
        part.queries, part.queries_len = narrow(self.queries, 1, first, count), count
        if self.lens is not None and self.lens.dim() == 2:
            part.lens = narrow(self.lens, 1, first, count)
        if self.mask is not None and self.mask.shape[1] > 1:
            part.mask = narrow(self.mask, 1, first, count)
        return part

    def project(
        self, queries: Tensor | None = None, keys: Tensor | None = None, but_queries: bool = False
    ) -> None:
        """Have the queries and keys projected, unless it is said what they are; empty says none.

        With ``but_queries`` those are left to the kernel.
        """
        inputs = ("keys", keys, self.w_k, self.bias), ("queries", queries, self.w_q, None)
        for name, saved, weight, bias in inputs[: 1 if but_queries else 2]:
            rows = getattr(self, name)
            if weight is None:
                continue
            if saved is None or tuple(saved.shape) == (0,):
                projected = self.steps.make(F.linear, rows, weight, bias)
            else:
                self.check(f"projected_{name}", saved, (*rows.shape[:2], self.hidden), self.dtype)
                projected = self.rows(saved)
            setattr(self, name, projected)
        if not but_queries:
            self.w_q = None

    @functools.cached_property
    def summed_keys(self) -> Tensor:
        """The projected keys, with the projected features added."""
        if self.features is None:
            return self.keys
        return self.steps.make(_with_features, self.keys, self.features, self.w_f)

    def lengths(self) -> Tensor | None:
        """Lengths up to the last key that is seen."""
        if self.mask is None:
            return self.lens
        per_query = self.mask.shape[1] > 1 or (self.lens is not None and self.lens.dim() == 2)
        rows = self.queries_len if per_query else 1
        last = self.steps.new(self.batch, rows, dtype=torch.int32)
        sizes = {"rows": rows, "BLOCK_K": 1024, "num_warps": 4}
        self.launch(lengths_kernel, self.batch * rows, out=last, **sizes)
        return last

    def new_table(self, most: int) -> Table:
        """Where the table of up to so many rows goes."""
        if self.args["ACTIVATION"]:
            return Table(None, None)
        entries = self.steps.new(2, self.batch, most, self.hidden)
        return Table(entries, self.steps.new(self.batch, most))

    def make_table(self, x: Tensor, table: Table) -> None:
        """Exponentials of projected rows, for tanh."""
        if table.entries is None:
            return
        batch, length, hidden = x.shape
        blocks = plans.tables(usual(hidden))
        self.launch(
            tables_kernel, batch * -(-length // blocks["BLOCK_R"]),
            x=x, table=table.entries, largest=table.largest, second=x.numel(), T=length, **blocks,
        )  # fmt: skip


def usual(size: Any) -> int:
    """A size; of compiled code, whose sizes change, the first one: for what is right for all."""
    if type(size) is not int:
        size = size.node.hint if size.node.has_hint() else _ANY
    usual_size: int = size
    return usual_size


def _with_features(keys: Tensor, features: Tensor, w_f: Tensor) -> Tensor:
    return torch.addmm(keys.flatten(0, 1), features.flatten(0, 1), w_f.t()).view(keys.shape)


@functools.cache
def _parameters(kernel: Any) -> tuple[list[str], Callable[..., Any], list[tuple[str, str, str]]]:
    """Names of a kernel's parameters, what picks them, and those that it takes strides of."""
    strided = [(name, f"{short}_batch", f"{short}_row") for name, short in _STRIDES.items()]
    names = [*kernel.arg_names, "num_warps"]
    return names, itemgetter(*names), [strides for strides in strided if strides[1] in names]


def _strides(x: Tensor | None) -> tuple[int, int]:
    """The first two strides; 0 where a tensor is the same for all."""
    if x is None:
        return 0, 0
    return x.stride(0), x.stride(1) if x.dim() > 1 and x.shape[1] > 1 else 0


@functools.cache
def gpu(device: torch.device) -> plans.Gpu:
    """A GPU as plans see it."""
    if device.type != "cuda":  # kernels are interpreted
        return plans.Gpu(132, _SHARED, "")
    has = torch.cuda.get_device_properties(device)
    shared = getattr(has, "shared_memory_per_block_optin", _SHARED)
    if availability.interpreted():
        arch = ""
    elif torch.version.hip is not None:  # "gfx90a:sramecc+:xnack-"
        arch = has.gcnArchName.partition(":")[0]
    else:
        arch = f"sm_{has.major}{has.minor}"
    return plans.Gpu(has.multi_processor_count, shared, arch)

"""The CUDA kernels of csrc/cuda, compiled for the host and driven from here.

What only it proves: the whole contract table and drawn cases in seconds, with the source under
AddressSanitizer and UBSan. The machine code, in tests/ptx, is the judge of everything else.

One program per kind of numbers and per sanitizer (driver.cpp); problems go to it through pipes.
"""

import os
import shlex
import struct
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from built import built
from calls import Calls

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[3] / "csrc"

KINDS = {
    "f32": ("float", "float"),
    "f64": ("double", "double"),
    "bf16": ("bf16", "float"),
    "f16": ("f16", "float"),
    "f32_in_f64": ("float", "double"),
}
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}


# In the order of LenType (csrc/cuda/kernels/types.h).
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
LENS = (*INTEGERS, "float32", "float64", "bfloat16", "float16")


def build(kind, sanitizer, sources=KERNELS):
    """Compile the driver for a kind, unless it is there already; its path."""
    stored, summed = KINDS[kind]
    command = [  # copies of the sources are compiled for a single call: that, fast
        "g++", "-std=c++17", "-O1" if sources == KERNELS else "-O0", "-g1",
        "-Wall", "-Wno-unknown-pragmas", "-Wno-attributes",
        *SANITIZERS[sanitizer], f"-I{HERE}", f"-I{sources}", f"-DSTORED={stored}",
        f"-DSUMMED={summed}", str(HERE / "driver.cpp"),
        *shlex.split(os.environ.get("CXXFLAGS", "")),
    ]  # fmt: skip
    files = [*sorted(HERE.glob("*.[ch]*")), *sorted(sources.rglob("*.h"))]
    return built(f"cuda_on_host/{kind}-{sanitizer}", files, command, keep_old=sources != KERNELS)


class Host:
    """A running driver.

    Args:
        kind: a name from KINDS.
        sanitizer: a name from SANITIZERS.
        sources: the folder that holds cuda/ and common/.
    """

    def __init__(self, kind, sanitizer="plain", sources=KERNELS):
        self.messages = tempfile.TemporaryFile()  # noqa: SIM115  for as long as the driver
        self.process = subprocess.Popen(
            [build(kind, sanitizer, sources)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            env={
                "ASAN_OPTIONS": "detect_stack_use_after_return=0",
                "UBSAN_OPTIONS": "print_stacktrace=1",
            },
        )

    def close(self):
        """End the driver; fails when it ended itself, with what it said."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)
        if self.process.returncode != 0:
            raise AssertionError(f"ended with {self.process.returncode}\n{self.said()}")

    def said(self):
        self.messages.seek(0)
        return self.messages.read().decode(errors="replace")

    def ask(self, request, shapes):
        """Send a request, receive tensors of (dtype, shape)."""
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
            return [self._receive(dtype, shape) for dtype, shape in shapes]
        except (BrokenPipeError, EOFError):
            self.process.wait(60)
            raise AssertionError(f"ended with {self.process.returncode}\n{self.said()}") from None

    def _receive(self, dtype, shape):
        size = torch.Size(shape).numel() * dtype.itemsize
        data = self.process.stdout.read(size)
        if len(data) < size:
            raise EOFError
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


class Drivers(Calls):
    """Running drivers by kind of numbers, started when they are first asked for.

    Args:
        start: gives the driver of a kind.
    """

    def __init__(self, start):
        self._start, self._running = start, {}

    def close(self):
        """End them all; fails when a sanitizer had something to say."""
        while self._running:
            self._running.popitem()[1].close()

    def _ask(self, request, shapes):
        if self.kind not in self._running:
            self._running[self.kind] = self._start(self.kind)
        return self._running[self.kind].ask(request, shapes)

    def forward(self, need_weights, queries, keys, values, w_v, lens, *dropout):
        (b, tq, _), (_, tk, dv) = queries.shape, values.shape
        held = torch.float64 if queries.dtype == torch.float64 else torch.float32
        if 0 in (b, tq, tk):
            return queries.new_zeros((b, tq, dv)), queries.new_zeros((b, tq, tk), dtype=held)
        request = self._problem(0, need_weights, queries, keys, values, w_v, lens, *dropout)
        shape = (b, tq, tk) if need_weights else (0,)
        return self._ask(request, [(queries.dtype, (b, tq, dv)), (held, shape)])

    def backward(self, weights, grad_context, grad_weights, needs, *inputs):
        if 0 in weights.shape:
            return [torch.zeros_like(x) for x in inputs[:4]]
        request = self._problem(1, needs, *inputs)
        request += b"".join(map(_tensor, (weights, grad_context, grad_weights)))
        shapes = [x.shape if needs >> i & 1 else (0,) for i, x in enumerate(inputs[:4])]
        return self._ask(request, [(inputs[0].dtype, shape) for shape in shapes])

    def step(self, multiprocessors, queries, w_q, keys, values, w_v, lens, w_k=None, bias=None):
        """Context and weights of queries (and keys) that the kernel projects itself."""
        self.begin(multiprocessors, queries, keys, w_v)
        (b, tq, _), (_, tk, dv) = queries.shape, values.shape
        held = torch.float64 if queries.dtype == torch.float64 else torch.float32
        inputs = queries, keys, values, w_v, lens
        request = self._problem(0, 1, *inputs, projections=(w_q, w_k, bias))
        return self._ask(request, [(queries.dtype, (b, tq, dv)), (held, (b, tq, tk))])

    def _problem(
        self, backward, wanted, queries, keys, values, w_v, lens, seed=None, dropout_p=0.0,
        projections=(None,) * 3,
    ):  # fmt: skip
        sent = None if values is keys else values
        (b, tq, features), (_, tk, dv) = queries.shape, values.shape
        lens_type = 0 if lens is None else 1 + LENS.index(str(lens.dtype).removeprefix("torch."))
        tensors = queries, keys, sent, w_v.reshape(-1).contiguous(), *projections
        return b"".join(
            [
                _integers(backward, self.multiprocessors, wanted),
                *map(_tensor, tensors),
                _tensor(lens, columns=False),
                _integers(features, keys.shape[-1], lens_type, seed is not None, seed or 0),
                struct.pack("<d", dropout_p),
                _integers(b, tq, tk, w_v.numel(), dv),
            ]
        )


def _integers(*numbers):
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _raw(x):
    """The bytes of a contiguous tensor of any dtype."""
    return x.view(torch.uint8).numpy().tobytes() if x.numel() else b""


def _tensor(x, columns=True):
    """A tensor with the memory it lies in; copied where its columns do not lie together."""
    if x is None or x.numel() == 0:
        return _integers(0, 0, 0, 0)
    if columns and x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = x.storage_offset() % (16 // x.element_size())  # as misaligned as it was
    memory = x.as_strided((last + 1,), (1,), x.storage_offset())
    memory = torch.cat([memory.new_zeros(first), memory])
    batch, row = x.stride(0), x.stride(1) if x.dim() > 1 else 0
    return b"".join(
        [
            _integers(memory.numel() * memory.element_size()),
            _raw(memory),
            _integers(first * x.element_size(), batch, row),
        ]
    )


def on(drivers):
    """The function :func:`parity.check` tests: projections by torch, the rest by the kernels."""

    def function(inputs, valid_lens):
        a = F.linear(inputs["queries"], inputs["w_q"])
        c = F.linear(inputs["keys"], inputs["w_k"], inputs["bias"])
        context, weights = drivers.attend(4, a, c, inputs["values"], inputs["w_v"], valid_lens)
        return context, weights.to(context.dtype)

    return function

"""What a call would launch on a GPU that is not here: Triton's kernels, compiled for it."""

import re
import tempfile
from collections import Counter
from contextlib import contextmanager
from functools import cached_property, partial
from unittest.mock import patch

import networkx
import torch
import triton
from machine_code import run_tool
from triton_target import target_is

from bahdanau_fast.backends.route import GPU_STEP_QUERIES
from bahdanau_fast.kernels import plans
from bahdanau_fast.ops.attention import attention, attention_backward


class Kernel:
    """A compiled kernel and its resources."""

    def __init__(self, made):
        self.made, self.name = made, made.metadata.name.removesuffix("_kernel")
        self.shared, self.warps = made.metadata.shared, made.metadata.num_warps
        names = made.src.fn.arg_names
        self.sizes = {names[place]: value for (place,), value in made.src.constants.items()}

    @cached_property
    def sass(self):
        return self._said("nvdisasm", "-c")

    @property
    def spills(self):
        """Registers kept in memory: on NVIDIA's GPUs, times that a loop stores or loads one."""
        if "amdgcn" in self.made.asm:
            return int(re.search(r"\.vgpr_spill_count:\s+(\d+)", self.made.asm["amdgcn"])[1])
        if self.stack == 0:  # disassembling takes longer
            return 0
        flow, local, here = networkx.DiGraph(), Counter(), 0  # blocks by their first line
        for number, line in enumerate(self.sass.splitlines()):
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                flow.add_edge(here, label[1])
                here = label[1]
            local[here] += bool(re.search(r"\b(?:STL|LDL)\b", line))
            if jump := re.search(r"(@!?U?P\w+ +)?(?:BRA\S*|EXIT)\b(?:.*`\((\.L_x_\d+)\))?", line):
                flow.add_edge(here, jump[2] or "end")
                if jump[1]:
                    flow.add_edge(here, number)
                here = number
        loops = networkx.strongly_connected_components(flow)
        return sum(
            local[x] for blocks in loops for x in blocks if flow.has_edge(x, x) or blocks > {x}
        )

    @cached_property
    def stack(self):
        """Bytes of registers in memory, those that no loop stores or loads among them."""
        if "amdgcn" in self.made.asm:
            return 0
        return int(re.search(r"STACK:(\d+)", self._said("cuobjdump", "-res-usage"))[1])

    def _said(self, *command):
        """What a CUDA tool says of the binary."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.made.asm["cubin"])
            file.flush()
            return run_tool(*command, file.name)


@contextmanager
def compiling(target, only=""):
    """Inside, kernels are compiled for the target as they would be launched, by hash.

    ``only``: of the kernels, those whose name contains this.
    """
    found, real = {}, triton.JITFunction.run

    def run(self, *args, warmup, **options):
        if only in self.__name__:
            made = real(self, *args, warmup=True, **options)
            found[made.hash] = Kernel(made)

    with target_is(target), patch.object(triton.JITFunction, "run", run):
        yield found


def kernels_of(shape, dtype, target, only=""):
    """The kernels of forward and backward at (B,Tq,Tk,H,Dv), by hash; on tensors without data."""
    batch, queries_len, keys_len, hidden, features = shape
    make = partial(torch.empty, dtype=dtype, device="meta")
    inputs = {"queries": make(batch, queries_len, hidden), "keys": make(batch, keys_len, hidden)}
    inputs |= {"values": make(batch, keys_len, features), "w_v": make(1, hidden), "narrow": True}
    inputs["valid_lens"] = torch.empty(batch, dtype=torch.int64, device="meta")
    mask = torch.empty(batch, queries_len, keys_len, dtype=torch.bool, device="meta")
    with compiling(target, only) as found:
        for seen in ({}, {"mask": mask}):
            given = inputs | seen
            context, weights, *_ = call(attention.recorded, **given)
            call(attention, **given)
            grads = {"weights": weights, "grad_context": context, "grad_weights": weights}
            call(attention_backward, **grads, needs=15, **given)
            if queries_len <= plans.FEATURE_QUERIES:
                inside = {"features": make(batch, keys_len, 32), "w_f": make(hidden, 32)}
                call(attention, **given, **inside)
        if queries_len <= GPU_STEP_QUERIES and dtype != torch.float32:
            with patch.object(plans, "projects_queries", return_value=True):
                call(attention, **inputs, w_q=make(hidden, hidden))
    return found


def call(operator, **given):
    """What an operator gives where Triton serves it; what it does not take is left out."""
    named = {**operator.defaults, **given}
    return operator.in_python["triton"](*(named.get(name) for name in operator.names))

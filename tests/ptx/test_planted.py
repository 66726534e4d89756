"""The PTX machine sees mistakes in the machine code of csrc/cuda that may change no result."""

import re

import pytest
from built import needs_compiler
from cases import measured
from driven import CudaPtx, needs_nvcc
from machine import build
from machine.parse import PtxError

pytestmark = [needs_compiler, needs_nvcc]

SYNC, FENCE, CLUSTER = (
    ("__syncthreads()", "bar.sync"),
    ("__threadfence()", "membar"),
    ("cluster_barrier();", "barrier.cluster"),
)
DECODE, BACKWARD, TANH = "decode.h", "decode_backward.h", "grad_tanh.h"
SPLIT, STEP, MANY = "split keys", "decoder step", "no lens"
LARGE, LARGEST, SHARING = "large step", "large step, 16 beams", "a cluster shares W_q"
BEAMS, RAW, TIED = "queries projected, beams", "keys projected, cut", "keys are values"
# What is left out: the file, the text before it, the words of source and PTX; where it shows.
LEFT_OUT = {
    "before the queries are read": (DECODE, "largest_w = fabs(x) > largest_w", SYNC, SPLIT),
    "between scores and softmax": (DECODE, "score_keys<false>(i0, keys, form);", SYNC, STEP),
    "between softmax and values": (DECODE, "row[j] = x * dropout.factor", SYNC, STEP),
    "between parts and their sum": (DECODE, "mine.parts[(warp * QT + q) * columns", SYNC, STEP),
    "before the parts of further queries": (DECODE, "store_context(i, column, sum);", SYNC, BEAMS),
    "the fence before a block is done": (DECODE, "bool is_last() {", FENCE, SPLIT),
    "the barrier before a block is done": (DECODE, "bool is_last() {", SYNC, TIED),
    "the fence of the last block": (DECODE, "== unsigned(d.splits - 1);", FENCE, SPLIT),
    "before all know the last block": (DECODE, "atomicExch(d.arrived", SYNC, SPLIT),
    "before the factors of splits": (DECODE, "mine.parts[k] = exp_of(maxima[k]", SYNC, SPLIT),
    "between parts and gradients": (BACKWARD, "meet_keys<vectors>(c0 + lane * U);", SYNC, STEP),
    "before further parts of gradients": (BACKWARD, "at / columns * p.H + h] = sum;", SYNC, LARGE),
    "before gradients of scores are read": (BACKWARD, "A(double(weights[j]) / total", SYNC, STEP),
    "before the maxima of a chunk": (TANH, "mine.largest[threadIdx.x] = 0;", SYNC, MANY),
    "before the keys of a chunk": (TANH, "atomicMax(mine.largest + 2", SYNC, MANY),
    "before the form of a chunk": (TANH, "atomicMax(mine.largest + 1, keys_max);", SYNC, MANY),
    "after scores are loaded": (TANH, "load_scores(i0, queries);", SYNC, MANY),
    "between parts of queries and sums": (TANH, "mine.parts[(warp * QT + q) * kW", SYNC, LARGEST),
    "before the sums of w": (TANH, "mine.parts[warp * kWarp + lane] = sum_w;", SYNC, MANY),
    "before a slice is loaded": ("matmul.h", "k0 += kProductSlice) {", SYNC, MANY),
    "after a slice is loaded": ("matmul.h", "load_slice(k0);", SYNC, MANY),
    "before a tile's form": ("scores.h", "note(largest + 2, fabsf(x));", SYNC, MANY),
    "before raw scores are added": ("raw_keys.h", "add_scores(h0, sums);", SYNC, RAW),
    "before the odds of a tile": ("raw_keys.h", "if (warp < QT) weigh_tile(first);", SYNC, TIED),
    "of a cluster, before its sums": (BACKWARD, "void finish() {", CLUSTER, SPLIT),
    "of a cluster, before it ends": (BACKWARD, "* p.Tq + i) * p.H + h);\n    }", CLUSTER, SPLIT),
    "of a cluster, before it shares": (DECODE, "const T* w_q = static_cast", CLUSTER, SHARING),
    "of a cluster, after it shared": (DECODE, "*in_block(place, target) = sum;", CLUSTER, SHARING),
}  # fmt: skip


LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+))?")


def line_of(file, after, word):
    """The line of the first ``word`` from a piece of text on, which a kernel's file has once."""
    text = (build.SOURCES / "cuda" / "kernels" / file).read_text()
    assert text.count(after) == 1, f"{file} has changed: plant the mistake elsewhere"
    return text[: text.index(word, text.index(after))].count("\n") + 1


def edited(file, line, old, new=""):
    """A function that puts ``new`` where ``old`` begins an instruction of a line of a file.

    The place of an instruction is where it stands, and where that was called.
    """

    def change(text):
        names = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"]*)"', text, re.MULTILINE))
        lines, here, count = text.splitlines(), False, 0
        for at, code in enumerate(lines):
            if place := LOC.match(code):
                pairs = (place[1], place[2]), (place[3], place[4])
                here = any(f and names[f] == file and int(row) == line for f, row in pairs)
            elif here and code.strip().startswith(old):
                lines[at] = code.replace(old, new) if new else ""
                count += 1
        assert count, f"no {old} of {file}:{line}"
        return "\n".join(lines)

    return change


def fails(case, arch="80", **mistake):
    """What the machine says of a case with a mistake in it."""
    with pytest.raises(PtxError) as caught:
        measured(CudaPtx(arch, **mistake), case, "bf16")
    return str(caught.value)


QUICK = "the fence of the last block", "of a cluster, before its sums"
PLACES = [pytest.param(p, marks=() if p in QUICK else pytest.mark.deep) for p in LEFT_OUT]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_left_out_is_found(place):
    file, after, (word, opcode), case = LEFT_OUT[place]
    change = edited(file, line_of(file, after, word), opcode)
    said = fails(case, "90a" if word == CLUSTER[0] else "80", change=change)
    assert "race:" in said or "where nothing was written" in said or "may not have begun" in said


@pytest.mark.deep
def test_rows_are_read_where_they_are():
    assert "misaligned access" in fails("whole vectors", change=lambda text: shifted(text, 4))
    assert "outside of every buffer" in fails(
        "whole vectors", change=lambda text: shifted(text, 1 << 20)
    )


def shifted(text, by):
    """PTX whose 16-byte loads of constant rows are so many bytes off."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if "ld.global.nc.v4" in line:
            address = line[line.index("[") + 1 : line.index("]")]
            base, _, offset = address.partition("+")
            lines[at] = line.replace(address, f"{base}+{int(offset or 0) + by}")
    return "\n".join(lines)


@pytest.mark.deep
def test_lanes_and_threads_are_all_there():
    mask = re.compile(r"(shfl\.sync\.bfly\.b32 [^;]*), %r\d+;")
    few = fails(STEP, change=lambda text: mask.sub(r"\1, 65535;", text))
    assert "which takes no part" in few
    leave = "mov.u32 %r1, %tid.x; setp.eq.s32 %p1, %r1, 0; @%p1 ret; bar.sync 0;"
    gone = fails(STEP, change=lambda text: text.replace("bar.sync \t0;", leave))
    assert "not all threads of the block reach" in gone


@pytest.mark.deep
def test_shared_memory_is_no_larger_than_the_launch_says():
    assert "outside of shared memory" in fails(SPLIT, less_shared=16)


@pytest.mark.deep
def test_counters_have_to_be_cleared():
    assert "where nothing was written" in fails(SPLIT, clears=False)

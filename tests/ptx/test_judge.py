"""What cannot be planted without the model of time noticing: its counts of machine code and its
times, on small kernels whose copies, trips and microseconds (of an H100) are known by hand."""

import struct

import numpy as np
import pytest
from built import built, needs_compiler
from driven import needs_nvcc
from gpu_model.counted import launch_of, works
from gpu_model.gpus import ASSUMED, GPUS
from gpu_model.sass import Code
from gpu_model.times import in_graph, modelled
from machine import build
from machine.launch import Buffer, Machine

pytestmark = [needs_compiler, needs_nvcc]

SOURCE = r"""
#define K(name) extern "C" __global__ void name(float* y, const float* __restrict__ x, long n)
#define MINE (blockIdx.x * blockDim.x + threadIdx.x)
#define T threadIdx.x
#define FOUR(x) reinterpret_cast<const float4*>(x)

K(strided) { float s = 0; for (long i = T; i < n; i += 32) s += x[i]; y[T] = s; }
K(not_unrolled) {
  float s = 0; _Pragma("unroll 1") for (long i = T; i < n; i += 32) s += x[i]; y[T] = s;
}
K(eight) { float s = 0; for (int i = 0; i < 8; ++i) s += x[i * 32 + T]; y[T] = s; }
K(nested) {
  for (int j = 0; j < 3; ++j) {
    float s = 0; for (long i = T; i < n; i += 32) s += x[j * n + i]; y[j * 32 + T] = s;
  }
}
K(chase) {
  const long* next = reinterpret_cast<const long*>(x);
  long at = 0; for (long k = 0; k < n; k += 32) at = next[at]; y[T] = float(at);
}
K(copied) { for (long i = T; i < n; i += 32) y[i] = x[i]; }
K(with_barriers) {
  __shared__ float row[32];
  float s = 0;
  for (long i = 0; i < n; i += 32) {
    row[T] = x[i + T]; __syncthreads(); s += row[31 - T]; __syncthreads();
  }
  y[T] = s;
}
K(guarded) {
  float s = 0; for (long i = 0; i < n; i += 32) if (i + T < n - 8) s += x[i + T]; y[T] = s;
}

K(awaited_copies) {
  __shared__ float row[4 * 32];
  const unsigned at = unsigned(__cvta_generic_to_shared(row + T * 4));
  for (int k = 0; k < 8; ++k)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n cp.async.commit_group;\n"
                 " cp.async.wait_group 0;" ::"r"(at), "l"(x + k * 128 + T * 4) : "memory");
  y[T] = row[T * 4];
}
template <int count> __device__ void straight(float* y, const float* x) {
  float s = x[T], t = s;
  _Pragma("unroll") for (int k = 0; k < count; ++k) s = s * t + float(k) * 1.7f;
  y[T] = s;
}
K(path_of_8_kb) { straight<500>(y, x); }
K(path_of_40_kb) { straight<2500>(y, x); }
K(nothing) {}

K(copy) { reinterpret_cast<float4*>(y)[MINE] = FOUR(x)[MINE]; }
K(sum) {
  float s = 0;
  for (long i = MINE; i < 8 * n; i += n) { float4 v = FOUR(x)[i]; s += v.x + v.y + v.z + v.w; }
  for (int k = 16; k > 0; k /= 2) s += __shfl_xor_sync(~0u, s, k);
  if (T % 32 == 0) y[MINE / 32] = s;
}
K(exponentials) {
  float s = x[T];
  for (int k = 0; k < 256; ++k) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(s));
  y[MINE] = s;
}
K(barriers) {
  __shared__ float row[256];
  float s = x[T];
  for (int k = 0; k < 64; ++k) {
    row[T] = s; __syncthreads(); s = row[T ^ 32] + 1; __syncthreads();
  }
  y[MINE] = s;
}
K(shuffles) {
  float s = x[T]; for (int k = 0; k < 1024; ++k) s += __shfl_xor_sync(~0u, s, 1); y[MINE] = s;
}
K(shared) {
  __shared__ float4 rows[1024];
  rows[T] = FOUR(x)[T];
  __syncthreads();
  float s = 0;
  for (int k = 0; k < 64; ++k) { float4 v = rows[(T + k) % 1024]; s += v.x + v.y + v.z + v.w; }
  y[MINE] = s;
}
K(tickets) {
  unsigned *counters = reinterpret_cast<unsigned*>(y), s = 0;
  if (T == 0) for (int k = 0; k < 32; ++k) s = atomicAdd(counters + (s & 1), 1u);
  if (s == n) counters[2] = 0;
}
K(divisions) {
  long s = n + T; for (int k = 0; k < 64; ++k) s = s * 0x123456789abcdef / (n + k); y[MINE] = s;
}
K(clusters) {
  for (int k = 0; k < 64; ++k)
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
  y[MINE] = 1;
}
"""
H100 = GPUS["H100"]


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    source = tmp_path_factory.mktemp("by_hand") / "k.cu"
    source.write_text(SOURCE)
    command = [build.NVCC, "-ptx", "-arch=sm_90a", str(source)]
    return built("ptx/by_hand", [source], command).read_text()


def ran(ptx, name, n=0, grid=1, threads=32, x=None, **options):
    """The code of a kernel, its report, and its launch as the model of time takes it."""
    code, x = Code(ptx, name, "90a"), np.zeros(1 << 14, np.float32) if x is None else x
    held = [Buffer("y", np.zeros(max(grid * threads * 4, 1 << 14), np.float32)), Buffer("x", x)]
    params = struct.pack("<QQq", *(buffer.address for buffer in held), n)
    how = {"counts": True, "races": False, "share": 0.0, "pace": code.pace, **options}
    report = Machine(ptx).run(name, grid, threads, params, held, **how)
    return code, report, works([launch_of(report, code, grid, threads)])[0]


# ---- copies and trips ----------------------------------------------------------------------------

# The copies that ptxas makes of the load that it copies most, by block of machine code; loads in
# one of nvcc's own copies of a loop, four, are others. And how often a warp waits in 37 turns: nvcc
# makes nine of four and one of these, ptxas of the nine two of four and one.
LOOPS = {
    "strided": ([4, 2, 1], 4),
    "not_unrolled": ([1], 37),
    "eight": ([1], 1),
    "nested": ([4, 2, 1], 12),
    "chase": ([4, 2, 1], 37),
    "copied": ([4, 2, 1], 4),
    "with_barriers": ([4, 2, 1], 37),
    "guarded": ([4, 2, 1], 3),  # the last turn loads nothing
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_copies_of_loads_and_their_trips(ptx, name):
    copies, trips = LOOPS[name]
    code = Code(ptx, name, "90a")
    loads = {at for at, opcode in enumerate(code.entry.opcodes) if opcode.startswith("ld.global")}
    found = [
        sorted((b.copies[at] for b in code.blocks if at in b.copies), reverse=True) for at in loads
    ]
    assert max(found) == copies
    for turns in (1, 7, 16, 37):
        code, report, work = ran(ptx, name, 32 * turns)
        of_ptx = sum(int(report.counts["runs"][at]) for at in loads)
        machine = zip(code.blocks, code.runs(report), strict=True)
        assert of_ptx == sum(n * sum(i.opcode[:3] == "LDG" for i in b.code) for b, n in machine)
    assert work.trips == trips


# ---- deceptions ----------------------------------------------------------------------------------


def test_copies_that_are_waited_for_one_by_one_take_their_trips(ptx):
    times = [
        modelled(H100, ran(ptx, *call)[2]).seconds
        for call in (("awaited_copies",), ("not_unrolled", 256), ("eight",))
    ]
    assert times[0] == pytest.approx(times[1], rel=0.15)
    assert times[0] > 5 * times[2]


def test_a_long_way_through_cold_code_takes_time(ptx):
    short, long = (ran(ptx, name)[2] for name in ("path_of_8_kb", "path_of_40_kb"))
    fetched = [modelled(H100, work).parts["latency"] for work in (short, long)]
    assert (short.code, long.code) == (pytest.approx(8e3, rel=0.05), pytest.approx(40e3, rel=0.05))
    assert fetched[0] < 0.3e-6
    assert 0.5e-6 < fetched[1] - fetched[0] < 1.5e-6


def test_a_small_kernel_takes_its_launch(ptx):
    work = ran(ptx, "nothing")[2]
    assert modelled(H100, work).seconds < 0.05e-6
    assert in_graph(H100, [work, work]) == pytest.approx(2 * ASSUMED.launch * 1e-6, rel=0.05)


# ---- by hand -------------------------------------------------------------------------------------

NEXT = np.roll(np.arange(1 << 13, dtype=np.int64), -16).view(np.float32)  # 128 bytes on
# Kernel, n, blocks, threads, and microseconds on an H100 at 1.98 GHz, by hand:
BY_HAND = [
    # 10.8 MB at 0.9 of 3.35 TB/s, 3.59, after a first trip of 560 clocks, 0.28.
    ("copy", 0, 1320, 256, 3.9),
    # 200 trips of 560 clocks, then of 281, and 7 instructions between two, 2 clocks each.
    ("chase", 200 * 32, 1, 32, 58.0),
    ("chase in L2", 200 * 32, 1, 32, 29.8),
    # 8.65 MB, 2.87; a first trip; five shuffles with their sums, 29 clocks each, 0.07.
    ("sum", 264 * 256, 264, 256, 3.2),
    # 256 of each of 2048 threads of a multiprocessor, 16 a clock: 32768 clocks; a trip.
    ("exponentials", 0, 1056, 256, 16.8),
    # 64 turns of two barriers of 40, a load of 25, six instructions of 2: 117 clocks; a trip.
    ("barriers", 0, 132, 256, 4.1),
    # 1024 shuffles of 25 and sums of 4.
    ("shuffles", 0, 1, 32, 15.0),
    # 64 loads of 16 bytes of 1024 threads at 128 bytes a clock: 8192 clocks; a trip.
    ("shared", 0, 132, 1024, 4.4),
    # 32 trips to the L2, one after the other.
    ("tickets", 7, 132, 32, 4.5),
    # 64 of about 90 instructions (80 to 100), of 16 warps on each of four schedulers.
    ("divisions", 12345, 1056, 256, 46.5),
    # 64 barriers of a cluster, 250 clocks each; six instructions of 2.
    ("clusters", 0, 128, 32, 8.5),
]


@pytest.mark.parametrize(("name", "n", "grid", "threads", "microseconds"), BY_HAND)
def test_times_are_those_by_hand(ptx, name, n, grid, threads, microseconds):
    kernel, _, in_l2 = name.partition(" in ")
    x = NEXT if kernel == "chase" else np.zeros(8 * 4 * max(grid * threads, 1024), np.float32)
    options = {"cluster": 8} if kernel == "clusters" else {}
    work = ran(ptx, kernel, n, grid, threads, x, **options)[2]
    found = modelled(H100, work, bool(in_l2)).seconds * 1e6
    assert microseconds / 1.35 < found < microseconds * 1.35

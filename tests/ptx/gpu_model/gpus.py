"""What the model knows of GPUs, and where it is from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ASSUMED", "CACHE", "GPUS", "LIMITS", "Assumed", "Gpu", "Limits"]


@dataclass(frozen=True)
class Limits:
    """What blocks share on a multiprocessor of an architecture."""

    warps: int
    blocks: int
    shared: int  # bytes
    registers: int = 65536
    reserved: int = 1024  # bytes of shared memory that each block takes for the system


@dataclass(frozen=True)
class Gpu:
    """A GPU. Rates are of one multiprocessor and clock, for 32-bit lanes where not said otherwise.

    From the CUDA C++ Programming Guide (technical specifications; throughput of native arithmetic
    instructions), NVIDIA's data sheets and whitepapers, and for the B200 chipsandcheese.com, unless
    said otherwise.

    Attributes:
        code: architecture that ptxas makes machine code for. For the B200, sm_90a stands for sm_100
            of the same source.
        ptx: architecture whose PTX runs there.
        multiprocessors: how many.
        clock: boost, in GHz; under load it is lower.
        fma: fp32 multiply-adds.
        fp64: those in fp64.
        alu: integer and logic operations; B200 estimated.
        special: special-function operations.
        tensor: multiply-adds of 16-bit ``mma.sync`` with fp32 sums: the dense rates of the data
            sheets; on the H100 the 62 % of them that ``mma.sync`` reaches (arXiv 2402.13499); B200
            estimated to be no faster with ``mma.sync``.
        dram: TB/s (A100: SXM of 80 GB; H100: SXM).
        l2: TB/s, estimated after chipsandcheese.com on the RTX 4090 and the H100 (PCIe).
        l2_mb: that the L2 holds, of the data sheets.
        l2_cycles: latency of a load that the L2 holds (github.com/markdewing/AI_kernels; H100 and
            H200: its GH200; A100: arXiv 2402.13499).
        dram_cycles: of one that it does not; from the same. H100 and H200: the chases over 45 to 61
            MiB there take 520 to 540 on the GH200 and 540 to 655 on the H100; 690 is for more than
            64 MiB, probably because translations of addresses miss, too.
    """

    code: str
    ptx: str
    multiprocessors: int
    clock: float
    fma: int
    fp64: int
    alu: int
    special: int
    tensor: int
    dram: float
    l2: float
    l2_mb: int
    l2_cycles: int
    dram_cycles: int


# The warp schedulers, the lanes of a shuffle, and bytes of shared memory and of the way from the L2
# are the same on all of them.
SCHEDULERS, SHUFFLE, SHARED_BYTES, PORT_BYTES = 4, 32, 128, 64
# Bytes of code that are fetched ahead of a warp or while it waits for its first loads; estimated.
CACHE = 16 * 1024

LIMITS = {
    "80": Limits(64, 32, 164 * 1024),
    "89": Limits(48, 24, 100 * 1024),
    "90a": Limits(64, 32, 228 * 1024),
}

GPUS = {
    "A100": Gpu("80", "80", 108, 1.41, 64, 32, 64, 16, 1024, 2.04, 4.5, 40, 262, 466),
    "H100": Gpu("90a", "90a", 132, 1.98, 128, 64, 64, 16, 1280, 3.35, 5.5, 50, 281, 560),
    "H200": Gpu("90a", "90a", 132, 1.98, 128, 64, 64, 16, 1280, 4.80, 5.5, 50, 281, 560),
    "RTX 4090": Gpu("89", "80", 128, 2.52, 128, 2, 64, 16, 256, 1.01, 5.0, 72, 296, 636),
    "B200": Gpu("90a", "90a", 148, 1.965, 128, 64, 64, 16, 1280, 8.0, 9.0, 126, 295, 860),
}


@dataclass(frozen=True)
class Assumed:
    """What the model assumes of every GPU, estimated where no source is named.

    Attributes:
        dram_share: of the bandwidth of the data sheet that a kernel reaches: copies reach 4.3 of
            4.8 TB/s on an H200, 2.9 to 3.2 of 3.35 on an H100 (Azure's published results).
        loaded: share of it that a load takes longer, at the whole bandwidth.
        dependent: clocks between two instructions of a warp: four for one that needs the result
            of the last, half of that for code with two chains.
        barrier: clocks that a barrier of a block takes.
        cluster: the same, of a cluster; a load from another block's shared memory alone takes 180
            (arXiv 2402.13499).
        wait: clocks until a shuffle or a load from shared memory is there; the latter takes 23 on a
            GTX 950 (github.com/leimingyu/gpuBenchmarking), 29 on an H800 (arXiv 2402.13499).
        fetch: clocks for each byte of code past what is small (CACHE): an instruction of 16 bytes
            takes 1.3, so that 40 KB take a microsecond.
        launch: microseconds from one kernel of a graph to the next.
        call: microseconds of the host for a call of an operator from Python.
        host_launch: microseconds of the host for each launch.
    """

    dram_share: float = 0.9
    loaded: float = 0.5
    dependent: float = 2.0
    barrier: float = 40.0
    cluster: float = 250.0
    wait: float = 25.0
    fetch: float = 0.08
    launch: float = 1.3
    call: float = 15.0
    host_launch: float = 4.0


ASSUMED = Assumed()

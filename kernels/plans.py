"""How each kernel cuts its work: tile sizes, warps and key splits, from sizes alone.

A warp holds tiles in at most about 128 registers a thread, so that four programs of four warps
share a multiprocessor; small problems are cut finer until every multiprocessor has work. Beside a
number that was not measured stands the call that would settle it. Knows no torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple


def power_of_two(n: int) -> int:
    """The least power of two that is not below n, from 1 on."""
    return 1 << max(n - 1, 0).bit_length()


def _block(width: int, least: int, most: int) -> int:
    """A power of two that takes so many elements, within bounds."""
    return min(max(power_of_two(width), least), most)


# Bytes of scores of many queries at once, where nobody asked for weights.
# measured: gpu-h200.csv, "128 MB of scores: (64,512,1024,256), forward without weights, bfloat16"
# takes less than "64 MB of scores: (64,512,1024,256), forward without weights, bfloat16".
_SCRATCH = 128 << 20


def query_chunk(batch: int, keys_len: int, least: int) -> int:
    """How many queries to take at once so that their scores stay within a bound; ``least`` fit."""
    return max(_SCRATCH // max(4 * batch * keys_len, 1), least)


class Gpu(NamedTuple):
    """What decides about plans: the size of a GPU, and its kind."""

    processors: int  # multiprocessors
    shared: int  # bytes of shared memory that a block may have
    arch: str  # "sm_90", "gfx942", ...; empty where kernels are interpreted

    @property
    def native(self) -> bool:
        """Whether kernels may hold NVIDIA instructions."""
        return self.arch.startswith("sm_")

    @property
    def halves(self) -> bool:
        """Whether products of half types are made on tensor cores; if not, half types become fp32.

        On compute capability 7.5 Triton makes them of fma. Those of gfx90a take subnormals of fp16
        for zero; on gfx1100 kernels of products spill. AMD's others are unknown but for two.
        """
        return self.arch != "sm_75" if self.native else self.arch in ("", "gfx942", "gfx950")

    def precision(self, size: int, tf32: bool) -> str:
        """PRECISION of `product`, of elements of so many bytes; TF32 where allowed."""
        if size == 2:
            return "ieee" if self.halves and self.arch else "fp32"
        has_tf32 = self.arch == "gfx942" or (self.native and self.halves)
        return "tf32" if tf32 and has_tf32 else "ieee"


class StepPlan(NamedTuple):
    """Key splits of a step, and the tiles of one program."""

    splits: int
    split_keys: int
    blocks: dict[str, Any]


# A split backward has at least so many keys.
# measured: gpu-h200.csv, "8 keys of a split: (1,1,1000,512), backward, bfloat16" is the least of
# "4 keys of a split: (1,1,1000,512), backward, bfloat16" to
# "32 keys of a split: (1,1,1000,512), backward, bfloat16".
_GRAD_KEYS = 8
# Tiles of a split that fp32 adds up one after the other: roundings grow with the sum.
# measured: gpu-h200.csv, it costs nothing: "128 tiles in turn: (1,1,40000,512), forward, float32",
# "256 tiles in turn: (1,1,40000,512), forward, float32".
_MOST_IN_TURN = 128


def _tile(width: int, elements: int, keys_len: int, warps: int = 0) -> tuple[int, int]:
    """Rows of keys in a tile of so many elements a warp, and the warps: by the width unless set."""
    warps = warps or (4 if width <= 1024 else 8)
    return min(max(elements * warps // width, 2), max(power_of_two(keys_len), 2), 64), warps


# Queries of a `decode_kernel` that projects its features, anew for every query.
# measured: gpu-h200.csv, "features inside: (64,2,200,128), 32 features, forward, bfloat16" is
# ahead, "features inside: (64,3,200,128), 32 features, forward, bfloat16" is not.
FEATURE_QUERIES = 2
# A launch projects up to so many queries, where each program reads at most so many bytes of W_q,
# times the queries.
# measured: gpu-h200.csv, "triton, W_q inside: (64,1,50,256), forward, bfloat16" takes less than
# "triton, W_q in front: (64,1,50,256), forward, bfloat16", and so do fewer units; larger W_q and
# several queries are not measured: steps of 512 units, and 4 queries of 128.
_PROJECT_QUERIES, _PROJECT_BYTES = 4, 128 * 1024


def projects_queries(queries_len: int, query_size: int, hidden: int, size: int) -> bool:
    """Whether `decode_kernel` projects the queries of a step; ``size`` is bytes of an element."""
    read = queries_len * query_size * hidden * size
    return queries_len <= _PROJECT_QUERIES and read <= _PROJECT_BYTES


def decode(
    batch: int, queries_len: int, keys_len: int, hidden: int, features: int, size: int, gpu: Gpu,
    channels: int = 0,
) -> StepPlan:  # fmt: skip
    """Of `decode_kernel`: 32 elements of a tile a thread, 16 in the precision of fp32.

    A multiprocessor has 16 warps: those of one program, if there are few, or of several. Copies of
    two or three tiles are under way. Of features there are ``channels``; BLOCK_C is 0 where a
    library projects them.
    """
    block_h, block_d = (max(power_of_two(n), 16) for n in (hidden, features))
    widest = max(block_h, block_d)
    rows, keys = max(batch * queries_len, 1), max(power_of_two(keys_len), 2)
    least = 4 if widest <= 1024 else 8
    # Eight warps of wider rows spill on sm_80 under a mask.
    two = widest <= 512 and rows <= 2 * gpu.processors
    warps = 16 if rows <= gpu.processors else 8 if two else least
    warps = max(min(warps, keys * widest // 512), least)
    block_k, _ = _tile(widest, 2048 // size, keys_len, warps)
    block_c = max(power_of_two(channels), 16)
    # W_f stays in registers, or in a quarter of the shared memory. Without tensor cores, or for
    # several queries, a library is faster, in spite of its way through memory.
    fits = widest <= 1024 and block_c * block_h <= min(2048 * warps, gpu.shared // 8)
    if channels and size == 2 and gpu.halves and queries_len <= FEATURE_QUERIES and fits:
        block_k = min(block_k, 512 * warps // block_h)  # a product takes registers
    else:
        block_c = 0
    tiles = -(-keys_len // block_k)
    # Splits have to make up for the launch that combines them.
    splits = max(min(gpu.processors // rows, tiles), 1) if tiles > 4 else 1
    if size == 4:
        splits = max(splits, -(-tiles // _MOST_IN_TURN))
    split_tiles = -(-tiles // splits)
    blocks = {"BLOCK_K": block_k, "BLOCK_H": block_h, "BLOCK_D": block_d, "BLOCK_C": block_c}
    blocks["STAGES"] = _stages(block_k * (block_h + block_d) * size)
    blocks |= {"BLOCK_X": max(1024 * warps // block_h, 4), "num_warps": warps}
    return StepPlan(-(-tiles // split_tiles), split_tiles * block_k, blocks)


class GradPlan(NamedTuple):
    """Of a step's backward: splits of the values and of the keys, and what adds up their parts."""

    values: StepPlan
    keys: StepPlan
    sums: dict[str, Any]


def grad_step(
    batch: int, queries_len: int, keys_len: int, hidden: int, features: int, size: int, gpu: Gpu
) -> GradPlan:  # fmt: skip
    """Of the kernels of `grad_step`: splits for two programs a multiprocessor.

    With several queries a program of the keys is a warp, which takes some of the hidden units.
    """
    parts = 1 if gpu.halves else 2  # of a tile: whole ones spill on sm_75 and gfx1100
    elements = 2048 // size // parts
    splits = max(min(2 * gpu.processors // batch, keys_len // _GRAD_KEYS), 1)
    block_h, block_d = (max(power_of_two(n), 16) for n in (hidden, features))
    if size == 4:
        least, _ = _tile(max(block_h, block_d), elements, keys_len)
        splits = max(splits, -(-keys_len // (least * _MOST_IN_TURN)))
    split_keys = split_values = -(-keys_len // splits)
    if queries_len == 1:
        rows, warps = _tile(block_d, elements, split_values)
        keys, key_warps = _tile(block_h, elements, split_keys)
        stages, key_stages = _stages(rows * block_d * size), _stages(keys * block_h * size)
    else:
        block_h = min(block_h, 64)
        rows, warps = _tile(block_d, 256, split_values, 16 if block_d > 512 else 8)
        keys, key_warps = _tile(block_h, 512 // parts, keys_len, 1)
        split_keys = keys
        # Others spill: 16 bits on sm_80, fp32 on sm_90.
        stages, key_stages = 2, 3 if size == 4 else 1
    splits, key_splits = (-(-keys_len // n) for n in (split_values, split_keys))
    block_q = {"BLOCK_Q": power_of_two(queries_len)}
    values = block_q | {"BLOCK_K": rows, "BLOCK_D": block_d, "STAGES": stages, "num_warps": warps}
    key_blocks = block_q | {"BLOCK_S": power_of_two(splits), "BLOCK_K": keys, "BLOCK_H": block_h}
    key_blocks |= {"STAGES": key_stages, "num_warps": key_warps}
    sums = sum_rows(batch * key_splits) | {"BLOCK_S": min(power_of_two(key_splits), 64)}
    sums["BLOCK_H"] = _block(hidden, 16, min(4096 // sums["BLOCK_S"], 512))
    of_keys = StepPlan(key_splits, split_keys, key_blocks)
    return GradPlan(StepPlan(splits, split_values, values), of_keys, sums)


def sum_rows(rows: int) -> dict[str, Any]:
    """Of `step_sums_kernel` where it adds up so many rows, and no parts of queries."""
    block_r = min(power_of_two(rows), 512)
    return {"BLOCK_S": 1, "BLOCK_H": 16, "BLOCK_R": block_r, "BLOCK_W": 8, "num_warps": 4}


def _stages(tile: int) -> int:
    """Tiles of so many bytes whose copies are under way: two or three, in 48 KB."""
    return 3 if 3 * tile <= 48 << 10 else 2


def combine(splits: int, features: int) -> dict[str, Any]:
    """Of `combine_kernel`: all splits of a few features at once."""
    block_s = max(power_of_two(splits), 2)
    block_d = _block(features, 16, min(max(2048 // block_s, 16), 256))
    return {"BLOCK_S": block_s, "BLOCK_D": block_d, "num_warps": 4}


def tables(hidden: int) -> dict[str, Any]:
    """Of `tables_kernel`."""
    block_h = _block(hidden, 16, 256)
    return {"BLOCK_R": 1024 // block_h, "BLOCK_H": block_h, "num_warps": 4}


def _programs(batch: int, queries_len: int, keys_len: int, block_q: int, block_k: int) -> int:
    """Tiles of scores."""
    return batch * -(-keys_len // block_k) * -(-queries_len // block_q)


class RationalPlan(NamedTuple):
    """Quads of hidden units in all, splits of them, rows of the batch at once; and the tiles."""

    quads: int
    splits: int
    rows: int
    tables: dict[str, Any]
    blocks: dict[str, Any]


# Bytes of terms of 16 bits that are made at once, but of one row of the batch at least.
# measured: gpu-h200.csv, "512 MB of terms: (256,100,400,1024), forward without weights, bfloat16"
# gains little over "256 MB of terms: (256,100,400,1024), forward without weights, bfloat16".
_TERM_BYTES = 256 << 20


def rational_terms(
    batch: int, queries_len: int, keys_len: int, hidden: int, split: bool
) -> RationalPlan:
    """Of the kernels of `rational_terms`: 64 x 64 scores; where those are few, 16 x 64.

    Then the hidden units may be split as well; the splits meet in `softmax_kernel`. Four are faster
    than eight (gpu-h200.csv, "terms of 16 queries, ...").
    """
    block_q, splits = _block(queries_len, 16, 64), 1
    if _programs(batch, queries_len, keys_len, block_q, 64) < 256:
        block_q = 16
        programs = _programs(batch, queries_len, keys_len, block_q, 64)
        while split and splits < 4 and programs * splits < 768 and hidden >= 64 * splits:
            splits *= 2
    quads = -(-hidden // (8 * splits)) * 2 * splits
    rows = max(_TERM_BYTES // (32 * quads * (queries_len + keys_len)), 1)
    tables = {"BLOCK_R": 16, "BLOCK_U": 8, "num_warps": 4}
    blocks = {"BLOCK_Q": block_q, "BLOCK_K": 64, "STAGES": 3, "num_warps": 4}
    return RationalPlan(quads, splits, rows, tables, blocks)


def scores(
    batch: int, queries_len: int, keys_len: int, hidden: int, size: int, gpu: Gpu
) -> dict[str, Any]:
    """Of `scores_kernel`: 64 elements a thread in registers, 32 of fp32; fewer of few."""
    block_h, sizes = _block(-(-hidden // 4), 16, 64), (batch, queries_len, keys_len)
    if gpu.halves:
        block_k = 32 if size == 2 and _programs(*sizes, 64, 32) >= 512 else 16
    else:  # others spill on sm_75, or on gfx1100
        block_k = 16 if block_h == 64 else 32
    block_q, least = 64, 4 if block_h == 64 else 16  # fewer of narrow tiles spill on sm_90
    while block_q > least and _programs(*sizes, block_q, block_k) < 512:
        block_q //= 2
    return {"BLOCK_Q": block_q, "BLOCK_K": block_k, "BLOCK_H": block_h, "num_warps": 4}


def products(features: int, size: int, gpu: Gpu) -> dict[str, Any]:
    """Of `softmax_kernel`: up to 512 features at once; fp32 products are unrolled, so short."""
    if size == 4 or not gpu.halves:
        return {"BLOCK_Q": 8, "BLOCK_K": 32, "BLOCK_D": 64, "num_warps": 4}
    block_d = _block(features, 16, 512)
    warps = 4 if block_d <= 64 else 8  # others spill
    return {"BLOCK_Q": 16, "BLOCK_K": 64, "BLOCK_D": block_d, "num_warps": warps}


def grad_products(gpu: Gpu) -> dict[str, Any]:
    """Of `grad_weights_kernel` and `grad_values_kernel`."""
    block_d = 64 if gpu.halves else 32  # more spills on sm_75 and gfx1100
    return {"BLOCK_Q": 16, "BLOCK_K": 64, "BLOCK_D": block_d, "num_warps": 4}


def grad_softmax(keys_len: int) -> dict[str, Any]:
    """Of `grad_softmax_kernel`: short rows in one tile."""
    return {"BLOCK_K": 128 if keys_len <= 128 else 1024, "num_warps": 4}


def grad_tanh(rows_len: int, hidden: int, sum_w: bool) -> dict[str, Any]:
    """Of `grad_tanh_kernel`: 16 or 32 elements a thread in registers, and their sums."""
    block_h = _block(-(-hidden // 2), 16, 32)
    block_r = min(16 if sum_w else 32, power_of_two(rows_len))
    return {"BLOCK_R": block_r, "BLOCK_H": block_h, "num_warps": 4}


# Rows of gradients of scores have a multiple of as many, so that `grad_fourier_kernel` reads them
# in vectors; as many rows it takes at most.
# measured: gpu-h200.csv, "tiles of 128: (16,512,512,512), backward, bfloat16" takes less than
# "tiles of 64: (16,512,512,512), backward, bfloat16".
WHOLE_TILES = 128
# The sinusoids of a row itself cost as much as products with so many others, and a product a share
# of what `grad_tanh_kernel` takes for two.
# measured: gpu-h200.csv, "waves: (64,128,128,512), backward, bfloat16" and
# "waves: (16,512,512,512), backward, bfloat16", beside "tanh: (64,128,128,512), backward, bfloat16"
# and "tanh: (16,512,512,512), backward, bfloat16"; "waves: (16,64,512,512), backward, bfloat16" and
# "waves: (64,100,100,512), backward, bfloat16" keep to it.
_SINUSOIDS_OF_ROW, _TANH_PER_FOURIER = 256, 3.75


def pays_by_fourier(queries_len: int, keys_len: int) -> bool:
    """Whether `grad_fourier_kernel` is faster than `grad_tanh_kernel` in both of its passes."""
    of_queries, of_keys = (-(-n // 64) * 64 for n in (queries_len, keys_len))
    products = 2 * of_queries * of_keys + _SINUSOIDS_OF_ROW * (of_queries + of_keys)
    return products <= 2 * _TANH_PER_FOURIER * queries_len * keys_len


def grad_fourier(rows_len: int, others_len: int, gpu: Gpu) -> dict[str, Any]:
    """Of `grad_fourier_kernel`: 128 rows, 64 others, sinusoids of 4 units; Hopper: of 8."""
    # The fastest on sm_90 (gpu-h200.csv, "waves of 8 units, ..."); elsewhere too many registers.
    block_r, block_o = _block(rows_len, 16, WHOLE_TILES), _block(others_len, 16, 64)
    tile = {"BLOCK_H": 8, "STAGES": 1} if gpu.arch == "sm_90" else {"BLOCK_H": 4, "STAGES": 3}
    # Eight warps are two warpgroups of a Hopper. Before 3.9 Triton's wait for products holds back
    # one of them alone (its issue 11047). In what 3.6 and 3.9 compile of this kernel all threads
    # meet before they write to what either has read.
    return {"BLOCK_R": block_r, "BLOCK_O": block_o, **tile, "num_warps": 8 if block_r >= 64 else 4}

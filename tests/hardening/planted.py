"""The mistakes that ``make mutants`` plants, and the tests that should notice each."""

from dataclasses import dataclass

PARITY = ("tests/test_parity.py", "test_contract and not module")
SPLIT = ("tests/test_parity.py", "test_contract and split")
CUDA = ("tests/test_cuda_kernels.py", "test_contract or test_magnitudes")
RACES = ("tests/test_cuda_kernels.py", "races")
TRITON = ("tests/triton_kernels", "test_contract or magnitudes")


@dataclass
class Mutant:
    """One mistake: in ``file``, ``old`` (there once) becomes ``new``; ``tests`` should see it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, str]


MUTANTS = [
    Mutant(
        "cpu forward: mask off by one",
        "csrc/cpu/forward.h",
        "kept == 0 || kept > j1 ? j1 : kept;",
        "kept == 0 || kept >= j1 ? j1 : kept + 1;",
        PARITY,
    ),
    Mutant(
        "cpu forward: tail element dropped",
        "csrc/cpu/score.h",
        "return h < H ? load_as<A>(row + h, H - h)",
        "return h < H - 1 ? load_as<A>(row + h, H - 1 - h)",
        PARITY,
    ),
    Mutant(
        "cpu forward: wrong share of a reciprocal",
        "csrc/cpu/score.h",
        "{x.n * y.d + y.n * x.d, x.d * y.d}",
        "{x.n * x.d + y.n * y.d, x.d * y.d}",
        PARITY,
    ),
    Mutant(
        "cpu combine: last chunk dropped",
        "csrc/cpu/forward.h",
        "const int64_t used = (kept + plan.chunk - 1) / plan.chunk;",
        "const int64_t used = kept > plan.chunk ? kept / plan.chunk : 1;",
        SPLIT,
    ),
    Mutant(
        "cpu grad_softmax: every 64th key dropped",
        "csrc/cpu/backward.h",
        "j < kept && j < block + 64",
        "j < kept && j < block + 63",
        PARITY,
    ),
    Mutant(
        "cpu grad_softmax: padding not zeroed",
        "csrc/cpu/backward.h",
        "for (int64_t j = kept; j < p.Tk; ++j) scores[j] = A(0);",
        "for (int64_t j = kept + 1; j < p.Tk; ++j) scores[j] = A(0);",
        PARITY,
    ),
    Mutant(
        "cpu grad_tanh: wrong share of a reciprocal",
        "csrc/cpu/grad_tanh.h",
        "{inverse01 * d[1], inverse01 * d[0],",
        "{inverse01 * d[0], inverse01 * d[1],",
        PARITY,
    ),
    Mutant(
        "cpu grad_tanh: last key of a tile dropped",
        "csrc/cpu/grad_tanh.h",
        "k + l < count ? scores[",
        "k + l + 1 < count ? scores[",
        PARITY,
    ),
    Mutant(
        "cuda scores: last key of a tile dropped",
        "csrc/cuda/scores.h",
        "if (first + r < rows && h0 + h < p.H)",
        "if (first + r + 1 < rows && h0 + h < p.H)",
        CUDA,
    ),
    Mutant(
        "cuda: mask off by one",
        "csrc/cuda/problem.h",
        "p.Tk : int64_t(ceil(len));",
        "p.Tk : int64_t(len) + 1;",
        CUDA,
    ),
    Mutant(
        "cuda tanh: wrong share of a reciprocal",
        "csrc/cuda/tanh.h",
        "const float n01 = n[0] * d[1] + n[1] * d[0], n23 = n[2]",
        "const float n01 = n[0] * d[0] + n[1] * d[1], n23 = n[2]",
        CUDA,
    ),
    Mutant(
        "cuda decode: a barrier missing",
        "csrc/cuda/decode.h",
        "    __syncthreads();\n    return form;",
        "    return form;",
        RACES,
    ),
    Mutant(
        "cuda scores: a barrier missing",
        "csrc/cuda/scores.h",
        "      __syncthreads();\n      if (threadIdx.x < 3)",
        "      if (threadIdx.x < 3)",
        RACES,
    ),
    Mutant(
        "cuda grad_tanh: a barrier missing",
        "csrc/cuda/grad_tanh.h",
        "(mine.keys[j * kWarp + lane], form);\n      __syncthreads();",
        "(mine.keys[j * kWarp + lane], form);",
        RACES,
    ),
    Mutant(
        "triton softmax: mask off by one",
        "kernels/softmax.py",
        'j[None, :] < end[:, None], s, float("-inf")',
        'j[None, :] <= end[:, None], s, float("-inf")',
        TRITON,
    ),
    Mutant(
        "triton step: mask off by one",
        "kernels/step.py",
        "s = tl.where(j[None, :] < end[:, None], s",
        "s = tl.where(j[None, :] <= end[:, None], s",
        TRITON,
    ),
    Mutant(
        "triton scores: last key dropped",
        "kernels/scores.py",
        "    inside = j < Tk\n    key_rows",
        "    inside = j < Tk - 1\n    key_rows",
        TRITON,
    ),
    Mutant(
        "triton: wrong share of a reciprocal",
        "kernels/elementary.py",
        "(w0 * x1 + w1 * x0) * upper",
        "(w0 * x0 + w1 * x1) * upper",
        TRITON,
    ),
    Mutant(
        "triton grad_scores: last key dropped",
        "kernels/backward.py",
        "p * (g - mean), 0.0), mask=j < Tk)",
        "p * (g - mean), 0.0), mask=j < Tk - 1)",
        TRITON,
    ),
    Mutant(
        "triton grad_values: last feature dropped",
        "kernels/backward.py",
        "tl.store(target, total, mask=(j < Tk)[:, None] & (d < Dv)[None, :])",
        "tl.store(target, total, mask=(j < Tk)[:, None] & (d < Dv - 1)[None, :])",
        TRITON,
    ),
]

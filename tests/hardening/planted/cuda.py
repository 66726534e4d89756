"""Mistakes in the CUDA kernels, whose source the tests run on the host."""

from planted import BARRIER, MASK, OTHER, SHARE, TAIL, Mutant

FILE = "tests/test_cuda_kernels.py"
# Of one dtype, so that one driver is built for them.
DRAWN = (FILE, "test_drawn_cases_bf16")
STEP = (FILE, "projects_its_queries and bfloat16 or a_cluster_shares and bfloat16")
RAW = (FILE, "projects_its_keys_too and bfloat16 or from_the_keys_it_projects")
INSIDE = (FILE, "keys_are_cut and inside")
SPLIT = (FILE, "keys_are_cut and split")
# Few queries: of those drawn most are many.
STEP_BACK = (FILE, "keys_are_cut and (decoder or inside)")
FIVE = (FILE, "drops_what_the_cpu_drops and 5")
# The machine code, in which a race shows whatever the order of threads was.
RACES = ("tests/ptx/test_cuda.py", "any_order or one_launch")

SYNC = "__syncthreads();\n"

MUTANTS = [
    Mutant(
        "cuda, all", MASK, "a key too many",
        "csrc/cuda/kernels/problem.h", "keys_within(len, p.Tk);",
        "keys_within(len + 1.0, p.Tk);", DRAWN,
    ),
    Mutant(
        "cuda decode_forward", MASK, "a key too many", "csrc/cuda/kernels/decode.h",
        "larger(0, smaller(valid - j0, n));", "larger(0, smaller(valid - j0 + 1, n));", DRAWN,
    ),
    Mutant(
        "cuda decode_forward", TAIL, "last key of a split", "csrc/cuda/kernels/decode.h",
        "j < keys && i < p.Tq) mine.scores", "j + 1 < keys && i < p.Tq) mine.scores", DRAWN,
    ),
    Mutant(
        "cuda decode_forward", TAIL, "last column of the values", "csrc/cuda/kernels/decode.h",
        "if (i >= p.Tq || column >= p.Dv) continue;",
        "if (i >= p.Tq || column >= p.Dv - 1) continue;", DRAWN,
    ),
    Mutant(
        "cuda decode_forward", SHARE, "", "csrc/cuda/kernels/tanh.h",
        "const float n01 = w[0] * d[1] + w[1] * d[0]",
        "const float n01 = w[0] * d[0] + w[1] * d[1]", DRAWN,
    ),
    Mutant(
        "cuda decode_forward", BARRIER, "after the queries are loaded",
        "csrc/cuda/kernels/decode.h",
        f"    {SYNC}    return form;", "    return form;", RACES,
    ),
    Mutant(
        "cuda decode_forward", BARRIER, "between scores and softmax", "csrc/cuda/kernels/decode.h",
        f"        score_keys<false>(i0, keys, form);\n    }}\n    {SYNC}",
        "        score_keys<false>(i0, keys, form);\n    }\n", RACES,
    ),
    Mutant(
        "cuda split keys", TAIL, "last split", "csrc/cuda/kernels/decode.h",
        "for (int64_t k = 0; k < d.splits; ++k)\n          sum +=",
        "for (int64_t k = 0; k < d.splits - 1; ++k)\n          sum +=", SPLIT,
    ),
    Mutant(
        "cuda split keys", MASK, "a weight too many", "csrc/cuda/kernels/decode.h",
        "if (j < keys) x = exp_of(static_cast", "if (j <= keys && j < p.Tk) x = exp_of(static_cast",
        INSIDE,
    ),
    Mutant(
        "cuda split keys", BARRIER, "the last but one combines", "csrc/cuda/kernels/decode.h",
        "atomicAdd(d.arrived + b, 1u) == unsigned(d.splits - 1)",
        "atomicAdd(d.arrived + b, 1u) == unsigned(d.splits - 2)", SPLIT,
    ),
    Mutant(
        "cuda split keys", BARRIER, "no fence before arriving", "csrc/cuda/kernels/decode.h",
        f"    __threadfence();\n    {SYNC}    if", f"    {SYNC}    if", RACES,
    ),
    Mutant(
        "cuda split keys", OTHER, "the counter is left as it is", "csrc/cuda/kernels/decode.h",
        "if (*mine.last) atomicExch(d.arrived + b, 0u);", "", SPLIT,
    ),
    Mutant(
        "cuda W_q of a block", TAIL, "last feature", "csrc/cuda/kernels/decode.h",
        "load_units<T, A, vectors>(rows[q], c, d.Dq, query);",
        "load_units<T, A, vectors>(rows[q], c, d.Dq - 1, query);",
        (FILE, "projects_its_queries and bfloat16"),
    ),
    Mutant(
        "cuda W_q of a cluster", TAIL, "last hidden unit", "csrc/cuda/kernels/decode.h",
        "target < blocks && h < p.H) *in_block", "target < blocks && h < p.H - 1) *in_block", STEP,
    ),
    Mutant(
        "cuda W_q of a cluster", BARRIER, "after the shares are left", "csrc/cuda/kernels/decode.h",
        "      }\n    cluster_barrier();\n  }\n\n  __device__ void project(",
        "      }\n  }\n\n  __device__ void project(", RACES,
    ),
    Mutant(
        "cuda raw_keys_forward", MASK, "a key too many", "csrc/cuda/kernels/raw_keys.h",
        "scores[k] = j >= keys ? -INFINITY", "scores[k] = j > keys ? -INFINITY", RAW,
    ),
    Mutant(
        "cuda raw_keys_forward", TAIL, "last key of a split", "csrc/cuda/kernels/raw_keys.h",
        "if (i >= p.Tq || j >= keys) continue;", "if (i >= p.Tq || j + 1 >= keys) continue;", RAW,
    ),
    Mutant(
        "cuda raw_keys_forward", BARRIER, "before a tile is read", "csrc/cuda/kernels/raw_keys.h",
        f"        raw.parts[at] = 0;\n      {SYNC}", "        raw.parts[at] = 0;\n", RACES,
    ),
    Mutant(
        "cuda raw_keys_forward", BARRIER, "before the sums of the warps",
        "csrc/cuda/kernels/raw_keys.h",
        f"        add_scores(h0, sums);\n      }}\n      {SYNC}",
        "        add_scores(h0, sums);\n      }\n", RACES,
    ),
    Mutant(
        "cuda decode_backward", MASK, "a key too few", "csrc/cuda/kernels/decode_backward.h",
        "larger(0, smaller(n, key_count(p, b, i) - j0))",
        "larger(0, smaller(n, key_count(p, b, i) - 1 - j0))", STEP_BACK,
    ),
    Mutant(
        "cuda decode_backward", TAIL, "last key of a part", "csrc/cuda/kernels/decode_backward.h",
        "if (first + k >= n) continue;", "if (first + k >= n - 1) continue;", STEP_BACK,
    ),
    Mutant(
        "cuda decode_backward", TAIL, "last hidden unit", "csrc/cuda/kernels/decode_backward.h",
        "if (h < p.H) mine.sums", "if (h < p.H - 1) mine.sums", STEP_BACK,
    ),
    Mutant(
        "cuda decode_backward", SHARE, "", "csrc/cuda/kernels/tanh.h",
        "    const float inverse01 = inverse * d23, inverse23 = inverse * d01;\n    const float r",
        "    const float inverse01 = inverse * d01, inverse23 = inverse * d23;\n    const float r",
        STEP_BACK,
    ),
    Mutant(
        "cuda decode_backward", BARRIER, "of the cluster, before its sums",
        "csrc/cuda/kernels/decode_backward.h", "void finish() {\n    cluster_barrier();",
        f"void finish() {{\n    {SYNC.strip()}", RACES,
    ),
    Mutant(
        "cuda decode_backward", BARRIER, "before the sums of the warps",
        "csrc/cuda/kernels/decode_backward.h", f"meet_keys<vectors>(c0 + lane * U);\n      {SYNC}",
        "meet_keys<vectors>(c0 + lane * U);\n", RACES,
    ),
    Mutant(
        "cuda decode_grad_weights", TAIL, "last key of a split", "csrc/cuda/kernels/grad_scores.h",
        "for (int64_t j = warp; j < n; j += kDecodeWarps) {",
        "for (int64_t j = warp; j < n - 1; j += kDecodeWarps) {", FIVE,
    ),
    Mutant(
        "cuda decode_grad_weights", MASK, "the last key anybody looks at",
        "csrc/cuda/kernels/grad_scores.h", "i0 < p.Tq && j0 + j < used;",
        "i0 < p.Tq && j0 + j + 1 < used;", FIVE,
    ),
    Mutant(
        "cuda decode_grad_weights", BARRIER, "after loading", "csrc/cuda/kernels/grad_scores.h",
        f"dropout.factor<A>(row, j0 + j);\n    }}\n    {SYNC}",
        "dropout.factor<A>(row, j0 + j);\n    }\n", RACES,
    ),
    Mutant(
        "cuda softmax_grad", MASK, "a key too few", "csrc/cuda/kernels/grad_scores.h",
        "keys = key_count(g.p, row / g.p.Tq, row % g.p.Tq);",
        "keys = key_count(g.p, row / g.p.Tq, row % g.p.Tq) - 1;", DRAWN,
    ),
    Mutant(
        "cuda tile_scores", MASK, "a key too few", "csrc/cuda/kernels/scores.h",
        "column >= mine.key_counts[4 * ti + i]) continue;",
        "column + 1 >= mine.key_counts[4 * ti + i]) continue;", DRAWN,
    ),
    Mutant(
        "cuda tile_scores", TAIL, "last row of a tile", "csrc/cuda/kernels/scores.h",
        "if (first + r < rows && h0 + h < p.H)", "if (first + r + 1 < rows && h0 + h < p.H)", DRAWN,
    ),
    Mutant(
        "cuda tile_scores", SHARE, "", "csrc/cuda/kernels/tanh.h",
        "const float n01 = n[0] * d[1] + n[1] * d[0]",
        "const float n01 = n[0] * d[0] + n[1] * d[1]", DRAWN,
    ),
    Mutant(
        "cuda tile_scores", BARRIER, "after a slice is exponentiated", "csrc/cuda/kernels/scores.h",
        f"      {SYNC}      if (threadIdx.x < 3)", "      if (threadIdx.x < 3)", RACES,
    ),
    Mutant(
        "cuda row_softmax", MASK, "a key too few", "csrc/cuda/kernels/scores.h",
        "const int64_t keys = valid == 0 ? p.Tk : valid;",
        "const int64_t keys = valid == 0 ? p.Tk : valid - 1;", DRAWN,
    ),
    Mutant(
        "cuda row_softmax", BARRIER, "in the maximum over the block", "csrc/cuda/kernels/device.h",
        f"= x;\n  {SYNC}  return warp_max", "= x;\n  return warp_max", RACES,
    ),
    Mutant(
        "cuda weights_product", MASK, "a value too few", "csrc/cuda/kernels/matmul.h",
        "limit[threadIdx.x] = valid == 0 ? p.Tk : valid;",
        "limit[threadIdx.x] = valid == 0 ? p.Tk : valid - 1;", DRAWN,
    ),
    Mutant(
        "cuda weights_product", TAIL, "last term", "csrc/cuda/kernels/matmul.h",
        "if (m >= M || k >= K) return A(0);", "if (m >= M || k >= K - 1) return A(0);", DRAWN,
    ),
    Mutant(
        "cuda weights_product", BARRIER, "after a slice is loaded", "csrc/cuda/kernels/matmul.h",
        f"load_slice(k0);\n      {SYNC}", "load_slice(k0);\n", RACES,
    ),
    Mutant(
        "cuda grad_tanh", MASK, "a key too few", "csrc/cuda/kernels/grad_tanh.h",
        "smaller(kGradKeys, key_count(p, b, i) - j0)",
        "smaller(kGradKeys, key_count(p, b, i) - 1 - j0)", DRAWN,
    ),
    Mutant(
        "cuda grad_tanh", TAIL, "last key of a chunk", "csrc/cuda/kernels/grad_tanh.h",
        "j < smaller(kGradKeys, p.Tk - j0);", "j < smaller(kGradKeys, p.Tk - j0) - 1;", DRAWN,
    ),
    Mutant(
        "cuda grad_tanh", SHARE, "", "csrc/cuda/kernels/tanh.h",
        "      const float inverse01 = inverse * d23, inverse23 = inverse * d01;",
        "      const float inverse01 = inverse * d01, inverse23 = inverse * d23;", DRAWN,
    ),
    Mutant(
        "cuda grad_tanh", BARRIER, "after the scores are loaded", "csrc/cuda/kernels/grad_tanh.h",
        f"load_scores(i0, queries);\n      {SYNC}", "load_scores(i0, queries);\n", RACES,
    ),
    Mutant(
        "cuda sum_parts", TAIL, "last sum", "csrc/cuda/kernels/grad_tanh.h",
        "if (warp != 0 || x >= s.size) return;", "if (warp != 0 || x >= s.size - 1) return;", DRAWN,
    ),
    Mutant(
        "cuda sum_parts", BARRIER, "before the warps are summed", "csrc/cuda/kernels/grad_tanh.h",
        f"sums[threadIdx.x] = sum;\n  {SYNC}", "sums[threadIdx.x] = sum;\n", RACES,
    ),
]  # fmt: skip

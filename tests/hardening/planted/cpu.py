"""Mistakes in the CPU kernels and in what gathers their gradients.

They have no barriers: a task is one thread's, and the threads of a step have ended before the next.
"""

from planted import MASK, OTHER, SHARE, TAIL, Mutant

PARITY = ("tests/test_parity.py", "test_contract and not module and (float32 or bfloat16)")
SPLIT = ("tests/test_parity.py", "test_contract and split")
MAGNITUDES = ("tests/test_parity.py", "test_magnitudes and float32")
SMALL = ("tests/test_parity.py", "test_contract and operator")
STEP = ("tests/test_step.py", "")
PRODUCTS = ("tests/test_projection.py", "few_rows or values_and_gradients")
STEPS = (
    "tests/test_recurrent.py",
    "same_as_steps or test_sizes or test_dropout or gradient_with_dropout",
)
GREEDY = ("tests/test_greedy.py", "same_as_steps or every_row_has_ended")
DEFERRED = ("tests/test_deferred.py", "not threads")
DROPOUT = ("tests/test_dropout.py", "")

MUTANTS = [
    Mutant(
        "cpu forward", MASK, "a key too many", "csrc/cpu/kernels/forward.h",
        "keys == 0 || keys > j1 ? j1 : keys;", "keys == 0 || keys >= j1 ? j1 : keys + 1;", PARITY,
    ),
    Mutant(
        "cpu forward", MASK, "the first padded weight not zeroed", "csrc/cpu/kernels/forward.h",
        "for (int64_t j = keys; j < Tk; ++j) narrow",
        "for (int64_t j = keys + 1; j < Tk; ++j) narrow", PARITY,
    ),
    Mutant(
        "cpu forward", TAIL, "last hidden unit", "csrc/cpu/kernels/score.h",
        "return h < H ? load_as<A>(row + h, H - h)",
        "return h < H - 1 ? load_as<A>(row + h, H - 1 - h)", PARITY,
    ),
    Mutant(
        "cpu forward", TAIL, "an odd last key", "csrc/cpu/kernels/score.h",
        "if (j < keys) score_rows<A, 1, form>", "if (j + 1 < keys) score_rows<A, 1, form>", PARITY,
    ),
    Mutant(
        "cpu forward", TAIL, "last column of the values", "csrc/cpu/kernels/linear.h",
        "  for (; c < columns; ++c) {", "  for (; c + 1 < columns; ++c) {", PARITY,
    ),
    Mutant(
        "cpu forward", TAIL, "last unit of far inputs", "csrc/cpu/kernels/score.h",
        "const Vec<A> x = load_as<A>(query + h, H - h) + load_as<A>(key + h, H - h);",
        "const Vec<A> x = load_as<A>(query + h, H - 1 - h) + load_as<A>(key + h, H - 1 - h);",
        MAGNITUDES,
    ),
    Mutant(
        "cpu forward", SHARE, "", "csrc/cpu/kernels/score.h", "{x.n * y.d + y.n * x.d, x.d * y.d}",
        "{x.n * x.d + y.n * y.d, x.d * y.d}", PARITY,
    ),
    Mutant(
        "cpu exp_keys", TAIL, "last hidden unit",
        "csrc/cpu/kernels/score.h", "load_row<A, count>(row, h, H, m);",
        "load_row<A, count>(row, h, H - 1, m);", PARITY,
    ),
    Mutant(
        "cpu exp_keys", TAIL, "last chunk of keys", "csrc/cpu/op/inputs.cpp",
        "for (int64_t c = 0; c < chunks && best == best; ++c)",
        "for (int64_t c = 0; c + 1 < chunks && best == best; ++c)", MAGNITUDES,
    ),
    Mutant(
        "cpu combine", MASK, "the last key left out", "csrc/cpu/kernels/forward.h",
        "const int64_t keys = p.key_counts[row] == 0 ? p.Tk : p.key_counts[row];",
        "const int64_t keys = p.key_counts[row] == 0 ? p.Tk : p.key_counts[row] - 1;", SPLIT,
    ),
    Mutant(
        "cpu combine", TAIL, "last chunk", "csrc/cpu/kernels/forward.h",
        "const int64_t used = (keys + plan.chunk - 1) / plan.chunk;",
        "const int64_t used = keys > plan.chunk ? keys / plan.chunk : 1;", SPLIT,
    ),
    Mutant(
        "cpu dropout", MASK, "the number of the neighbour", "csrc/cpu/kernels/dropout.h",
        "block.lane[j & 3] >=", "block.lane[(j + 1) & 3] >=", DROPOUT,
    ),
    Mutant(
        "cpu grad_scores", TAIL, "last key of a tile", "csrc/cpu/kernels/backward.h",
        "const int64_t keys = first + kTile <= j1 ? kTile : j1 - first;",
        "const int64_t keys = first + kTile <= j1 ? kTile : j1 - first - 1;", PARITY,
    ),
    Mutant(
        "cpu grad_scores", TAIL, "last chunk of keys", "csrc/cpu/op/run.cpp",
        "const int64_t chunks = ceil_div(p.Tk, chunk);", "const int64_t chunks = p.Tk / chunk;",
        PARITY,
    ),
    Mutant(
        "cpu grad_scores", TAIL, "last features of the values", "csrc/cpu/kernels/linear.h",
        "for (int64_t k = c; k < columns; ++k)", "for (int64_t k = c; k + 1 < columns; ++k)",
        PARITY,
    ),
    Mutant(
        "cpu grad_softmax", MASK, "the first padded score not zeroed",
        "csrc/cpu/kernels/backward.h",
        "for (int64_t j = keys; j < p.Tk; ++j) scores[j] = A(0);",
        "for (int64_t j = keys + 1; j < p.Tk; ++j) scores[j] = A(0);", PARITY,
    ),
    Mutant(
        "cpu grad_softmax", TAIL, "every 64th key", "csrc/cpu/kernels/backward.h",
        "j < keys && j < block + 64", "j < keys && j < block + 63", PARITY,
    ),
    Mutant(
        "cpu grad_softmax", TAIL, "last weight kept for later", "csrc/cpu/kernels/backward.h",
        "const int64_t end = j + columns < p.Tk ? j + columns : p.Tk;",
        "const int64_t end = j + columns < p.Tk ? j + columns : p.Tk - 1;", DEFERRED,
    ),
    Mutant(
        "cpu grad_tanh", MASK, "the first padded key not zeroed", "csrc/cpu/kernels/grad_tanh.h",
        "for (int64_t j = used; grad_keys", "for (int64_t j = used + 1; grad_keys", PARITY,
    ),
    Mutant(
        "cpu grad_tanh", TAIL, "last key of a tile", "csrc/cpu/kernels/grad_tanh.h",
        "k + l < count ? scores[", "k + l + 1 < count ? scores[", PARITY,
    ),
    Mutant(
        "cpu grad_tanh", TAIL, "last slice of hidden units", "csrc/cpu/op/run.cpp",
        "hidden > 0 ? ceil_div(p.width, hidden) : 0", "hidden > 0 ? p.width / hidden : 0", PARITY,
    ),
    Mutant(
        "cpu grad_tanh", SHARE, "",
        "csrc/cpu/kernels/grad_tanh.h", "{inverse01 * d[1], inverse01 * d[0],",
        "{inverse01 * d[0], inverse01 * d[1],", PARITY,
    ),
    Mutant(
        "cpu project", TAIL, "last bias",
        "csrc/cpu/kernels/project.h", "bias == nullptr ? dot",
        "bias == nullptr || h + k + 1 == p.H ? dot", SMALL,
    ),
    Mutant(
        "cpu attend_step", TAIL, "last columns of the projection", "csrc/cpu/op/project.cpp",
        "blocks(p.H), p.B * p.R", "p.H / kBlock, p.B * p.R", STEP,
    ),
    Mutant(
        "cpu attend_step", OTHER, "columns of the first part in all", "csrc/cpu/op/project.cpp",
        "part.w = static_cast<const char*>(p.w) + first * p.D * bytes;",
        "part.w = static_cast<const char*>(p.w);", STEP,
    ),
    Mutant(
        "cpu project_backward", TAIL, "last row", "csrc/cpu/kernels/project.h",
        "for (int64_t r = 0; r < count; ++r) total",
        "for (int64_t r = 0; r < count - 1; ++r) total", SMALL,
    ),
    Mutant(
        "cpu project_backward", TAIL, "last columns of the rows", "csrc/cpu/op/project.cpp",
        "of_rows ? blocks(p.D) : 0", "of_rows ? p.D / kBlock : 0", PRODUCTS,
    ),
    Mutant(
        "cpu project_backward", TAIL, "last hidden units of a sum", "csrc/cpu/kernels/project.h",
        "p.H - h < kUnits ? p.H - h : kUnits", "p.H - h < kUnits ? p.H - h - 1 : kUnits", PRODUCTS,
    ),
    Mutant(
        "cpu project_backward", OTHER, "of a few hidden units those of the first",
        "csrc/cpu/kernels/project.h", "grads + b * p.R * n + h, 1, n,",
        "grads + b * p.R * n, 1, n,", PRODUCTS,
    ),
    Mutant(
        "cpu deferred sums", MASK, "a key too few for steps without lengths",
        "bahdanau_fast/ops/shared_gradients.py", "asked.new_full((), keys_len,",
        "asked.new_full((), keys_len - 1,", DEFERRED,
    ),
    Mutant(
        "cpu deferred sums", TAIL, "last step", "bahdanau_fast/ops/shared_gradients.py",
        "= zip(*calls, strict=True)", "= zip(*(calls[:-1] or calls), strict=True)", DEFERRED,
    ),
    Mutant(
        "cpu deferred sums", OTHER, "gradients of the neighbour asked for",
        "bahdanau_fast/ops/shared_gradients.py", 'needs_of(("keys", "values"',
        'needs_of(("values", "keys"', DEFERRED,
    ),
    Mutant(
        "cpu decoder products", TAIL, "last column of a weight", "csrc/cpu/kernels/recurrent.h",
        "N - first < kPanel<A> ? N - first : kPanel<A>",
        "N - first < kPanel<A> ? N - first - 1 : kPanel<A>", STEPS,
    ),
    Mutant(
        "cpu decoder cells", TAIL, "last hidden units", "csrc/cpu/kernels/recurrent.h",
        "for (int64_t u = 0; u < H; u += kLanes<A>) f",
        "for (int64_t u = 0; u + kLanes<A> <= H; u += kLanes<A>) f", STEPS,
    ),
    Mutant(
        "cpu decoder cells", OTHER, "reset for update", "csrc/cpu/kernels/recurrent.h",
        "fresh + z * (load_as", "fresh + r * (load_as", STEPS,
    ),
    Mutant(
        "cpu decoder cells", OTHER, "input for forget, back", "csrc/cpu/kernels/recurrent.h",
        "Vec<A>(dc * keep), n)", "Vec<A>(dc * in), n)", STEPS,
    ),
    Mutant(
        "cpu decoder cells", TAIL, "last row of a batch", "csrc/cpu/decoder/decoder.h",
        "block * some + some < B ? block * some + some : B;",
        "block * some + some < B ? block * some + some : B - 1;", STEPS,
    ),
    Mutant(
        "cpu decode", MASK, "dropped out as at the step before", "csrc/cpu/decoder/decoder.cpp",
        "in.problem.seed = seed_of_step(first_seed_, t);",
        "in.problem.seed = seed_of_step(first_seed_, t > 0 ? t - 1 : 0);", STEPS,
    ),
    Mutant(
        "cpu decode", MASK, "masked as the step before, between layers",
        "csrc/cpu/decoder/decoder.h", "((l - 1) * T + t) * B * H",
        "((l - 1) * T + (t > 0 ? t - 1 : 0)) * B * H",
        ("tests/test_decoding.py", "masks_between_layers"),
    ),
    Mutant(
        "cpu decode", TAIL, "last step", "csrc/cpu/decoder/decoder.cpp",
        "for (int64_t t = 0; t < d.T; ++t)", "for (int64_t t = 0; t < d.T - 1; ++t)", STEPS,
    ),
    Mutant(
        "cpu decode_backward", MASK, "dropped out as at the step before",
        "csrc/cpu/decoder/decoder_backward.cpp", "in.problem.seed = seed_of_step(first_seed, t);",
        "in.problem.seed = seed_of_step(first_seed, t > 0 ? t - 1 : 0);", STEPS,
    ),
    Mutant(
        "cpu decode_backward", TAIL, "first step", "csrc/cpu/decoder/decoder_backward.cpp",
        "for (int64_t t = T - 1; t >= 0; --t)", "for (int64_t t = T - 1; t > 0; --t)", STEPS,
    ),
    Mutant(
        "cpu decode_greedy", MASK, "the token after one left out", "csrc/cpu/decoder/decoder.cpp",
        "if (left_out[i]) continue;", "if (i > 0 && left_out[i - 1]) continue;", GREEDY,
    ),
    Mutant(
        "cpu decode_greedy", TAIL, "last token", "csrc/cpu/decoder/decoder.cpp",
        "for (int64_t i = 0; i < n; ++i) {\n    if (left_out",
        "for (int64_t i = 0; i < n - 1; ++i) {\n    if (left_out", GREEDY,
    ),
]  # fmt: skip

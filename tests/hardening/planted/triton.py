"""Mistakes in the Triton kernels.

The interpreter runs a program as one thread: barriers it cannot miss.
"""

from planted import MASK, SHARE, TAIL, Mutant

FOLDER = "tests/triton/kernels"
MANY = (FOLDER, "test_contract and not step and (lens or whole or past)")
STEP = (FOLDER, "test_contract_of_a_step and (lens or whole or past)")
SPLITS = (FOLDER, "splits_of_one_long_row")
PROJECTING = (FOLDER, "projections_inside")
PRECISE = (FOLDER, "too_large_for_fp64")

MUTANTS = [
    Mutant(
        "triton step", MASK, "a key too many", "kernels/step.py",
        "s = tl.where(j[None, :] < end[:, None], s", "s = tl.where(j[None, :] <= end[:, None], s",
        STEP,
    ),
    Mutant(
        "triton step", TAIL, "last key of a split", "kernels/step.py",
        "last = tl.minimum(first + split_keys, tl.max(end, axis=0))",
        "last = tl.minimum(first + split_keys, tl.max(end, axis=0) - 1)", STEP,
    ),
    Mutant(
        "triton step", SHARE, "", "kernels/elementary.py",
        "return 1.0 + shared * x1, 1.0 + shared * x0",
        "return 1.0 + shared * x0, 1.0 + shared * x1", STEP,
    ),
    Mutant(
        "triton project_row", TAIL, "last hidden unit", "kernels/step.py",
        "tl.store(out + h, total, mask=h < H)", "tl.store(out + h, total, mask=h < H - 1)",
        PROJECTING,
    ),
    Mutant(
        "triton project_tiles", TAIL, "last feature", "kernels/step.py",
        "mask=inside[:, None] & (d < D)[None, :]", "mask=inside[:, None] & (d < D - 1)[None, :]",
        PROJECTING,
    ),
    Mutant(
        "triton combine", MASK, "a key too few", "kernels/step.py",
        "end = tl.where(kept == 0, Tk, kept) + one",
        "end = tl.where(kept == 0, Tk, kept - 1) + one", SPLITS,
    ),
    Mutant(
        "triton combine", TAIL, "last split", "kernels/step.py", "for split in range(0, splits):",
        "for split in range(0, splits - 1):", SPLITS,
    ),
    Mutant(
        "triton tables", TAIL, "last hidden unit", "kernels/tables.py",
        "mask = inside[:, None] & (h < H)[None, :]",
        "mask = inside[:, None] & (h < H - 1)[None, :]", MANY,
    ),
    Mutant(
        "triton scores", MASK, "a block with one key", "kernels/scores.py",
        "if k0 < kept_keys(lens, tl.cast(query", "if k0 + 1 < kept_keys(lens, tl.cast(query", MANY,
    ),
    Mutant(
        "triton scores", TAIL, "last key", "kernels/scores.py", "    inside = j < Tk\n    key_rows",
        "    inside = j < Tk - 1\n    key_rows", MANY,
    ),
    Mutant(
        "triton scores", SHARE, "", "kernels/elementary.py", "(w0 * x1 + w1 * x0) * upper",
        "(w0 * x0 + w1 * x1) * upper", MANY,
    ),
    Mutant(
        "triton softmax", MASK, "a key too many", "kernels/softmax.py",
        'j[None, :] < end[:, None], s, float("-inf")',
        'j[None, :] <= end[:, None], s, float("-inf")', MANY,
    ),
    Mutant(
        "triton softmax", TAIL, "last feature", "kernels/softmax.py",
        "tl.store(out, sums, mask=real[:, None] & (d < Dv)[None, :])",
        "tl.store(out, sums, mask=real[:, None] & (d < Dv - 1)[None, :])", MANY,
    ),
    Mutant(
        "triton grad_weights", MASK, "a key too few", "kernels/backward.py",
        "there = real[:, None] & (j[None, :] < kept[:, None])",
        "there = real[:, None] & (j[None, :] < kept[:, None] - 1)", MANY,
    ),
    Mutant(
        "triton grad_weights", TAIL, "last feature", "kernels/backward.py",
        "mask=(j < longest)[None, :] & (d < Dv)[:, None],",
        "mask=(j < longest)[None, :] & (d < Dv - 1)[:, None],", MANY,
    ),
    Mutant(
        "triton grad_softmax", MASK, "a key too few", "kernels/backward.py",
        "tl.where(j < kept, p * (g - mean), 0.0)", "tl.where(j < kept - 1, p * (g - mean), 0.0)",
        MANY,
    ),
    Mutant(
        "triton grad_softmax", TAIL, "last key", "kernels/backward.py",
        "p * (g - mean), 0.0), mask=j < Tk)", "p * (g - mean), 0.0), mask=j < Tk - 1)", MANY,
    ),
    Mutant(
        "triton grad_values", TAIL, "last feature", "kernels/backward.py",
        "tl.store(target, total, mask=(j < Tk)[:, None] & (d < Dv)[None, :])",
        "tl.store(target, total, mask=(j < Tk)[:, None] & (d < Dv - 1)[None, :])", MANY,
    ),
    Mutant(
        "triton grad_tanh", MASK, "a key too few", "kernels/grad_tanh.py",
        "last = kept_keys(kept, b * kept_batch, O, HAS_LENS)",
        "last = kept_keys(kept, b * kept_batch, O, HAS_LENS) - 1", MANY,
    ),
    Mutant(
        "triton grad_tanh", TAIL, "last row of a block", "kernels/grad_tanh.py",
        "store_tile(target, r < R, h, H, sum0 * w0)",
        "store_tile(target, r < R - 1, h, H, sum0 * w0)", MANY,
    ),
    Mutant(
        "triton grad_tanh", SHARE, "", "kernels/elementary.py",
        "r0, r1 = shared * x1, shared * x0\n    return 1.0",
        "r0, r1 = shared * x0, shared * x1\n    return 1.0", MANY,
    ),
    Mutant(
        "triton grad_tanh", SHARE, "near zero", "kernels/elementary.py",
        "(t0 + u0) * (shared * x1), (t1 + u1) * (shared * x0)",
        "(t0 + u0) * (shared * x0), (t1 + u1) * (shared * x1)", PRECISE,
    ),
]  # fmt: skip

"""Mistakes in the CPU kernels for features, other activations, masks and locations."""

from planted import MASK, OTHER, SHARE, TAIL, Mutant

FORMS = ("tests/test_general.py", "test_forms and (float32 or bfloat16)")
ROWS = ("tests/test_general.py", "(test_contract or test_scores) and float32")
MASKS = ("tests/test_masks.py", "")
MASKED = ("tests/test_general.py", "test_contract and mask and float32")
KINKS = ("tests/test_kinks.py", "")
STEPS = ("tests/test_location.py", "test_steps or test_gradients")

FORWARD = "csrc/cpu/kernels/forward.h"
SCORES = "csrc/cpu/kernels/general/scores.h"
ACTIVATION = "csrc/cpu/kernels/general/activation.h"
GRADIENTS = "csrc/cpu/kernels/general/gradients.h"
CONVOLUTION = "csrc/cpu/kernels/general/convolution.h"

MUTANTS = [
    Mutant(
        "cpu masks", MASK, "that of the first query alone", FORWARD,
        "k > 0 && p.mask.row_stride == 0 &&", "k > 0 &&", MASKED,
    ),
    Mutant(
        "cpu masks", MASK, "that of the key before", FORWARD,
        "row[j] = seen[j] ? row[j]", "row[j] = seen[j > 0 ? j - 1 : 0] ? row[j]", MASKS,
    ),
    Mutant(
        "cpu masks", TAIL, "last key of a tile not looked for", FORWARD,
        "j + kTableRows < keys ? kTableRows : keys - j);",
        "j + kTableRows < keys ? kTableRows - 1 : keys - j);", MASKS,
    ),
    Mutant(
        "cpu masks", TAIL, "of a row that is no whole words", FORWARD,
        "for (; j < n; ++j) all |= bytes[j];", "for (; j < n - 1; ++j) all |= bytes[j];", MASKS,
    ),
    Mutant(
        "cpu general_scores", MASK, "the first key of a uniform row", FORWARD,
        "for (int64_t k = 0; k < keys; ++k) out[k] = A(0);",
        "for (int64_t k = 1; k < keys; ++k) out[k] = A(0);", FORMS,
    ),
    Mutant(
        "cpu general_scores", MASK, "keys of the query with the fewest", FORWARD,
        "used = count(i) > used ? count(i) : used;",
        "used = i == 0 || count(i) < used ? count(i) : used;", ROWS,
    ),
    Mutant(
        "cpu general_scores", TAIL, "last hidden unit of one query", SCORES,
        "load_row<A>(key[k], at, H));", "load_row<A>(key[k], at, H - 1));", ROWS,
    ),
    Mutant(
        "cpu general_scores", TAIL, "last hidden unit of several queries", SCORES,
        "store(row + h, load_row<A>(key, h, valid));",
        "store(row + h, load_row<A>(key, h, valid - 1));", FORMS,
    ),
    Mutant(
        "cpu general_scores", TAIL, "last vectors of a key", SCORES,
        "if (h < H) add(h, std::false_type{});", "if (h + L < H) add(h, std::false_type{});", ROWS,
    ),
    Mutant(
        "cpu general_scores", TAIL, "last of some keys", SCORES,
        "k < K && first + k < count; ++k) out[first", "k < K && first + K <= count; ++k) out[first",
        FORMS,
    ),
    Mutant(
        "cpu general_scores", OTHER, "features of the neighbour", SCORES,
        "f[k] = features.f + j * features.key_step;",
        "f[k] = features.f + first * features.key_step;", ROWS,
    ),
    Mutant(
        "cpu general_scores", OTHER, "features of the first key, several queries", SCORES,
        "weighted_sums<A>(features + j * g.features.row_stride,", "weighted_sums<A>(features,",
        FORMS,
    ),
    Mutant(
        "cpu activation", SHARE, "", ACTIVATION,
        "inverse01 = inverse * d23, inverse23 = inverse * d01;",
        "inverse01 = inverse * d01, inverse23 = inverse * d23;", FORMS,
    ),
    Mutant(
        "cpu activation", OTHER, "slope of relu at zero", ACTIVATION,
        "return x <= 0 ? Vec<A>{}", "return x < 0 ? Vec<A>{}", KINKS,
    ),
    Mutant(
        "cpu activation", OTHER, "slope of leaky_relu at zero", ACTIVATION,
        "return x > 0 ? splat<A>(A(1)) : splat", "return x >= 0 ? splat<A>(A(1)) : splat", KINKS,
    ),
    Mutant(
        "cpu grad_general", MASK, "looked at by the first query alone", GRADIENTS,
        "i < p.Tq; ++i, row += p.mask.row_stride)", "i < 1; ++i, row += p.mask.row_stride)", MASKED,
    ),
    Mutant(
        "cpu grad_general", MASK, "the first padded key not zeroed", GRADIENTS,
        "for (int64_t j = used; g.grad_keys", "for (int64_t j = used + 1; g.grad_keys", FORMS,
    ),
    Mutant(
        "cpu grad_general", MASK, "features of the first padded key not zeroed", GRADIENTS,
        "for (int64_t j = used; j < p.Tk; ++j) feature_grads()",
        "for (int64_t j = used + 1; j < p.Tk; ++j) feature_grads()", FORMS,
    ),
    Mutant(
        "cpu grad_general", MASK, "W_f of a row without keys not zeroed", GRADIENTS,
        "for (int64_t h = 0; used == 0 && h", "for (int64_t h = 0; used < 0 && h", FORMS,
    ),
    Mutant(
        "cpu grad_general", TAIL, "last of some keys", GRADIENTS,
        "l < count ? scores[", "l + 1 < count ? scores[", FORMS,
    ),
    Mutant(
        "cpu grad_general", TAIL, "last partial sums", GRADIENTS,
        "== 0 || j + kKeys >= used) settle();", "== 0 || j + kKeys > used) settle();", ROWS,
    ),
    Mutant(
        "cpu grad_general", TAIL, "features of the last key", GRADIENTS,
        "grads, n, count, n, feature_grads() + j, p.Tk);",
        "grads, n, count - 1, n, feature_grads() + j, p.Tk);", FORMS,
    ),
    Mutant(
        "cpu grad_general", TAIL, "features of the last key, whole vectors of them", GRADIENTS,
        "for (int64_t k = 0; k < count; ++k)\n          feature_grads()",
        "for (int64_t k = 0; k < count - 1; ++k)\n          feature_grads()", FORMS,
    ),
    Mutant(
        "cpu grad_general", TAIL, "last slice of the features' gradients", "csrc/cpu/op/run.cpp",
        "sum_rows(feature_parts.get(), slices,", "sum_rows(feature_parts.get(), slices - 1,", ROWS,
    ),
    Mutant(
        "cpu grad_general", TAIL, "last hidden units of a sum of key gradients", FORWARD,
        "if (k < n) store_as<A>(out + k, Vec", "if (k + 1 < n) store_as<A>(out + k, Vec", STEPS,
    ),
    Mutant(
        "cpu grad_general", OTHER, "W_f of the last keys alone", GRADIENTS,
        "n, j > 0, grad_w_f, n,", "n, false, grad_w_f, n,", FORMS,
    ),
    Mutant(
        "cpu grad_general", OTHER, "W_f of a slice in the place of the first", GRADIENTS,
        "static_cast<A*>(g.grad_w_f) + (b * p.general.C + c) * p.width + h0,",
        "static_cast<A*>(g.grad_w_f) + (b * p.general.C + c) * p.width,", ROWS,
    ),
    Mutant(
        "cpu grad_general", OTHER, "a sum of key gradients overwritten", GRADIENTS,
        "add_row(grads + k * n, valid, grad_key(j + k));",
        "store_row(grads + k * n, valid, grad_key(j + k));", STEPS,
    ),
    Mutant(
        "cpu convolution", TAIL, "last tap", CONVOLUTION,
        "padded + i * width, 1, p.taps, columns,", "padded + i * width, 1, p.taps - 1, columns,",
        STEPS,
    ),
    Mutant(
        "cpu convolution", TAIL, "last key", CONVOLUTION,
        "for (int64_t j = 0; j < p.Tk; ++j) out[before + j] =",
        "for (int64_t j = 0; j < p.Tk - 1; ++j) out[before + j] =", STEPS,
    ),
    Mutant(
        "cpu convolution", TAIL, "last channels", "csrc/cpu/op/location.cpp",
        "const int64_t parts = (p.C + kChannels - 1) / kChannels;",
        "const int64_t parts = p.C > kChannels ? p.C / kChannels : 1;", STEPS,
    ),
    Mutant(
        "cpu convolution", OTHER, "one key too far", CONVOLUTION,
        "width = padded_keys<A>(p), before = (p.taps - 1) / 2;",
        "width = padded_keys<A>(p), before = (p.taps + 1) / 2;", STEPS,
    ),
    Mutant(
        "cpu convolution", OTHER, "bias of the first channel", CONVOLUTION,
        "bias != nullptr ? bias[c]", "bias != nullptr ? bias[c0]", STEPS,
    ),
    Mutant(
        "cpu convolution_backward", TAIL, "last key of the gradient of w", CONVOLUTION,
        "padded + i * width, 1, p.Tk, taps, false,",
        "padded + i * width, 1, p.Tk - 1, taps, false,", STEPS,
    ),
    Mutant(
        "cpu convolution_backward", TAIL, "first channel", CONVOLUTION,
        "c > 0, to_location, keys", "c > 1, to_location, keys", STEPS,
    ),
    Mutant(
        "cpu convolution_backward", OTHER, "w of one input for another", CONVOLUTION,
        "part + (c * p.inputs + i) * p.taps", "part + (c * p.inputs) * p.taps", STEPS,
    ),
]  # fmt: skip

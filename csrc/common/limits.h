// Numbers that decide how a call is computed. No torch in here.
#pragma once

#include "common/kinds.h"

namespace bahdanau_fast {

// fp32 problems of at most this many (query, key, hidden) elements are computed in fp64 on the CPU:
// that costs little there, and leaves only the rounding of the result as an error. It is also the
// limit of tables (exp_keys), in (key, hidden) elements; a table made for calls without gradients,
// whose sums cancel less, has the second one.
constexpr int64_t kMaxFp64CpuElements = 196608, kMaxFp64ForwardTableElements = 16384;
// fp32 problems of any size are computed in fp64 on the CPU if the norm of w_v is above this: their
// scores are in the hundreds, where the rounding of fp32 shows in the softmax.
constexpr double kMaxFp32NormOfW = 64.0;

// On a GPU: the most queries of a row and the most hidden units that CUDA C++ serves.
constexpr int64_t kDecodeQueries = 16, kDecodeHidden = 2048;

// The kind that computes.
constexpr Kind computing_kind(Kind storage, int64_t elements, int64_t limit) {
  return storage == Kind::f32 && elements <= limit ? Kind::f32_in_f64 : storage;
}

}  // namespace bahdanau_fast

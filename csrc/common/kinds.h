// The types tensors are stored in, as all kernels know them. No torch, no instruction set in here.
#pragma once

#include <cstdint>

namespace bahdanau_fast {

// Storage type of the tensors, and the type sums are taken in.
enum class Kind : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3, f32_in_f64 = 4 };
constexpr int kKinds = 5;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// The weights are returned, and kept for backward, in no less than fp32: a softmax gradient
// subtracts neighbouring numbers.
template <class T>
struct WeightOf {
  using type = float;
};
template <>
struct WeightOf<double> {
  using type = double;
};

}  // namespace bahdanau_fast

// Storage types of tensors, for all kernels. No torch, no instruction set in here.
#pragma once

#include <cstdint>

namespace bahdanau_fast {

// The storage type of the tensors; the sum type is fp64 for the two with f64 in their name, else
// fp32. CUDA has the kernels of f32, bf16 and f16 alone.
enum class Kind : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3, f32_in_f64 = 4 };
constexpr int kKinds = 5;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Attention weights are returned, and saved for backward, in fp32 or fp64: a softmax gradient is a
// difference of numbers that are nearly the same.
template <class T>
struct WeightOf {
  using type = float;
};
template <>
struct WeightOf<double> {
  using type = double;
};

}  // namespace bahdanau_fast

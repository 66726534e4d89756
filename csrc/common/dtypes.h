// From torch's dtypes to the types the kernels know.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/kinds.h"

namespace bahdanau_fast {

// The kind of a floating tensor, or of rows like it; an error that names the argument for any
// other.
template <class Rows>
Kind kind_of(const Rows& tensor, const char* name) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Kind::f32;
    case ScalarType::Double:
      return Kind::f64;
    case ScalarType::BFloat16:
      return Kind::bf16;
    case ScalarType::Half:
      return Kind::f16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16, float16 or float64");
  }
  return Kind::f32;
}

// f(x) with an x of the type that the elements of a tensor of any real dtype have.
template <class F>
auto with_type_of(const torch::stable::Tensor& tensor, const char* name, const F& f) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Long:
      return f(int64_t{});
    case ScalarType::Int:
      return f(int32_t{});
    case ScalarType::Short:
      return f(int16_t{});
    case ScalarType::Char:
      return f(int8_t{});
    case ScalarType::Byte:
      return f(uint8_t{});
    case ScalarType::UInt16:
      return f(uint16_t{});
    case ScalarType::UInt32:
      return f(uint32_t{});
    case ScalarType::UInt64:
      return f(uint64_t{});
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      return f(double{});
    case ScalarType::BFloat16:
      return f(bf16{});
    case ScalarType::Half:
      return f(f16{});
    default:
      STD_TORCH_CHECK(false, name, " must have an integer or floating dtype");
  }
  return f(int64_t{});
}

}  // namespace bahdanau_fast

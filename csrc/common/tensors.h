// Tensors, as the op files of both backends check, make and read them.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "common/dtypes.h"
#include "common/problem.h"

namespace bahdanau_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// The dtype of the attention weights.
inline ScalarType weights_dtype(Kind kind) {
  return kind == Kind::f64 ? ScalarType::Double : ScalarType::Float;
}

// A new tensor. Straight through torch's C interface: the boxed aten::empty takes longer than a
// small problem.
inline Tensor new_tensor(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                         ScalarType type, int32_t device_type, int32_t device_index) {
  AtenTensorHandle handle;
  const auto failed = aoti_torch_empty_strided(
      shape.size(), shape.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), device_type,
      device_index, &handle);
  STD_TORCH_CHECK(failed == 0, "not enough memory for a result of ", shape[0] * strides[0],
                  " elements");
  return Tensor(handle);
}

// A new contiguous tensor.
inline Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type, int32_t device_type,
                         int32_t device_index) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i)
    strides[i - 1] = strides[i] * (shape[i] > 1 ? shape[i] : 1);
  return new_tensor(shape, strides, type, device_type, device_index);
}

// The shape of the gradient of a tensor; (0,) if it is not wanted.
inline std::vector<int64_t> gradient_shape(const Tensor& tensor, bool wanted) {
  if (!wanted) return {0};
  return {tensor.sizes().begin(), tensor.sizes().end()};
}

inline void* data_or_null(Tensor& tensor, bool wanted) {
  return wanted ? tensor.mutable_data_ptr() : nullptr;
}

// The tensor itself, or a copy in this dtype.
inline Tensor cast(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

// The tensor itself, or a contiguous copy.
inline Tensor packed(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;  // asking torch takes longer than a small problem
  try {
    return torch::stable::contiguous(tensor);
  } catch (...) {  // torch's own message does not pass its C interface
    STD_TORCH_CHECK(false, "not enough memory for a contiguous copy of ", tensor.numel(),
                    " elements");
  }
}

// Rows of a (B, rows, columns) tensor; copied first if its columns do not lie next to each other.
inline View view_of(const Tensor& tensor, std::vector<Tensor>& owned) {
  owned.push_back(tensor.size(2) > 1 && tensor.stride(2) != 1 ? packed(tensor) : tensor);
  const Tensor& t = owned.back();
  return {t.const_data_ptr(), t.stride(0), t.stride(1)};
}

// The same for weights or an incoming gradient, which must fit the result it belongs to.
inline View view_like(const Tensor& tensor, ScalarType type, const char* name,
                      const std::vector<int64_t>& shape, std::vector<Tensor>& owned) {
  STD_TORCH_CHECK(tensor.scalar_type() == type && tensor.dim() == 3 && tensor.size(0) == shape[0] &&
                      tensor.size(1) == shape[1] && tensor.size(2) == shape[2],
                  name, " must have the shape and dtype of the result it belongs to");
  return view_of(tensor, owned);
}

inline void set_dropout(double dropout_p, Operands* p) {
  STD_TORCH_CHECK(dropout_p >= 0.0 && dropout_p <= 1.0, "dropout_p must be between 0 and 1");
  p->dropout_p = dropout_p;
}

// Checks the inputs of a call and takes their sizes into `p`; gives the kind they are stored in.
// check_place(tensor, name) raises if a tensor is on another device. Queries and keys that are not
// projected yet may have any number of features; they may be something else than tensors, which
// has what is asked of them.
template <class Queries, class Keys, class CheckPlace>
Kind read_sizes(const Queries& queries, const Keys& keys, const Tensor& values, const Tensor& w_v,
                double dropout_p, bool raw_queries, bool raw_keys, const CheckPlace& check_place,
                Operands* p) {
  const Kind kind = kind_of(queries, "queries");
  STD_TORCH_CHECK(queries.dim() == 3 && keys.dim() == 3 && values.dim() == 3,
                  "queries, keys and values must have 3 dimensions");
  const auto check_like = [&](const auto& tensor, const char* name) {
    check_place(tensor, name);
    STD_TORCH_CHECK(kind_of(tensor, name) == kind, name, " must have the dtype of queries");
  };
  check_like(keys, "keys");
  check_like(values, "values");
  check_like(w_v, "w_v");
  p->B = queries.size(0);
  p->Tq = queries.size(1);
  p->H = raw_queries ? w_v.numel() : queries.size(2);
  p->Tk = keys.size(1);
  p->Dv = values.size(2);
  STD_TORCH_CHECK(keys.size(0) == p->B && (raw_keys || keys.size(2) == p->H),
                  "keys must have the batch and hidden size of queries");
  STD_TORCH_CHECK(values.size(0) == p->B && values.size(1) == p->Tk,
                  "values must have the batch size and length of keys");
  STD_TORCH_CHECK((w_v.dim() == 1 || w_v.dim() == 2) && w_v.numel() == p->H && w_v.size(-1) == p->H,
                  "w_v must have shape (1, H) or (H,)");
  set_dropout(dropout_p, p);
  return kind;
}

// The one number of a seed, where it lies.
template <class CheckPlace>
const int64_t* seed_data(const MaybeTensor& seed, const CheckPlace& check_place) {
  STD_TORCH_CHECK(seed.has_value() && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long,
                  "seed must be one int64 number where dropout_p is not 0");
  check_place(*seed, "seed");
  return static_cast<const int64_t*>(seed->const_data_ptr());
}

// Whether valid_lens has a length for each query, (B,Tq), instead of one for each batch row, (B,).
template <class CheckPlace>
bool lens_by_query(const Tensor& lens, const Operands& p, const CheckPlace& check_place) {
  check_place(lens, "valid_lens");
  const bool by_query = lens.dim() == 2;
  STD_TORCH_CHECK(
      (lens.dim() == 1 || by_query) && lens.size(0) == p.B && (!by_query || lens.size(1) == p.Tq),
      "valid_lens must have shape (B,) or (B, Tq)");
  return by_query;
}

template <class CheckPlace>
void check_mask(const Tensor& mask, const Operands& p, const CheckPlace& check_place) {
  check_place(mask, "mask");
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.dim() == 3 &&
                      mask.size(0) == p.B && (mask.size(1) == 1 || mask.size(1) == p.Tq) &&
                      mask.size(2) == p.Tk,
                  "mask must be bool, (B, 1, Tk) or (B, Tq, Tk)");
}

}  // namespace bahdanau_fast

// From tensors to the plain sizes and pointers the kernels take.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "common/dtypes.h"
#include "cuda/kernels/interface.h"

namespace bahdanau_fast::gpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// What queries, and maybe keys, are still to be multiplied by.
struct Projections {
  Tensor w_q;             // (H,Dq)
  MaybeTensor w_k, bias;  // (H,Dk), (H)
};

// Everything a Problem points to, kept alive until the launches are queued: the allocator hands
// memory on in the order of the stream.
struct Inputs {
  Inputs(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
         const MaybeTensor& valid_lens, const MaybeTensor& seed, double dropout_p,
         const std::optional<Projections>& projections = std::nullopt);

  bool empty() const { return problem.B == 0 || problem.Tq == 0 || problem.Tk == 0; }
  // A gradient that came in: of the shape and dtype of the result it belongs to, or none.
  View grad_view(const MaybeTensor& grad, ScalarType type, const char* name, int64_t columns);
  // A new contiguous tensor on the device of the queries.
  Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type) const;
  // The device's properties and torch's current stream there.
  Device current() const;

  Problem problem;
  Forward forward;  // without its results
  Kind kind;
  int device;

 private:
  void set_projections(const Projections& given, const Tensor& queries, const Tensor& keys);
  const void* weight_of(const Tensor& tensor, const char* name, const std::vector<int64_t>& shape);
  void set_lens(const MaybeTensor& valid_lens);
  void check_place(const Tensor& tensor, const char* name) const;
  View view_of(const Tensor& tensor);

  std::vector<Tensor> owned_;
};

const Kernels& kernels(Kind kind);

}  // namespace bahdanau_fast::gpu

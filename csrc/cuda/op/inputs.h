// From tensors to the sizes and pointers that the kernels take.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <vector>

#include "common/limits.h"
#include "common/tensors.h"
#include "cuda/kernels/types.h"

namespace bahdanau_fast::gpu {

// torch.nn.functional.linear
Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias);

// A Problem, and the tensors it points to. With w_q (H,Dq) the queries are not projected yet: the
// launch does it if it can, else torch. While it lives, its GPU is the current one. It has to live
// until the launches are queued: then the allocator reuses their memory in the order of the stream.
struct Inputs {
  Inputs(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
         const MaybeTensor& valid_lens, const MaybeTensor& mask, const MaybeTensor& seed,
         double dropout_p, const MaybeTensor& w_q = std::nullopt);

  // Weights or an incoming gradient: (B, Tq, columns) of this dtype, or none.
  View view_like(const MaybeTensor& tensor, ScalarType type, const char* name, int64_t columns);
  // A new contiguous tensor on the device of the queries.
  Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type) const;
  // What the launches need beside: it lives as long as this.
  Memory memory();

  Forward forward;  // without its results
  const Problem& problem = forward.p;
  ScalarType dtype;
  Device device;
  const Kernels* kernels;

 private:
  void set_lens(const Tensor& lens);
  void set_mask(const Tensor& mask);
  void check_place(const Tensor& tensor, const char* name) const;

  torch::stable::accelerator::DeviceGuard guard_;
  std::vector<Tensor> owned_;
};

}  // namespace bahdanau_fast::gpu

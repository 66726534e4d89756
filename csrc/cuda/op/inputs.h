// From tensors to the sizes and pointers that the kernels take.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "common/limits.h"
#include "common/operators.h"
#include "cuda/kernels/types.h"

namespace bahdanau_fast::gpu {

// A forward alone may project in its launch; a decoder has any number of queries and units.
enum class Use { forward, with_gradients, decoder };

// The tensor itself, or a copy whose rows can be read 16 bytes at a time.
Tensor in_vectors(const Tensor& tensor);

// The GPU as the kernels of a kind see it, and torch's current stream there.
Device current_device(int index, const Kernels* kernels);

// A Forward without results, and the tensors it points to. Every argument is checked. Queries and
// keys are projected by torch, unless the launch does it. While it lives, its GPU is the current
// one. It has to live until the launches are queued: then the allocator reuses their memory in the
// order of the stream.
struct Inputs {
  // Projections that are not empty are used as they are.
  Inputs(const AttentionArguments& args, Use use, const MaybeTensor& projected_queries = kNone,
         const MaybeTensor& projected_keys = kNone);

  // Weights or an incoming gradient: (B, Tq, columns) of this dtype, or none.
  View view_like(const MaybeTensor& tensor, ScalarType type, const char* name, int64_t columns);
  // The numbers of a tensor that must have this dtype and shape, or of a copy: in order, from a
  // multiple of 16 bytes on.
  const void* data_of(const Tensor& tensor, ScalarType type, std::initializer_list<int64_t> shape,
                      const char* name);
  // The same for a matrix whose rows may be further apart.
  View rows_of(const Tensor& tensor, int64_t rows, int64_t columns, const char* name);
  // A new contiguous tensor on the device of the queries; (0,) where it is not wanted.
  Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type, bool wanted = true) const;
  Tensor none() const { return new_tensor({0}, dtype); }
  // What the launches need beside: it lives as long as this.
  Memory memory();

  Forward forward;
  const Problem& problem = forward.p;
  ScalarType dtype;
  Device device;
  const Kernels* kernels;
  MaybeTensor projected;  // queries, where torch has projected them

 private:
  void check(const AttentionArguments& args, Use use);
  void check_device(const Tensor& tensor, const char* name) const;
  void check_fits(const Tensor& tensor, ScalarType type, std::initializer_list<int64_t> shape,
                  const char* name) const;

  torch::stable::accelerator::DeviceGuard guard_;
  std::vector<Tensor> owned_;
};

}  // namespace bahdanau_fast::gpu

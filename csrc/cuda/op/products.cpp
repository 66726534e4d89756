// By torch's C interface: an operator called by its name takes longer than a small product.
#include "products.h"

#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <utility>

#include "torch_cuda.h"

namespace bahdanau_fast::gpu {
namespace {

using MmOut = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle y);
using AddmmOut = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle added,
                                    AtenTensorHandle x, AtenTensorHandle y, double beta,
                                    double alpha);

// A contiguous tensor (...,columns) as the matrix of all its rows, or as that transposed.
Tensor matrix(const Tensor& x, bool transposed = false) {
  if (x.dim() == 2 && !transposed) return x;
  const int64_t columns = x.size(-1);
  std::array<int64_t, 2> sizes{1, columns}, strides{columns > 0 ? columns : 1, 1};
  for (int64_t i = 0; i + 1 < x.dim(); ++i) sizes[0] *= x.size(i);
  if (transposed) std::swap(sizes[0], sizes[1]), std::swap(strides[0], strides[1]);
  AtenTensorHandle handle;
  constexpr int64_t further = 0;  // than x begins in its storage
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(x.get(), 2, sizes.data(), strides.data(), further, &handle));
  return Tensor(handle);
}

// x times y, plus what is added, to the rows of a new tensor.
Tensor multiplied(const std::vector<int64_t>& shape, const Tensor& x, const Tensor& y,
                  const MaybeTensor& added = std::nullopt) {
  static const auto mm = in_torch_cuda<MmOut>("aoti_torch_cuda_mm_out");
  static const auto addmm = in_torch_cuda<AddmmOut>("aoti_torch_cuda_addmm_out");
  Tensor out =
      new_tensor(shape, x.scalar_type(), aoti_torch_device_type_cuda(), x.get_device_index());
  const Tensor to = matrix(out);
  const auto failed = added.has_value() ? addmm(to.get(), added->get(), x.get(), y.get(), 1.0, 1.0)
                                        : mm(to.get(), x.get(), y.get());
  STD_TORCH_CHECK(failed == 0, "torch could not multiply matrices");
  return out;
}

}  // namespace

Tensor linear(const Tensor& rows, const Tensor& weight, const MaybeTensor& bias) {
  return multiplied({rows.size(0), rows.size(1), weight.size(0)}, matrix(packed(rows)),
                    matrix(packed(weight), true), bias);
}

Tensor times(const Tensor& rows, const Tensor& weight) {
  return multiplied({rows.size(0), rows.size(1), weight.size(1)}, matrix(packed(rows)),
                    matrix(packed(weight)));
}

Tensor sum_of_products(const Tensor& left, const Tensor& right) {
  return multiplied({left.size(2), right.size(2)}, matrix(packed(left), true),
                    matrix(packed(right)));
}

}  // namespace bahdanau_fast::gpu

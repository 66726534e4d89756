// Rows times a weight, plus a bias: projections of queries or keys, and their gradients.
#pragma once

#include <tuple>

#include "inputs.h"

namespace bahdanau_fast {

class Projected {
 public:
  // Rows (B,R,D), weight (H,D), `hidden` H that of w_v, bias (H); in errors rows and weight have
  // the names. fp32 of up to `limit` elements is computed in fp64.
  Projected(const Tensor& rows, const Tensor& weight, const MaybeTensor& bias, int64_t hidden,
            const char* name, const char* weight_name, int64_t limit = kMaxFp64CpuElements);

  // (B,R,H), in memory of an operator's own, or as a tensor.
  OwnRows forward() const;
  Tensor new_forward() const;
  // The same, unless it was computed before: `projected`, if that has elements, which is checked.
  Tensor forward_unless(const MaybeTensor& projected, const char* name) const;

  // Gradients of rows, weight and bias, of no elements where they are not wanted.
  std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, bool of_rows, bool of_weight,
                                              bool of_bias) const;

 private:
  Kind kind_;
  int64_t B_, R_;  // of the result, in the batch rows of the caller
  std::vector<Tensor> owned_;
  Projection p_;
};

}  // namespace bahdanau_fast

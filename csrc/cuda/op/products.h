// Products of matrices by torch's library, in the dtype of what is multiplied, autocast or not.
#pragma once

#include "common/tensors.h"

namespace bahdanau_fast::gpu {

// torch.nn.functional.linear: rows (B,n,D), weight (H,D), bias (H).
Tensor linear(const Tensor& rows, const Tensor& weight, const MaybeTensor& bias);

// rows (B,n,H) times weight (H,D).
Tensor times(const Tensor& rows, const Tensor& weight);

// (H,D): the sum over all rows of left (B,n,H) times right (B,n,D).
Tensor sum_of_products(const Tensor& left, const Tensor& right);

}  // namespace bahdanau_fast::gpu

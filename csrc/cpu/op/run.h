// Runs the kernels of a call on all threads.
#pragma once

#include "inputs.h"

namespace bahdanau_fast {

// context (B,Tq,Dv) and, unless null, weights (B,Tq,Tk). The problem must not be empty.
void run_forward(const Inputs& in, void* context, void* weights);

// The scores (B,Tq,Tk) alone. The problem must not be empty.
void run_scores(const Inputs& in, void* scores);

// Gradients that are sums over the batch or over hidden units, in the storage type; null: not
// wanted.
struct SummedGradients {
  void* w = nullptr;         // (H); of pooling (Tq,width)
  void* features = nullptr;  // (B,C,Tk)
  void* w_f = nullptr;       // (C,width)
};

// The results that `gradients` and `summed` name; gradients.grad_w, grad_features and grad_w_f are
// ignored. The problem must not be empty.
void run_backward(const Inputs& in, Backward gradients, const SummedGradients& summed);

}  // namespace bahdanau_fast

// Runs the kernels of a call on all threads.
#pragma once

#include "inputs.h"

namespace bahdanau_fast {

// context (B,Tq,Dv) and, unless null, weights (B,Tq,Tk). The problem must not be empty.
void run_forward(const Inputs& in, void* context, void* weights);

// The results that `gradients` names and, unless null, grad_w (H) in the storage type;
// gradients.grad_w is ignored. The problem must not be empty.
void run_backward(const Inputs& in, Backward gradients, void* grad_w);

}  // namespace bahdanau_fast

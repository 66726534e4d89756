// The kernels of one call, over all threads.
#pragma once

#include "inputs.h"

namespace bahdanau_fast {

// context (B,Tq,Dv) and, unless null, weights (B,Tq,Tk) of a problem that is not empty.
void run_forward(const Inputs& in, void* context, void* weights);

// What `gradients` asks for, of a problem that is not empty, and unless null grad_w (H) in the
// storage type: the sum of the parts that gradients.grad_w would take, which is left alone.
void run_backward(const Inputs& in, Backward gradients, void* grad_w);

}  // namespace bahdanau_fast

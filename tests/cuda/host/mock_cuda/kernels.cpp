// The launch tables of all kinds of numbers, with kernels that nothing runs.
#include "cuda/op/kernels_bf16.cu"
#include "cuda/op/kernels_f16.cu"
#include "cuda/op/kernels_f32.cu"
#include "cuda/op/kernels_f32_in_f64.cu"
#include "cuda/op/kernels_f64.cu"

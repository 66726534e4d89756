// What the toolkit's header of this name adds for C++: a launch of a typed kernel (other functions
// take one by -fpermissive), and the words of device code, which is compiled for the names of the
// kernels and never run.
#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_runtime_api.h>

// `bytes` of parameters at `parameters`, which the toolkit knows from the kernel's binary.
cudaError_t mock_launch(const cudaLaunchConfig_t* config, const void* kernel,
                        const void* parameters, size_t bytes);

template <class P>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P),
                               const P& parameters) {
  return mock_launch(config, reinterpret_cast<const void*>(kernel), &parameters, sizeof parameters);
}

// ---- device code ----

#define __global__
#define __device__
#define __host__
#define __shared__ __attribute__((weak))
#define __align__(bytes)
#define __forceinline__ inline
#define __launch_bounds__(...)
#define asm(...)
#define volatile(...) ("")  // asm volatile(...) is asm("")

static const dim3 threadIdx, blockIdx, blockDim;

inline void __syncthreads() {}
inline void __threadfence() {}
template <class X>
X __shfl_sync(unsigned, X x, int) {
  return x;
}
template <class X>
X __shfl_xor_sync(unsigned, X x, int) {
  return x;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) { return x; }
inline unsigned atomicAdd(unsigned* at, unsigned) { return *at; }
inline unsigned long long atomicMax(unsigned long long* at, unsigned long long) { return *at; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __uint_as_float(unsigned x) { return float(x); }
inline unsigned __float_as_uint(float x) { return unsigned(x); }
template <class X>
X __ldg(const X* from) {
  return *from;
}
template <class X>
X __ldcg(const X* from) {
  return *from;
}
inline size_t __cvta_generic_to_shared(const void* x) { return size_t(x); }

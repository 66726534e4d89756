// Sums and maxima over a warp and a block, in an order that depends on nothing but the sizes.
#pragma once

#include "problem.h"

namespace bahdanau_fast::gpu {

constexpr unsigned kAllLanes = 0xffffffffu;

template <class A>
__device__ __forceinline__ A warp_sum(A x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}
template <class A>
__device__ __forceinline__ A warp_max(A x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const A other = __shfl_xor_sync(kAllLanes, x, offset);
    x = other > x || other != other ? other : x;  // NaN wins
  }
  return x;
}

// Sums over a warp of N values at once, N a power of two: of value lane / (32 / N), in each lane.
template <int N, int offset = kWarp / 2, class A>
__device__ __forceinline__ A warp_sums(A* x, int lane) {
  if constexpr (N > 1) {
    const bool upper = lane & offset;
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      const A give = upper ? x[k] : x[k + N / 2], keep = upper ? x[k + N / 2] : x[k];
      x[k] = keep + __shfl_xor_sync(kAllLanes, give, offset);
    }
    return warp_sums<N / 2, offset / 2>(x, lane);
  } else {
    A sum = x[0];
#pragma unroll
    for (int left = offset; left > 0; left /= 2) sum += __shfl_xor_sync(kAllLanes, sum, left);
    return sum;
  }
}

// The whole block's maximum (NaN wins) or sum in every thread; `scratch` holds a number per warp.
template <class A>
__device__ A block_max(A x, A* scratch) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  x = warp_max(x);
  __syncthreads();  // somebody may still read the last result
  if (lane == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  return warp_max(scratch[lane < warps ? lane : 0]);
}
template <class A>
__device__ A block_sum(A x, A* scratch) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  x = warp_sum(x);
  __syncthreads();
  if (lane == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : A(0));
}

}  // namespace bahdanau_fast::gpu

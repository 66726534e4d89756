// What is particular to the GPU: approximations, memory, clusters. Nothing else contains PTX.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "types.h"

namespace bahdanau_fast::gpu {

constexpr int kWarp = 32;

// f(0), ..., f(N - 1) without a loop; of two sizes f(0, 0), f(0, 1), ..., f(M - 1, N - 1).
template <int N, class F>
__device__ __forceinline__ void unrolled(const F& f) {
#pragma unroll
  for (int k = 0; k < N; ++k) f(k);
}
template <int M, int N, class F>
__device__ __forceinline__ void unrolled(const F& f) {
  unrolled<M>([&](int m) { unrolled<N>([&](int n) { f(m, n); }); });
}

struct alignas(16) Bytes16 {
  uint32_t word[4];
};
__device__ __forceinline__ Bytes16 bytes_at(const void* aligned) {
  return *static_cast<const Bytes16*>(aligned);
}

// Relative error 2^-22; 0 and infinity past the range.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// One ulp; 0 for denominators past 2^126.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float widen(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ void narrow(float x, f16* out) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
}
__device__ __forceinline__ void narrow(float x, bf16* out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
}
// NaN when an argument is.
__device__ __forceinline__ float larger_or_nan(float x, float y) {
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(y));
  return y;
}
__device__ __forceinline__ float at_most(float x, float limit) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  return y;
}
__device__ __forceinline__ float clamp(float x, float limit) {
  return larger_or_nan(at_most(x, limit), -limit);
}
__device__ __forceinline__ float from_bits(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t to_bits(float x) { return __float_as_uint(x); }

// What no thread writes during the launch.
__device__ __forceinline__ float read_only(const float* p) { return __ldg(p); }
template <class T>
__device__ __forceinline__ T read_only(const T* p) {
  return {__ldg(&p->bits)};
}
// 16 bytes of it; p is a multiple of 16.
__device__ __forceinline__ Bytes16 load16(const void* p) {
  const uint4 x = __ldg(static_cast<const uint4*>(p));
  return {{x.x, x.y, x.z, x.w}};
}

// What other blocks of this launch wrote, past a barrier with them: not from the L1.
__device__ __forceinline__ Bytes16 load16_of_others(const void* p) {
  const uint4 x = __ldcg(static_cast<const uint4*>(p));
  return {{x.x, x.y, x.z, x.w}};
}

// Blocks of a launch that are all resident wait for one another at a counter, zero before the
// launch: what a block wrote before arrive() can be read past the wait() of any.
struct GroupBarrier {
  unsigned* arrived;
  unsigned blocks, all = 0;

  __device__ __forceinline__ void arrive() {
    __syncthreads();
    all += blocks;
    if (threadIdx.x == 0)
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
  }
  __device__ __forceinline__ void wait() {
    if (threadIdx.x == 0) {
      unsigned now = 0;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
      } while (int(now - all) < 0);
    }
    __syncthreads();
  }
  __device__ void sync() {
    arrive();
    wait();
  }
};

// sums (16,8) += rows (16,16) times columns (16,8), of 16 bits. A lane has of rows lane / 4 and
// that + 8, and of column lane / 4, the numbers 2 (lane % 4) and the next one, then those 8 on: or,
// as here, of any order of the 16 that is the same in both.
template <class T>
__device__ __forceinline__ void multiply_add(float* sums, uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory, asynchronously; both are multiples of 16.
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
// Ends a group of copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for the thread's copies, but for its last `groups` groups.
template <int groups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(16) char bahdanau_fast_shared[];
  return bahdanau_fast_shared;
}

// Clusters of blocks, from 9.0 on; before, a block is a cluster by itself. What any block of it
// wrote to shared memory before cluster_barrier() can be read after it; past
// relaxed_cluster_barrier() nothing in memory is ordered, so no store under way is waited for.
// in_block(x, rank) is the address of x in the shared memory of that block, valid from the first
// cluster_barrier() until it ends.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_size() {
  int size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
}
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void relaxed_cluster_barrier() {
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
}
template <class X>
__device__ __forceinline__ X* in_block(X* x, int rank) {
  uint64_t mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(x), "r"(rank));
  return reinterpret_cast<X*>(mapped);
}
#else
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_barrier() { __syncthreads(); }
__device__ __forceinline__ void relaxed_cluster_barrier() { __syncthreads(); }
template <class X>
__device__ __forceinline__ X* in_block(X* x, int) {
  return x;
}
#endif

__device__ __forceinline__ float widen(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ void narrow(float x, float* out) { *out = x; }

// Hands out shared memory piece by piece. The host runs the same code for the size.
struct Carver {
  char* base;
  int64_t used = 0;

  template <class X>
  __host__ __device__ X* take(int64_t count) {
    X* piece = reinterpret_cast<X*>(base + used);
    used += (count * int64_t(sizeof(X)) + 15) / 16 * 16;
    return piece;
  }
};

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__host__ __device__ constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- sums and maxima over a warp and a block, in an order that depends on the sizes only ----

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    x = larger_or_nan(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

__device__ __forceinline__ bool any_lane(bool x) {
  return __reduce_max_sync(kAllLanes, unsigned(x)) != 0;
}

// Four neighbours, 16 bytes of aligned memory.
__device__ __forceinline__ void load_four(const float* from, float* x) {
  const Bytes16 bytes = bytes_at(from);
  unrolled<4>([&](int k) { x[k] = from_bits(bytes.word[k]); });
}
__device__ __forceinline__ void store_four(const float* x, float* to) {
  *reinterpret_cast<Bytes16*>(to) = {{to_bits(x[0]), to_bits(x[1]), to_bits(x[2]), to_bits(x[3])}};
}

// A sum to twice the precision of fp32: rounded, and what was lost in rounding.
struct Sum {
  float high = 0, low = 0;

  __device__ __forceinline__ void add(float x) {
    const float sum = high + x, added = sum - high;
    low += (high - (sum - added)) + (x - added);
    high = sum;
  }
  __device__ __forceinline__ void add(const Sum& x) {
    add(x.high);
    low += x.low;
  }
  __device__ __forceinline__ void add_product(float x, float y) {
    const float product = __fmul_rn(x, y);  // by itself, not as a part of add()
    add(product);
    low += fmaf(x, y, -product);
  }
  __device__ __forceinline__ Sum over(const Sum& y) const {
    const float quotient = high / y.high;
    return {quotient, (fmaf(-quotient, y.high, high) + (low - quotient * y.low)) / y.high};
  }
};
// weight (x - mean). The difference of one mean and many x of a size, rounded to fp32, would lean
// to the same side for all of them, which adds up over a row.
__device__ __forceinline__ float weigh_difference(float weight, float x, const Sum& mean) {
  Sum difference{x};
  difference.add(-mean.high);
  return fmaf(weight, difference.high, weight * (difference.low - mean.low));
}
__device__ __forceinline__ Sum warp_sum(Sum x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    x.add(
        Sum{__shfl_xor_sync(kAllLanes, x.high, offset), __shfl_xor_sync(kAllLanes, x.low, offset)});
  return x;
}

// Sums over a warp of N values at once, N a power of two: of value lane / (32 / N), in each lane.
template <int N, int offset = kWarp / 2>
__device__ __forceinline__ float warp_sums(float* x, int lane) {
  if constexpr (N > 1) {
    const bool upper = lane & offset;
    unrolled<N / 2>([&](int k) {
      const float give = upper ? x[k] : x[k + N / 2], keep = upper ? x[k + N / 2] : x[k];
      x[k] = keep + __shfl_xor_sync(kAllLanes, give, offset);
    });
    return warp_sums<N / 2, offset / 2>(x, lane);
  } else {
    float sum = x[0];
#pragma unroll
    for (int left = offset; left > 0; left /= 2) sum += __shfl_xor_sync(kAllLanes, sum, left);
    return sum;
  }
}

// reduce() over the block, in every thread. `none` changes nothing; `scratch`: a number per warp.
template <class X, class Reduce>
__device__ __forceinline__ X over_block(X x, X none, X* scratch, const Reduce& reduce) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  x = reduce(x);
  __syncthreads();  // the last result may still be read
  if (lane == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  return reduce(lane < warps ? scratch[lane] : none);
}

}  // namespace bahdanau_fast::gpu

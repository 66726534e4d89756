// Compiles CUDA kernels for the host, for tests, in the place of the CUDA half of
// cuda/kernels/device.h. Their threads are fibers (fibers.h). What the host cannot mean,
// approximations in machine code, has its plain equivalent below.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

// ---- CUDA's words ----

#define threadIdx (bahdanau_fast::host::self().thread)
#define blockIdx (bahdanau_fast::host::block().index)
#define blockDim (bahdanau_fast::host::block().threads)

inline void __syncthreads() {
  auto& block = bahdanau_fast::host::block();
  bahdanau_fast::host::wait(block.barrier, int(block.threads.x));
}
inline int __syncthreads_or(int x) {
  namespace host = bahdanau_fast::host;
  int& ors = host::block().ors;
  ors |= x != 0;
  __syncthreads();
  const int result = ors;
  __syncthreads();
  ors = 0;
  __syncthreads();
  return result;
}
template <class X>
X __shfl_xor_sync(unsigned, X x, int mask) {
  return bahdanau_fast::host::exchange(x, int(threadIdx.x % 32) ^ mask);
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, x, mask);
    x = other > x ? other : x;
  }
  return x;
}
inline float __fmul_rn(float x, float y) { return x * y; }
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* at, unsigned x) { return std::exchange(*at, *at + x); }
inline unsigned atomicExch(unsigned* at, unsigned x) { return std::exchange(*at, x); }
inline unsigned atomicMax(unsigned* at, unsigned x) { return std::exchange(*at, std::max(*at, x)); }

// ---- the seam of device.h ----

namespace bahdanau_fast::gpu {

using std::ceil;
using std::exp;
using std::fabs;
using std::tanh;

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}
inline double from_bits(uint32_t low, uint32_t high) {
  const uint64_t bits = uint64_t(high) << 32 | low;
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// As the machine's: no subnormal numbers come out or go in.
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? 0.0f * x : x; }
inline float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
inline float reciprocal(float x) { return flushed(1.0f / flushed(x)); }
inline float clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }
inline float at_most(float x, float limit) { return x > limit ? limit : x; }

inline float widen(f16 x) {
  _Float16 half;
  std::memcpy(&half, &x, sizeof half);
  return float(half);
}
inline void narrow(float x, f16* out) {
  const _Float16 half = _Float16(x);
  std::memcpy(out, &half, sizeof half);
}
inline void narrow(float x, bf16* out) {
  const uint32_t bits = to_bits(x);
  out->bits = x != x ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Bytes16 load16(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) {
    std::fprintf(stderr, "a misaligned load of 16 bytes\n");
    std::abort();
  }
  Bytes16 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline float widen(bf16 x);

// The tensor cores' product: every lane lays its parts open and adds up its own four results.
template <class T>
void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  host::Fiber& me = host::self();
  host::Warp& warp = *host::block().warps[me.thread.x / 32];
  auto& parts = warp.parts[me.turn ^= 1];
  const unsigned lane = me.thread.x % 32;
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(parts[lane], own, sizeof own);
  host::wait(warp.barrier, 32);
  const auto half = [&](unsigned of, unsigned part, unsigned k) {
    T x;
    x.bits = uint16_t(parts[of][part] >> (k % 2 * 16));
    return widen(x);
  };
  for (unsigned result = 0; result < 4; ++result) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + result % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned at = k % 8 / 2, upper = k / 8;
      sums[result] +=
          half(row * 4 + at, result / 2 + 2 * upper, k) * half(column * 4 + at, 4 + upper, k);
    }
  }
}

inline char* shared_memory() { return host::block().shared.get(); }

inline int cluster_size() { return int(host::cluster().blocks.size()); }
inline int cluster_rank() { return host::self().place / int(host::block().threads.x); }
inline void cluster_barrier() {
  host::wait(host::cluster().barrier, int(host::cluster().fibers.size()));
}
template <class X>
X* in_block(X* mine, int rank) {
  char* theirs = host::cluster().blocks[size_t(rank)]->shared.get();
  return reinterpret_cast<X*>(theirs + (reinterpret_cast<char*>(mine) - shared_memory()));
}

}  // namespace bahdanau_fast::gpu

#pragma push_macro("blockDim")  // a launch has a member of this name
#undef blockDim
#include "cuda/runtime/launch.h"
#pragma pop_macro("blockDim")

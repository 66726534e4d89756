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
X __shfl_sync(unsigned, X x, int lane) {
  return bahdanau_fast::host::exchange(x, lane);
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
inline float larger_or_nan(float x, float y) { return y > x || y != y ? y : x; }
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

template <class T>
T read_only(const T* p) {
  return *p;
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

inline void copy16(void* to, const void* from) {
  const Bytes16 x = load16(from);
  std::memcpy(to, &x, sizeof x);
}
inline void commit_copies() {}
template <int>
void wait_for_copies() {}

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

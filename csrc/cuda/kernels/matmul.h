// The three matrix products around the weights, one per batch row, sums in fp32:
//
//   context       C(i,c) = sum_j dropout(weight)[i,j] value[j,c]       T from fp32 and T
//   grad_values   C(j,c) = sum_i dropout(weight)[i,j] grad_context[i,c]  T from fp32 and T
//   grad_weights  C(i,j) = sum_c grad_context[i,c] value[j,c], dropped out, plus what came through
//                 the returned weights                                  fp32 from T and T
//
// A block is (batch row, 64 x 64 of C), a thread 4 x 4; both factors pass in slices of 16 through
// shared memory. Sums run over a slice, then over slices.
#pragma once

#include "problem.h"

namespace bahdanau_fast::gpu {

enum class Product { context, grad_values, grad_weights };

struct Matmul {
  Problem p;
  const void* weights = nullptr;  // (B,Tq,Tk) of fp32
  View grad_context;              // (B,Tq,Dv) of T
  View grad_weights;              // (B,Tq,Tk) of fp32; data may be null
  void* out = nullptr;            // contiguous
};

constexpr int kProductTile = 64, kProductSlice = 16, kProductThreads = 256;
constexpr int kProductPitch = kProductTile + 4;

template <class T, Product product>
struct ProductTask {
  const Matmul& all;
  const Problem& p;
  const Dropout dropout;
  float *left, *right;  // (slice, pitch)
  int64_t* limit;
  int64_t b, m0, n0, M, N, K;

  static constexpr int64_t shared_bytes() {
    return 2 * kProductSlice * kProductPitch * int64_t(sizeof(float)) + kProductTile * 8;
  }

  __host__ __device__ static int64_t rows(const Problem& p) {
    return product == Product::grad_values ? p.Tk : p.Tq;
  }
  __host__ __device__ static int64_t columns(const Problem& p) {
    return product == Product::grad_weights ? p.Tk : p.Dv;
  }
  static int64_t blocks(const Problem& p) {
    return p.B * ceil_div(rows(p), kProductTile) * ceil_div(columns(p), kProductTile);
  }

  __device__ explicit ProductTask(const Matmul& m) : all(m), p(m.p), dropout(m.p) {
    Carver from{shared_memory()};
    left = from.take<float>(kProductSlice * kProductPitch);
    right = from.take<float>(kProductSlice * kProductPitch);
    limit = from.take<int64_t>(kProductTile);
    M = rows(p);
    N = columns(p);
    const int64_t across = ceil_div(N, kProductTile), down = ceil_div(M, kProductTile);
    n0 = blockIdx.x % across * kProductTile;
    m0 = blockIdx.x / across % down * kProductTile;
    b = blockIdx.x / across / down;
    K = product == Product::context ? last_key() : product == Product::grad_values ? p.Tq : p.Dv;
    if (product != Product::context && m.grad_context.data == nullptr) K = 0;
  }

  // Values past what any query of the tile looks at are not read: they may be anything.
  __device__ int64_t last_key() {
    if (threadIdx.x < kProductTile) {
      const int64_t valid = m0 + threadIdx.x < p.Tq ? key_count(p, b, m0 + threadIdx.x) : 1;
      limit[threadIdx.x] = valid == 0 ? p.Tk : valid;
    }
    __syncthreads();
    int64_t most = 0;
    for (int k = 0; k < kProductTile; ++k) most = larger(most, limit[k]);
    return most;
  }

  __device__ float weight(int64_t i, int64_t j) const {
    const int64_t row = b * p.Tq + i;
    return static_cast<const float*>(all.weights)[row * p.Tk + j] * dropout.factor(row, j);
  }
  __device__ float left_at(int64_t m, int64_t k) const {
    if (m >= M || k >= K) return 0.0f;
    if constexpr (product == Product::context) return weight(m, k);
    if constexpr (product == Product::grad_values) return weight(k, m);
    return widen(row_at<T>(all.grad_context, b, m)[k]);
  }
  __device__ float right_at(int64_t k, int64_t n) const {
    if (n >= N || k >= K) return 0.0f;
    if constexpr (product == Product::context) return widen(row_at<T>(p.values, b, k)[n]);
    if constexpr (product == Product::grad_values)
      return widen(row_at<T>(all.grad_context, b, k)[n]);
    return widen(row_at<T>(p.values, b, n)[k]);
  }

  // Neighbouring threads read neighbouring numbers.
  __device__ void load_slice(int64_t k0) {
    constexpr int size = kProductTile * kProductSlice;
#pragma unroll
    for (int at = threadIdx.x; at < size; at += kProductThreads) {
      constexpr bool left_by_k = product != Product::grad_values;
      constexpr bool right_by_k = product == Product::grad_weights;
      const int lk = left_by_k ? at % kProductSlice : at / kProductTile;
      const int lm = left_by_k ? at / kProductSlice : at % kProductTile;
      left[lk * kProductPitch + lm] = left_at(m0 + lm, k0 + lk);
      const int rk = right_by_k ? at % kProductSlice : at / kProductTile;
      const int rn = right_by_k ? at / kProductSlice : at % kProductTile;
      right[rk * kProductPitch + rn] = right_at(k0 + rk, n0 + rn);
    }
  }

  __device__ void store(int64_t m, int64_t n, float x) const {
    if (m >= M || n >= N) return;
    if constexpr (product == Product::grad_weights) {
      const int64_t row = b * p.Tq + m;
      x *= dropout.factor(row, n);
      if (all.grad_weights.data != nullptr) x += row_at<float>(all.grad_weights, b, m)[n];
      static_cast<float*>(all.out)[row * p.Tk + n] = x;
    } else {
      narrow(x, static_cast<T*>(all.out) + (b * M + m) * N + n);
    }
  }

  __device__ void run() {
    const int tm = threadIdx.x / 16 * 4, tn = threadIdx.x % 16 * 4;
    float totals[4][4] = {};
    for (int64_t k0 = 0; k0 < K; k0 += kProductSlice) {
      __syncthreads();
      load_slice(k0);
      __syncthreads();
      float sums[4][4] = {};
#pragma unroll
      for (int k = 0; k < kProductSlice; ++k)
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int n = 0; n < 4; ++n)
            sums[m][n] += left[k * kProductPitch + tm + m] * right[k * kProductPitch + tn + n];
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) totals[m][n] += sums[m][n];
    }
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) store(m0 + tm + m, n0 + tn + n, totals[m][n]);
  }
};

template <class T, Product product>
__global__ void __launch_bounds__(kProductThreads) weights_product(const Matmul m) {
  ProductTask<T, product>(m).run();
}

}  // namespace bahdanau_fast::gpu

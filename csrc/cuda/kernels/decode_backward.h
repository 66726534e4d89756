// Backward for a few queries, a decoder step, the first of three launches: from the gradients of
// context and weights to those of values, and to what grad_keys takes. sum_parts is the third.
//
//   grad[b,i,j]     = grad_context[b,i] . value[b,j], dropped out, + grad_weights[b,i,j]
//   grad_value[b,j] = sum_i dropout(weight)[b,i,j] grad_context[b,i]
//   moments[b,i]    = over a part of the keys, sums of weight and of weight grad
//
//   values (B,Tk,Dv), grad_context (B,Tq,Dv), grad_values: T; weights, grad_weights (B,Tq,Tk): both
//   fp32 or both T; grads (B,Tq,Tk): fp32; moments (B,Tq,splits,2): Sum
//
// A block is a part of the keys of a batch row. Its warps take keys in turn; lanes hold
// neighbouring columns, 16 bytes at a time. Reads values once and writes their gradients once: 2 Dv
// numbers for each key.
#pragma once

#include "backward_keys.h"

namespace bahdanau_fast::gpu {

constexpr int64_t kBackwardQueries = 4;  // at most

struct GradValues {
  Problem p;
  int64_t splits = 1, split = 1;  // parts of the keys, and keys in each
  const void* weights = nullptr;  // (B,Tq,Tk) of fp32, or `narrow` of T
  View grad_context;              // data may be null
  View grad_weights;              // (B,Tq,Tk) likewise; data may be null
  bool narrow = false;
  void* grad_values = nullptr;  // null: not asked for
  void* grads = nullptr;        // null: not asked for, nor are moments
  void* moments = nullptr;
};

template <class T, int QT>
struct GradValuesShared {
  float *context, *weights;  // (QT,width), the gradients; (QT,split), dropped out
  int64_t bytes, width;

  __host__ __device__ GradValuesShared(char* base, const Problem& p, int64_t split) {
    Carver from{base};
    width = ceil_div(p.Dv, kVector<T>) * kVector<T>;
    context = from.take<float>(QT * width);
    weights = from.take<float>(QT * split);
    bytes = from.used;
  }
};

template <class T, int QT, bool vectors>
struct GradValuesTask : KeysTask<T, QT, vectors> {
  using Base = KeysTask<T, QT, vectors>;
  using Base::b, Base::count, Base::j0, Base::lane, Base::n, Base::p, Base::U, Base::warp;
  static constexpr int KV = QT == 1 ? 4 : 2;  // values of a warp at a time, as registers allow
  const GradValues& g;
  const GradValuesShared<T, QT> mine;
  const Dropout dropout;

  __device__ explicit GradValuesTask(const GradValues& all)
      : Base(all.p, nullptr, all.splits, all.split),
        g(all),
        mine(shared_memory(), p, all.split),
        dropout(p) {}

  // Both are zero past the last query.
  __device__ void load() {
    const bool through_context = g.grad_context.data != nullptr;
    for (int64_t at = threadIdx.x; at < QT * mine.width; at += kDecodeThreads) {
      const int64_t i = at / mine.width, c = at % mine.width;
      const bool there = through_context && i < p.Tq && c < p.Dv;
      mine.context[at] = there ? widen(row_at<T>(g.grad_context, b, i)[c]) : 0.0f;
    }
    for (int64_t at = threadIdx.x; at < QT * g.split; at += kDecodeThreads) {
      const int64_t i = at / g.split, j = at % g.split, row = b * p.Tq + i;
      float x = 0;
      if (i < p.Tq && j < n)
        x = weight_at<T>(g.weights, g.narrow, row * p.Tk + j0 + j) * dropout.factor(row, j0 + j);
      mine.weights[at] = x;
    }
    __syncthreads();
  }

  __device__ void meet_values() {
    const View out{g.grad_values, p.Tk * p.Dv, p.Dv};
    for (int64_t first = warp * KV; first < n; first += kDecodeWarps * KV) {
      float weights[QT][KV], dots[KV * QT] = {};
#pragma unroll
      for (int q = 0; q < QT; ++q)
#pragma unroll
        for (int k = 0; k < KV; ++k)
          weights[q][k] = mine.weights[q * g.split + smaller(first + k, n - 1)];
      for (int64_t c = lane * U; c < p.Dv; c += kWarp * U) {
        float value[KV][U], grad[KV][U] = {};
#pragma unroll
        for (int k = 0; k < KV; ++k) this->load_used(p.values, first + k, c, p.Dv, value[k]);
#pragma unroll
        for (int q = 0; q < QT; ++q)
#pragma unroll
          for (int k = 0; k < KV; ++k)
#pragma unroll
            for (int u = 0; u < U; ++u) {
              const float grad_context = mine.context[q * mine.width + c + u];
              dots[k * QT + q] += grad_context * value[k][u];
              grad[k][u] += weights[q][k] * grad_context;
            }
        if (g.grad_values == nullptr) continue;
#pragma unroll
        for (int k = 0; k < KV; ++k)
          if (first + k < n)
            store_units<T, vectors>(grad[k], this->row_of(out, j0 + first + k), c, p.Dv);
      }
      const float dot = warp_sums<KV * QT>(dots, lane);
      constexpr int each = kWarp / (KV * QT);
      const int64_t j = first + lane / each / QT, i = lane / each % QT, row = b * p.Tq + i;
      if (g.grads == nullptr || lane % each != 0 || i >= p.Tq || j >= n) continue;
      float x = dot * dropout.factor(row, j0 + j);
      if (g.grad_weights.data != nullptr) x += given_at<T>(g.grad_weights, g.narrow, b, i, j0 + j);
      static_cast<float*>(g.grads)[row * p.Tk + j0 + j] = x;
    }
  }

  // A warp sums for a query.
  __device__ void sum_moments() {
    __syncthreads();
    if (warp >= p.Tq) return;
    const int64_t keys = count(warp), row = b * p.Tq + warp, first = row * p.Tk + j0;
    Sum total, dot;
    for (int64_t j = lane; j < keys; j += kWarp) {
      const float weight = weight_at<T>(g.weights, g.narrow, first + j);
      total.add(weight);
      dot.add_product(weight, static_cast<const float*>(g.grads)[first + j]);
    }
    total = warp_sum(total);
    dot = warp_sum(dot);
    if (lane > 0) return;
    Sum* moments = static_cast<Sum*>(g.moments) + 2 * (row * g.splits + j0 / g.split);
    moments[0] = total;
    moments[1] = dot;
  }
};

template <class T, int QT, bool vectors>
__global__ void __launch_bounds__(kDecodeThreads, 2) grad_values(const GradValues g) {
  GradValuesTask<T, QT, vectors> task(g);
  task.load();
  task.meet_values();
  if (g.grads != nullptr) task.sum_moments();
}

}  // namespace bahdanau_fast::gpu

// Backward for a few queries, a decoder step, the first of three launches: from the gradients of
// context and weights to those of values, and to what grad_keys takes. sum_parts is the third.
//
//   grad[b,i,j]     = grad_context[b,i] . value[b,j], dropped out, + grad_weights[b,i,j]
//   grad_value[b,j] = sum_i dropout(weight)[b,i,j] grad_context[b,i]
//   moments[b,i]    = over a part of the keys, sums of weight and of weight grad
//
// A block is a part of the keys of a batch row. Reads values once and writes their gradients once:
// 2 Dv numbers per key. grad goes where grad_keys takes its grad_scores.
#pragma once

#include "backward_keys.h"

namespace bahdanau_fast::gpu {

constexpr int64_t kBackwardQueries = 4;  // at most

// Shared memory for QT queries: the contexts' gradients (QT,width), and weights after dropout
// (QT,split).
template <class T>
struct GradValuesShared {
  float *context, *weights;
  int64_t bytes, width;

  __host__ __device__ GradValuesShared(char* base, const Backward& g, int64_t QT) {
    Carver from{base};
    width = ceil_div(g.p.Dv, kVector<T>) * kVector<T>;
    context = from.take<float>(QT * width);
    weights = from.take<float>(QT * g.split);
    bytes = from.used;
  }
};

template <class T, int QT, bool vectors>
struct GradValuesTask : KeysBlock<T, vectors> {
  using Base = KeysBlock<T, vectors>;
  using Base::b, Base::g, Base::j0, Base::lane, Base::n, Base::p, Base::U, Base::warp;
  static constexpr int KV = QT == 1 ? 4 : 2;  // values of a warp at a time, as registers allow
  const GradValuesShared<T> smem;
  const Dropout dropout;

  __device__ explicit GradValuesTask(const Backward& all)
      : Base(all), smem(shared_memory(), all, QT), dropout(p) {}

  // Both are zero past the last query.
  __device__ void load() {
    const bool through_context = g.grad_context.data != nullptr;
    for (int64_t index = threadIdx.x; index < QT * smem.width; index += kDecodeThreads) {
      const int64_t i = index / smem.width, c = index % smem.width;
      const bool in_bounds = through_context && i < p.Tq && c < p.Dv;
      smem.context[index] = in_bounds ? widen(row_at<T>(g.grad_context, b, i)[c]) : 0.0f;
    }
    for (int64_t index = threadIdx.x; index < QT * g.split; index += kDecodeThreads) {
      const int64_t i = index / g.split, j = index % g.split, row = b * p.Tq + i;
      float x = 0;
      if (i < p.Tq && j < n)
        x = weight_at<T>(g.weights, g.narrow, row * p.Tk + j0 + j) * dropout.factor(row, j0 + j);
      smem.weights[index] = x;
    }
    __syncthreads();
  }

  __device__ void add_values() {
    for (int64_t first = warp * KV; first < n; first += kDecodeWarps * KV) {
      float weights[QT][KV], dots[KV * QT] = {};
      unrolled<QT, KV>([&](int q, int k) {
        weights[q][k] = smem.weights[q * g.split + smaller(first + k, n - 1)];
      });
      for (int64_t c = lane * U; c < p.Dv; c += kWarp * U) {
        float value[KV][U], grad[KV][U] = {};
        unrolled<KV>([&](int k) { this->load_valid(p.values, first + k, c, p.Dv, value[k]); });
#pragma unroll
        for (int q = 0; q < QT; ++q)
          unrolled<KV, U>([&](int k, int u) {
            const float grad_context = smem.context[q * smem.width + c + u];
            dots[k * QT + q] += grad_context * value[k][u];
            grad[k][u] += weights[q][k] * grad_context;
          });
        if (g.grad_values == nullptr) continue;
        unrolled<KV>([&](int k) {
          if (first + k < n)
            store_units<T, vectors>(grad[k], this->row_of(g.grad_values, first + k, p.Dv), c, p.Dv);
        });
      }
      const float dot = warp_sums<KV * QT>(dots, lane);
      constexpr int lanes = kWarp / (KV * QT);  // that have one dot product
      const int64_t j = first + lane / lanes / QT, i = lane / lanes % QT, row = b * p.Tq + i;
      if (g.grad_scores == nullptr || lane % lanes != 0 || i >= p.Tq || j >= n) continue;
      float x = dot * dropout.factor(row, j0 + j);
      if (g.grad_weights.data != nullptr)
        x += grad_weight_at<T>(g.grad_weights, g.narrow, b, i, j0 + j);
      static_cast<float*>(g.grad_scores)[row * p.Tk + j0 + j] = x;
    }
  }

  // A warp sums for a query.
  __device__ void sum_moments() {
    __syncthreads();
    if (warp >= p.Tq) return;
    const int64_t keys = this->count(warp), row = b * p.Tq + warp, first = row * p.Tk + j0;
    Sum total, dot;
    for (int64_t j = lane; j < keys; j += kWarp) {
      const float weight = weight_at<T>(g.weights, g.narrow, first + j);
      total.add(weight);
      dot.add_product(weight, static_cast<const float*>(g.grad_scores)[first + j]);
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
__global__ void __launch_bounds__(kDecodeThreads, 2) grad_values(const Backward g) {
  GradValuesTask<T, QT, vectors> task(g);
  task.load();
  task.add_values();
  if (g.grad_scores != nullptr) task.sum_moments();
}

}  // namespace bahdanau_fast::gpu

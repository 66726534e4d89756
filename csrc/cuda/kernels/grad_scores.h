// From gradients of context and weights to those of scores and values.
//
//   grad_weight[b,i,j] = grad_context[b,i] . value[b,j], dropped out, + grad_weights[b,i,j]
//   grad_value[b,j]    = sum_i dropout(weight)[b,i,j] grad_context[b,i]
//   grad_score[b,i,j]  = weight (grad_weight - sum_j weight grad_weight), masked places zero
//
//   values (B,Tk,Dv), grad_context (B,Tq,Dv): T; weights, grad_weights (B,Tq,Tk): fp32;
//   grad_score (B,Tq,Tk): fp32; grad_values (B,Tk,Dv): T
//
// For few queries the first two are one pass over the values here, for many queries they are
// products (matmul.h). The third takes a block per row.
#pragma once

#include "decode.h"

namespace bahdanau_fast::gpu {

struct DecodeGrad {
  Problem p;
  int64_t splits = 1, split = 1;
  const void* weights = nullptr;  // (B,Tq,Tk) of fp32
  View grad_context;              // data may be null
  View grad_weights;              // data may be null
  void* grad_scores = nullptr;    // (B,Tq,Tk) of fp32: grad_weight
  void* grad_values = nullptr;    // (B,Tk,Dv) of T; null: not asked for
};

template <class T>
struct DecodeGradShared {
  float *grads, *weights;  // (Tq,width) and (Tq,split), dropped out
  int64_t bytes, width;

  __host__ __device__ DecodeGradShared(char* base, const Problem& p, int64_t split) {
    Carver from{base};
    width = ceil_div(p.Dv, kVector<T>) * kVector<T>;
    grads = from.take<float>(p.Tq * width);
    weights = from.take<float>(p.Tq * split);
    bytes = from.used;
  }
};

// A block is (batch row, split of its keys). A warp takes one key, its lanes neighbouring columns.
template <class T>
struct DecodeGradTask {
  static constexpr int U = kVector<T>, QT = 4;
  const DecodeGrad& g;
  const Problem& p;
  const DecodeGradShared<T> mine;
  const Dropout dropout;
  int64_t b, j0, n, used = 0;  // values from `used` on may be anything: no query uses them
  int lane, warp;

  __device__ explicit DecodeGradTask(const DecodeGrad& all)
      : g(all), p(all.p), mine(shared_memory(), all.p, all.split), dropout(all.p) {
    lane = threadIdx.x % kWarp;
    warp = threadIdx.x / kWarp;
    b = blockIdx.x / g.splits;
    j0 = blockIdx.x % g.splits * g.split;
    n = smaller(g.split, p.Tk - j0);
    for (int64_t i = 0; i < p.Tq; ++i) used = larger(used, key_count(p, b, i));
  }

  __device__ void load() {
    const bool through_context = g.grad_context.data != nullptr;
    for (int64_t at = threadIdx.x; at < p.Tq * mine.width; at += kDecodeThreads) {
      const int64_t i = at / mine.width, c = at % mine.width;
      const bool there = through_context && c < p.Dv;
      mine.grads[at] = there ? widen(row_at<T>(g.grad_context, b, i)[c]) : 0.0f;
    }
    for (int64_t at = threadIdx.x; at < p.Tq * n; at += kDecodeThreads) {
      const int64_t i = at / n, j = at % n, row = b * p.Tq + i;
      mine.weights[i * g.split + j] =
          static_cast<const float*>(g.weights)[row * p.Tk + j0 + j] * dropout.factor(row, j0 + j);
    }
    __syncthreads();
  }

  // Queries [i0, i0 + QT) against one key.
  template <bool vectors>
  __device__ __forceinline__ void weights_of(int64_t i0, int64_t j) {
    const T* row = row_at<T>(p.values, b, j0 + j);
    const float* grads = mine.grads + i0 * mine.width;
    int64_t stride[QT];  // past the last query, the last
#pragma unroll
    for (int q = 0; q < QT; ++q) stride[q] = smaller(q, p.Tq - 1 - i0) * mine.width;
    float sums[QT] = {};
    for (int64_t c = lane * U; c < p.Dv && g.grad_context.data != nullptr; c += kWarp * U) {
      float value[U];
      load_units<T, vectors>(row, c, p.Dv, value);
#pragma unroll
      for (int q = 0; q < QT; ++q)
#pragma unroll
        for (int k = 0; k < U; ++k) sums[q] += grads[stride[q] + c + k] * value[k];
    }
    const float sum = warp_sums<QT>(sums, lane);
    constexpr int each = kWarp / QT;
    const int64_t i = i0 + lane / each, at = b * p.Tq + i;
    if (lane % each != 0 || i >= p.Tq) return;
    float x = sum * dropout.factor(at, j0 + j);
    if (g.grad_weights.data != nullptr) x += row_at<float>(g.grad_weights, b, i)[j0 + j];
    static_cast<float*>(g.grad_scores)[at * p.Tk + j0 + j] = x;
  }

  __device__ void values_of(int64_t j) {
    T* out = static_cast<T*>(g.grad_values) + (b * p.Tk + j0 + j) * p.Dv;
    for (int64_t c = lane; c < p.Dv; c += kWarp) {
      float sum = 0;
      for (int64_t i = 0; i < p.Tq; ++i)
        sum += mine.weights[i * g.split + j] * mine.grads[i * mine.width + c];
      narrow(sum, out + c);
    }
  }

  template <bool vectors>
  __device__ void run() {
    for (int64_t j = warp; j < n; j += kDecodeWarps) {
      for (int64_t i0 = 0; i0 < p.Tq && j0 + j < used; i0 += QT) weights_of<vectors>(i0, j);
      if (g.grad_values != nullptr) values_of(j);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kDecodeThreads, 2) decode_grad_weights(const DecodeGrad g) {
  DecodeGradTask<T> task(g);
  task.load();
  if (in_vectors<T>(g.p.values, g.p.Dv))
    task.template run<true>();
  else
    task.template run<false>();
}

struct SoftmaxGrad {
  Problem p;
  const void* weights = nullptr;  // (B,Tq,Tk) of fp32
  void* grad_scores = nullptr;    // (B,Tq,Tk) of fp32: grad_weight in, grad_score out
};

constexpr int kGradRowThreads = 128;

// The saved weights are rounded. Dividing them by their sum makes them add up to one again, and a
// row of score gradients to zero, which the gradients of queries and w rely on. Both sums, and the
// mean, to twice the precision for that reason.
template <class T>
__global__ void __launch_bounds__(kGradRowThreads) softmax_grad(const SoftmaxGrad g) {
  Carver from{shared_memory()};
  Sum* scratch = from.take<Sum>(kGradRowThreads / kWarp);
  const int64_t row = blockIdx.x, keys = key_count(g.p, row / g.p.Tq, row % g.p.Tq);
  const float* weights = static_cast<const float*>(g.weights) + row * g.p.Tk;
  float* grads = static_cast<float*>(g.grad_scores) + row * g.p.Tk;
  Sum total, dot;
  for (int64_t j = threadIdx.x; j < keys; j += kGradRowThreads) {
    total.add(weights[j]);
    dot.add_product(weights[j], grads[j]);
  }
  total = block_sum(total, scratch);
  const Sum mean = block_sum(dot, scratch).over(total);
  for (int64_t j = threadIdx.x; j < g.p.Tk; j += kGradRowThreads)
    grads[j] = j < keys ? weights[j] / total.high * ((grads[j] - mean.high) - mean.low) : 0.0f;
}

}  // namespace bahdanau_fast::gpu

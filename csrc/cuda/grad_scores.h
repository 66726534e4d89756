// From gradients of context and weights to those of scores and values.
//
//   grad_weight[b,i,j] = grad_context[b,i] . value[b,j], dropped out, + grad_weights[b,i,j]
//   grad_value[b,j]    = sum_i dropout(weight)[b,i,j] grad_context[b,i]
//   grad_score[b,i,j]  = weight (grad_weight - sum_j weight grad_weight), masked places zero
//
//   values (B,Tk,Dv), grad_context (B,Tq,Dv): T; weights, grad_weights (B,Tq,Tk): W;
//   grad_score (B,Tq,Tk): A; grad_values (B,Tk,Dv): T
//
// For few queries the first two are one pass over the values here, for many they are products
// (matmul.h). The third is a block per row.
#pragma once

#include "decode.h"

namespace bahdanau_fast::gpu {

struct DecodeGrad {
  Problem p;
  int64_t splits = 1, split = 1;
  const void* weights = nullptr;  // (B,Tq,Tk) of W
  View grad_context;              // data may be null
  View grad_weights;              // data may be null
  void* grad_scores = nullptr;    // (B,Tq,Tk) of A: grad_weight
  void* grad_values = nullptr;    // (B,Tk,Dv) of T; null: not asked for
};

template <class A>
struct DecodeGradShared {
  A *grads, *weights;  // (Tq,Dv) and (Tq,split), dropped out
  int64_t bytes;

  __host__ __device__ DecodeGradShared(char* base, const Problem& p, int64_t split) {
    Carver from{base};
    grads = from.take<A>(p.Tq * p.Dv);
    weights = from.take<A>(p.Tq * split);
    bytes = from.used;
  }
};

// A block is (batch row, split of its keys), a warp a key, a lane neighbouring columns.
template <class T, class A>
__global__ void __launch_bounds__(kDecodeThreads) decode_grad_weights(const DecodeGrad g) {
  using W = typename WeightOf<T>::type;
  constexpr int U = kUnits<T>, QT = 4;
  const Problem& p = g.p;
  const DecodeGradShared<A> mine(shared_memory(), p, g.split);
  const Dropout dropout(p);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t b = blockIdx.x / g.splits, j0 = blockIdx.x % g.splits * g.split;
  const int64_t n = smaller(g.split, p.Tk - j0);
  const bool through_context = g.grad_context.data != nullptr, vectors = aligned<T>(p.values);
  int64_t look = 0;  // past it values may be anything, and grad_weight is not asked for
  for (int64_t i = 0; i < p.Tq; ++i) look = larger(look, kept(p, b, i));

  for (int64_t at = threadIdx.x; at < p.Tq * p.Dv; at += kDecodeThreads)
    mine.grads[at] =
        through_context ? A(widen(row_at<T>(g.grad_context, b, at / p.Dv)[at % p.Dv])) : A(0);
  for (int64_t at = threadIdx.x; at < p.Tq * n; at += kDecodeThreads) {
    const int64_t row = b * p.Tq + at / n, j = at % n;
    mine.weights[at / n * g.split + j] =
        A(static_cast<const W*>(g.weights)[row * p.Tk + j0 + j]) * dropout.factor<A>(row, j0 + j);
  }
  __syncthreads();

  for (int64_t j = warp; j < n; j += kDecodeWarps) {
    for (int64_t i0 = 0; i0 < p.Tq && j0 + j < look; i0 += QT) {
      A sums[QT] = {};
      for (int64_t c = lane * U; c < p.Dv && through_context; c += kWarp * U) {
        A value[U];
        load_units<T, A>(row_at<T>(p.values, b, j0 + j), c, p.Dv, vectors, value);
#pragma unroll
        for (int q = 0; q < QT; ++q) {
          if (i0 + q >= p.Tq) break;
          const A* grads = mine.grads + (i0 + q) * p.Dv;
#pragma unroll
          for (int k = 0; k < U; ++k)
            if (c + k < p.Dv) sums[q] += grads[c + k] * value[k];
        }
      }
      const A sum = warp_sums<QT>(sums, lane);
      constexpr int each = kWarp / QT;
      const int64_t i = i0 + lane / each;
      if (lane % each != 0 || i >= p.Tq) continue;
      const int64_t row = b * p.Tq + i;
      A x = sum * dropout.factor<A>(row, j0 + j);
      if (g.grad_weights.data != nullptr) x += A(row_at<W>(g.grad_weights, b, i)[j0 + j]);
      static_cast<A*>(g.grad_scores)[row * p.Tk + j0 + j] = x;
    }
    if (g.grad_values == nullptr) continue;
    T* out = static_cast<T*>(g.grad_values) + (b * p.Tk + j0 + j) * p.Dv;
    for (int64_t c = lane; c < p.Dv; c += kWarp) {
      A sum = 0;
      for (int64_t i = 0; i < p.Tq; ++i)
        sum += mine.weights[i * g.split + j] * mine.grads[i * p.Dv + c];
      narrow(sum, out + c);
    }
  }
}

struct SoftmaxGrad {
  Problem p;
  const void* weights = nullptr;  // (B,Tq,Tk) of W
  void* grad_scores = nullptr;    // (B,Tq,Tk) of A: grad_weight in, grad_score out
};

constexpr int kGradRowThreads = 128;

// The saved weights were rounded: divided by their sum they add up to one again, so that a row of
// score gradients adds up to zero, on which the gradients of queries and w rely. Hence in fp64.
template <class A, class W>
__global__ void __launch_bounds__(kGradRowThreads) softmax_grad(const SoftmaxGrad g) {
  Carver from{shared_memory()};
  double* scratch = from.take<double>(kGradRowThreads / kWarp);
  const int64_t row = blockIdx.x, keys = kept(g.p, row / g.p.Tq, row % g.p.Tq);
  const W* weights = static_cast<const W*>(g.weights) + row * g.p.Tk;
  A* grads = static_cast<A*>(g.grad_scores) + row * g.p.Tk;
  double total = 0, dot = 0;
  for (int64_t j = threadIdx.x; j < keys; j += kGradRowThreads) {
    total += double(weights[j]);
    dot += double(weights[j]) * double(grads[j]);
  }
  total = block_sum(total, scratch);
  const double mean = block_sum(dot, scratch) / total;
  for (int64_t j = threadIdx.x; j < g.p.Tk; j += kGradRowThreads)
    grads[j] = j < keys ? A(double(weights[j]) / total * (double(grads[j]) - mean)) : A(0);
}

}  // namespace bahdanau_fast::gpu

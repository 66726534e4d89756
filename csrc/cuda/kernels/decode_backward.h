// Backward for a few queries, a decoder step: from the gradients of context and weights to those of
// queries, keys and values, in one launch.
//
//   grad_weight[b,i,j] = grad_context[b,i] . value[b,j], dropped out, + grad_weights[b,i,j]
//   grad_value[b,j]    = sum_i dropout(weight)[b,i,j] grad_context[b,i]
//   s[b,i,j]           = weight (grad_weight - sum_j weight grad_weight), masked places zero
//   grad_query[b,i] = w sum_j s u,  grad_key[b,j] = w sum_i s u,  grad_w = sum_bij s t
//   with t = tanh(query + key), u = 1 - t^2
//
//   queries (B,Tq,H), keys (B,Tk,H), values (B,Tk,Dv), w (H), grad_context (B,Tq,Dv), grad_queries,
//   grad_keys, grad_values: T; weights, grad_weights (B,Tq,Tk): fp32; of grad_w a part (B,H): fp32
//
// A cluster is a batch row, a block one part of its keys. Its warps take keys in turn; lanes hold
// neighbouring columns, 16 bytes at a time: first of the values, which gives the gradients of
// weights and values, then of the keys. For the softmax in between, and at the end for the sums
// over keys, blocks read the sums of the others from shared memory, in the order of the blocks.
// Reads keys and values once and writes their gradients once: 2 (H + Dv) numbers for each key.
// Without clusters, a block takes the whole row.
#pragma once

#include "grad_scores.h"
#include "tanh.h"

namespace bahdanau_fast::gpu {

constexpr int64_t kBackwardQueries = 4;  // at most

struct DecodeBackward {
  Problem p;
  int64_t splits = 1, split = 1;  // blocks of a cluster, and keys of each
  const void* weights = nullptr;  // (B,Tq,Tk) of fp32
  View grad_context;              // data may be null
  View grad_weights;              // data may be null
  void* grad_queries = nullptr;   // null: not asked for, here and below
  void* grad_keys = nullptr;
  void* grad_values = nullptr;
  void* w_parts = nullptr;  // (B,H) of fp32
};

template <class T, int QT>
struct DecodeBackwardShared {
  float *grads, *weights, *scores;  // (QT,width) and twice (QT,split): dropped out; s
  float* parts;                     // (8,QT + 1,columns of a warp)
  float* sums;                      // (QT + 1,H): over the block's keys, of s u and of s t
  Sum* moments;  // (QT,2): over the block's keys, of weight and of weight grad_weight
  int64_t bytes, width;

  __host__ __device__ DecodeBackwardShared(char* base, const Problem& p, int64_t split) {
    Carver from{base};
    width = ceil_div(p.Dv, kVector<T>) * kVector<T>;
    grads = from.take<float>(QT * width);
    weights = from.take<float>(QT * split);
    scores = from.take<float>(QT * split);
    parts = from.take<float>(kDecodeWarps * (QT + 1) * kWarp * kVector<T>);
    sums = from.take<float>((QT + 1) * p.H);
    moments = from.take<Sum>(QT * 2);
    bytes = from.used;
  }
};

template <class T, int QT>
struct DecodeBackwardTask {
  static constexpr int U = kVector<T>;
  // Values and keys of a warp at a time, as registers allow.
  static constexpr int KV = QT == 1 ? 4 : 2, KU = QT == 1 ? 3 : 2;
  const DecodeBackward& g;
  const Problem& p;
  const DecodeBackwardShared<T, QT> mine;
  const Dropout dropout;
  int64_t b, j0, n, used = 0;  // keys and values from `used` on may be anything
  int lane, warp, rank;

  __device__ explicit DecodeBackwardTask(const DecodeBackward& all)
      : g(all), p(all.p), mine(shared_memory(), all.p, all.split), dropout(all.p) {
    lane = threadIdx.x % kWarp;
    warp = threadIdx.x / kWarp;
    rank = int(blockIdx.x % g.splits);
    b = blockIdx.x / g.splits;
    j0 = rank * g.split;
    n = larger(0, smaller(g.split, p.Tk - j0));
    for (int64_t i = 0; i < p.Tq; ++i) used = larger(used, count(i));
  }

  // How many of the block's keys query i has.
  __device__ int64_t count(int64_t i) const {
    return larger(0, smaller(n, key_count(p, b, i) - j0));
  }

  // Part of row j of the keys or values. From `used` on it is the last used row instead, whose
  // result is multiplied by zero.
  template <bool vectors>
  __device__ __forceinline__ void load_used(const View& view, int64_t j, int64_t c, int64_t end,
                                            float* out) const {
    if (used > 0) {
      load_units<T, vectors>(row_at<T>(view, b, j0 + smaller(j, used - 1)), c, end, out);
    } else {
#pragma unroll
      for (int u = 0; u < U; ++u) out[u] = 0;
    }
  }

  // Gradients and weights are zero past the last query.
  __device__ void load() {
    const bool through_context = g.grad_context.data != nullptr;
    for (int64_t at = threadIdx.x; at < QT * mine.width; at += kDecodeThreads) {
      const int64_t i = at / mine.width, c = at % mine.width;
      const bool there = through_context && i < p.Tq && c < p.Dv;
      mine.grads[at] = there ? widen(row_at<T>(g.grad_context, b, i)[c]) : 0.0f;
    }
    for (int64_t at = threadIdx.x; at < QT * g.split; at += kDecodeThreads) {
      const int64_t i = at / g.split, j = at % g.split, row = b * p.Tq + i;
      float x = 0;
      if (i < p.Tq && j < n)
        x = static_cast<const float*>(g.weights)[row * p.Tk + j0 + j] * dropout.factor(row, j0 + j);
      mine.weights[at] = x;
      mine.scores[at] = 0;
    }
    __syncthreads();
  }

  // ---- values: gradients of weights and values ----

  template <bool vectors>
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
        for (int k = 0; k < KV; ++k) {
          load_used<vectors>(p.values, first + k, c, p.Dv, value[k]);
        }
#pragma unroll
        for (int q = 0; q < QT; ++q)
#pragma unroll
          for (int k = 0; k < KV; ++k)
#pragma unroll
            for (int u = 0; u < U; ++u) {
              const float grad_context = mine.grads[q * mine.width + c + u];
              dots[k * QT + q] += grad_context * value[k][u];
              grad[k][u] += weights[q][k] * grad_context;
            }
        if (g.grad_values == nullptr) continue;
#pragma unroll
        for (int k = 0; k < KV; ++k)
          if (first + k < n)
            store_units<T, vectors>(grad[k], row_of<T>(out, j0 + first + k), c, p.Dv);
      }
      const float dot = warp_sums<KV * QT>(dots, lane);
      constexpr int each = kWarp / (KV * QT);
      const int64_t j = first + lane / each / QT, i = lane / each % QT, row = b * p.Tq + i;
      if (lane % each != 0 || i >= p.Tq || j >= n) continue;
      float x = dot * dropout.factor(row, j0 + j);
      if (g.grad_weights.data != nullptr) x += row_at<float>(g.grad_weights, b, i)[j0 + j];
      mine.scores[i * g.split + j] = x;
    }
    __syncthreads();
  }

  template <class X>
  __device__ X* row_of(const View& out, int64_t j) const {
    return const_cast<X*>(row_at<X>(out, b, j));
  }

  // ---- softmax, as in softmax_grad: a warp per query ----

  __device__ void meet_softmax() {
    const int64_t row = b * p.Tq + warp, keys = warp < p.Tq ? count(warp) : 0;
    const float* weights = static_cast<const float*>(g.weights) + row * p.Tk + j0;
    float* scores = mine.scores + warp * g.split;
    Sum total, dot;
    for (int64_t j = lane; j < keys; j += kWarp) {
      total.add(weights[j]);
      dot.add_product(weights[j], scores[j]);
    }
    total = warp_sum(total);
    dot = warp_sum(dot);
    if (warp < QT && lane == 0) {
      mine.moments[2 * warp] = total;
      mine.moments[2 * warp + 1] = dot;
    }
    cluster_barrier();
    if (warp < p.Tq) {
      total = dot = Sum{};
      for (int k = 0; k < g.splits; ++k) {
        const Sum* moments = in_block(mine.moments, k) + 2 * warp;
        total.add(moments[0]);
        dot.add(moments[1]);
      }
      const Sum mean = dot.over(total);
      for (int64_t j = lane; j < n; j += kWarp)
        scores[j] =
            j < keys ? weights[j] / total.high * ((scores[j] - mean.high) - mean.low) : 0.0f;
    }
    __syncthreads();
  }

  // ---- keys: gradients of queries, keys and w ----

  // Hidden units [c, c + U), the lane's, for the keys of the warp.
  template <bool vectors>
  __device__ void meet_keys(int64_t c) {
    const View out{g.grad_keys, p.Tk * p.H, p.H};
    float query[QT][U], w[U], grad_query[QT][U] = {}, grad_w[U] = {};
#pragma unroll
    for (int q = 0; q < QT; ++q)
      load_units<T, false>(row_at<T>(p.queries, b, smaller(q, p.Tq - 1)), c, p.H, query[q]);
    load_units<T, false>(static_cast<const T*>(p.w), c, p.H, w);
    for (int64_t first = warp * KU; first < n && c < p.H; first += kDecodeWarps * KU) {
      float key[KU][U];
#pragma unroll
      for (int k = 0; k < KU; ++k) {
        load_used<vectors>(p.keys, first + k, c, p.H, key[k]);
      }
#pragma unroll
      for (int k = 0; k < KU; ++k) {
        if (first + k >= n) continue;
        float grad[U] = {};
#pragma unroll
        for (int q = 0; q < QT; ++q) {
          const float s = mine.scores[q * g.split + first + k];
#pragma unroll
          for (int u = 0; u < U; u += 4) {
            float x[4], t[4], slope[4];
#pragma unroll
            for (int y = 0; y < 4; ++y) x[y] = query[q][u + y] + key[k][u + y];
            four_tanh_of<T>(x, t, slope);
#pragma unroll
            for (int y = 0; y < 4; ++y) {
              const float su = s * slope[y];
              grad_w[u + y] += s * t[y];
              grad_query[q][u + y] += su;
              grad[u + y] += su;
            }
          }
        }
        if (g.grad_keys == nullptr) continue;
#pragma unroll
        for (int u = 0; u < U; ++u) grad[u] *= w[u];
        store_units<T, vectors>(grad, row_of<T>(out, j0 + first + k), c, p.H);
      }
    }
    constexpr int columns = kWarp * U;
    float* part = mine.parts + warp * (QT + 1) * columns + lane * U;
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int q = 0; q < QT; ++q) part[q * columns + u] = grad_query[q][u];
      part[QT * columns + u] = grad_w[u];
    }
  }

  template <bool vectors>
  __device__ void meet_keys() {
    constexpr int columns = kWarp * U;
    for (int64_t c0 = 0; c0 < p.H; c0 += columns) {
      meet_keys<vectors>(c0 + lane * U);
      __syncthreads();
      for (int at = threadIdx.x; at < (QT + 1) * columns; at += kDecodeThreads) {
        const int64_t h = c0 + at % columns;
        float sum = 0;
        for (int k = 0; k < kDecodeWarps; ++k) sum += mine.parts[k * (QT + 1) * columns + at];
        if (h < p.H) mine.sums[at / columns * p.H + h] = sum;
      }
      __syncthreads();
    }
  }

  // Adds up the sums over the blocks of the cluster; each block takes a share of the hidden units.
  __device__ void finish() {
    cluster_barrier();
    const int64_t step = g.splits * kDecodeThreads;
    for (int64_t at = rank * kDecodeThreads + threadIdx.x; at < (QT + 1) * p.H; at += step) {
      const int64_t i = at / p.H, h = at % p.H;
      const bool is_w = i == QT;
      if (is_w ? g.w_parts == nullptr : i >= p.Tq || g.grad_queries == nullptr) continue;
      float sum = 0;
      for (int k = 0; k < g.splits; ++k) sum += in_block(mine.sums, k)[at];
      if (is_w)
        static_cast<float*>(g.w_parts)[b * p.H + h] = sum;
      else
        narrow(sum * widen(static_cast<const T*>(p.w)[h]),
               static_cast<T*>(g.grad_queries) + (b * p.Tq + i) * p.H + h);
    }
    cluster_barrier();  // no block ends while another reads its shared memory
  }
};

template <class T, int QT>
__global__ void __launch_bounds__(kDecodeThreads, QT == 1 ? 2 : 1)
    decode_backward(const DecodeBackward g) {
  DecodeBackwardTask<T, QT> task(g);
  const Problem& p = g.p;
  task.load();
  const View grad_values{g.grad_values, p.Tk * p.Dv, p.Dv}, grad_keys{g.grad_keys, p.Tk * p.H, p.H};
  if (in_vectors<T>(p.values, p.Dv) && in_vectors<T>(grad_values, p.Dv))
    task.template meet_values<true>();
  else
    task.template meet_values<false>();
  if (g.grad_queries == nullptr && g.grad_keys == nullptr && g.w_parts == nullptr) return;
  task.meet_softmax();
  if (in_vectors<T>(p.keys, p.H) && in_vectors<T>(grad_keys, p.H))
    task.template meet_keys<true>();
  else
    task.template meet_keys<false>();
  task.finish();
}

}  // namespace bahdanau_fast::gpu

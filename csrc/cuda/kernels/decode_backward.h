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
//   grad_keys, grad_values: T; weights, grad_weights (B,Tq,Tk): both fp32 or both T; of grad_w a
//   part (B,H): fp32
//
// A cluster is a batch row, a block one part of its keys. Its warps take keys in turn; lanes hold
// neighbouring columns, 16 bytes at a time: first of the values, which gives the gradients of
// weights and values, then of the keys. For the softmax in between, and at the end for the sums
// over keys, blocks read the sums of the others from shared memory, in the order of the blocks.
// Reads keys and values once and writes their gradients once: 2 (H + Dv) numbers for each key.
// Without clusters, a block takes the whole row.
#pragma once

#include "backward_keys.h"

namespace bahdanau_fast::gpu {

constexpr int64_t kBackwardQueries = 4;  // at most

struct DecodeBackward {
  Problem p;
  int64_t splits = 1, split = 1;  // blocks of a cluster, and keys of each
  const void* weights = nullptr;  // (B,Tq,Tk) of fp32, or `narrow` of T
  View grad_context;              // data may be null
  View grad_weights;              // (B,Tq,Tk) likewise; data may be null
  bool narrow = false;
  void* grad_queries = nullptr;  // null: not asked for, here and below
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

template <class T, int QT, bool vectors>
struct DecodeBackwardTask : KeysTask<T, QT, vectors> {
  using Base = KeysTask<T, QT, vectors>;
  using Base::b;
  using Base::columns;
  using Base::count;
  using Base::j0;
  using Base::lane;
  using Base::n;
  using Base::p;
  using Base::U;
  using Base::warp;
  static constexpr int KV = QT == 1 ? 4 : 2;  // values of a warp at a time, as registers allow
  const DecodeBackward& g;
  const DecodeBackwardShared<T, QT> mine;
  const Dropout dropout;
  const int rank;

  __device__ explicit DecodeBackwardTask(const DecodeBackward& all)
      : Base(all.p, all.grad_keys, all.splits, all.split),
        g(all),
        mine(shared_memory(), p, all.split),
        dropout(p),
        rank(int(blockIdx.x % all.splits)) {
    this->scores = mine.scores;
    this->parts = mine.parts;
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
        x = weight_at<T>(g.weights, g.narrow, row * p.Tk + j0 + j) * dropout.factor(row, j0 + j);
      mine.weights[at] = x;
      mine.scores[at] = 0;
    }
    __syncthreads();
  }

  // ---- values: gradients of weights and values ----

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
              const float grad_context = mine.grads[q * mine.width + c + u];
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
      if (lane % each != 0 || i >= p.Tq || j >= n) continue;
      float x = dot * dropout.factor(row, j0 + j);
      if (g.grad_weights.data != nullptr) x += given_at<T>(g.grad_weights, g.narrow, b, i, j0 + j);
      mine.scores[i * g.split + j] = x;
    }
    __syncthreads();
  }

  // ---- softmax, as in grad_rows: a warp per query ----

  __device__ void meet_softmax() {
    const int64_t row = b * p.Tq + warp, keys = warp < p.Tq ? count(warp) : 0;
    const auto weight = [&](int64_t j) {
      return weight_at<T>(g.weights, g.narrow, row * p.Tk + j0 + j);
    };
    float* scores = mine.scores + warp * g.split;
    Sum total, dot;
    for (int64_t j = lane; j < keys; j += kWarp) {
      total.add(weight(j));
      dot.add_product(weight(j), scores[j]);
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
        scores[j] = j < keys ? weigh_difference(weight(j) / total.high, scores[j], mean) : 0.0f;
    }
    __syncthreads();
  }

  // ---- keys: gradients of queries, keys and w ----

  __device__ void meet_all_keys() {
    for (int64_t c0 = 0; c0 < p.H; c0 += columns) {
      this->meet_keys(0, c0);
      __syncthreads();
      for (int at = threadIdx.x; at < (QT + 1) * columns; at += kDecodeThreads) {
        const int64_t h = c0 + at % columns;
        if (h < p.H) mine.sums[at / columns * p.H + h] = this->sum_of_parts(at);
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

template <class T, int QT, bool vectors>
__global__ void __launch_bounds__(kDecodeThreads, QT == 1 ? 2 : 1)
    decode_backward(const DecodeBackward g) {
  DecodeBackwardTask<T, QT, vectors> task(g);
  task.load();
  task.meet_values();
  if (g.grad_queries == nullptr && g.grad_keys == nullptr && g.w_parts == nullptr) return;
  task.meet_softmax();
  task.meet_all_keys();
  task.finish();
}

}  // namespace bahdanau_fast::gpu

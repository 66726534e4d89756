// Backward through softmax and tanh: from the gradients of weights to those of queries, keys and w.
//
//   grad_score[b,i,j] = s = weight (grad_weight - sum_j weight grad_weight), masked places zero
//   grad_query[b,i] = w sum_j s u,  grad_key[b,j] = w sum_i s u,  grad_w = sum_bij s t
//   with t = tanh(query + key), u = 1 - t^2
//
// For few queries decode_backward.h goes before grad_keys. For more it is grad_rows, and torch's
// products, which give it grad_context . value and take the weights after dropout.
#pragma once

#include "problem.h"
#include "tanh.h"

namespace bahdanau_fast::gpu {

constexpr int kDecodeThreads = 256, kDecodeWarps = kDecodeThreads / kWarp;
// Numbers that are added up one after the other grow, and with them each rounding: after so many
// turns of a loop their sum goes to another one.
constexpr int kRun = 16;

// A part of the keys of a batch row, which is what a block has. Its warps take keys in turn; lanes
// hold neighbouring columns, 16 bytes at a time.
template <class T, bool vectors>
struct KeysBlock {
  static constexpr int U = kVector<T>, columns = kWarp * U;
  const Backward& g;
  const Problem& p;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t b = blockIdx.x / g.splits, j0 = blockIdx.x % g.splits * g.split;
  const int64_t n = larger(0, smaller(g.split, p.Tk - j0));
  int64_t valid = 0;  // keys and values from here on may be anything

  __device__ explicit KeysBlock(const Backward& all) : g(all), p(all.p) {
    for (int64_t i = 0; i < p.Tq; ++i) valid = larger(valid, count(i));
  }

  // How many of the block's keys query i has.
  __device__ int64_t count(int64_t i) const {
    return larger(0, smaller(n, key_count(p, b, i) - j0));
  }

  // Part of row j of the keys or values. From `valid` on it is the last valid row instead, whose
  // result is multiplied by zero.
  __device__ __forceinline__ void load_valid(const View& view, int64_t j, int64_t c, int64_t end,
                                             float* out) const {
    if (valid > 0) {
      load_units<T, vectors>(row_at<T>(view, b, j0 + smaller(j, valid - 1)), c, end, out);
    } else {
      unrolled<U>([&](int u) { out[u] = 0; });
    }
  }

  // Row j of a contiguous result.
  __device__ T* row_of(void* out, int64_t j, int64_t width) const {
    return static_cast<T*>(out) + (b * p.Tk + j0 + j) * width;
  }
};

// ---- more queries: gradients of scores, row by row ----

constexpr int kRowThreads = 1024;  // at most

// The saved weights are rounded. Dividing them by their sum makes them add up to one again, and a
// row of score gradients to zero, which the gradients of queries and w rely on. Both sums, and the
// mean, to twice the precision for that reason.
template <class T>
__global__ void __launch_bounds__(kRowThreads) grad_rows(const Backward g) {
  Carver from{shared_memory()};
  Sum* scratch = from.take<Sum>(kRowThreads / kWarp);
  const Problem& p = g.p;
  const Dropout dropout(p);
  const int64_t row = blockIdx.x, b = row / p.Tq, i = row % p.Tq, keys = key_count(p, b, i);
  const auto weight = [&](int64_t j) { return weight_at<T>(g.weights, g.narrow, row * p.Tk + j); };
  const T* products = static_cast<const T*>(g.products);
  const auto grad_weight = [&](int64_t j) {
    float x =
        g.products == nullptr ? 0.0f : widen(products[row * p.Tk + j]) * dropout.factor(row, j);
    return g.grad_weights.data == nullptr
               ? x
               : x + grad_weight_at<T>(g.grad_weights, g.narrow, b, i, j);
  };
  if (g.dropped != nullptr)
    for (int64_t j = threadIdx.x; j < p.Tk; j += blockDim.x)
      narrow(weight(j) * dropout.factor(row, j), static_cast<T*>(g.dropped) + row * p.Tk + j);
  if (g.grad_scores == nullptr) return;
  Sum total, dot;
#pragma unroll 4
  for (int64_t j = threadIdx.x; j < keys; j += blockDim.x) {
    total.add(weight(j));
    dot.add_product(weight(j), grad_weight(j));
  }
  const auto sum = [](Sum x) { return warp_sum(x); };
  total = over_block(total, Sum{}, scratch, sum);
  const Sum mean = over_block(dot, Sum{}, scratch, sum).over(total);
  float* out = static_cast<float*>(g.grad_scores) + row * p.Tk;
  for (int64_t j = threadIdx.x; j < p.Tk; j += blockDim.x)
    out[j] = j < keys ? weigh_difference(weight(j) / total.high, grad_weight(j), mean) : 0.0f;
}

// ---- and through the tanh, part by part of the keys ----

// Shared memory for QT queries: s (QT,split), zero past the last query and for masked keys; sums of
// the warps (8,QT + 1,columns); gradients of keys by the queries before (split,columns).
template <class T>
struct GradKeysShared {
  float *scores, *sums, *grads;
  int64_t bytes;

  __host__ __device__ GradKeysShared(char* base, const Backward& g, int64_t QT) {
    constexpr int64_t columns = kWarp * kVector<T>;
    Carver from{base};
    scores = from.take<float>(QT * g.split);
    sums = from.take<float>(kDecodeWarps * (QT + 1) * columns);
    grads = from.take<float>(g.p.Tq > QT ? g.split * columns : 0);
    bytes = from.used;
  }
};

template <class T, int QT, bool vectors>
struct GradKeysTask : KeysBlock<T, vectors> {
  using Base = KeysBlock<T, vectors>;
  using Base::b, Base::columns, Base::g, Base::j0, Base::lane, Base::n, Base::p, Base::U,
      Base::warp;
  static constexpr int KU = QT == 1 ? 3 : 2;  // keys of a warp at a time, as registers allow
  const GradKeysShared<T> smem;

  __device__ explicit GradKeysTask(const Backward& all)
      : Base(all), smem(shared_memory(), all, QT) {}

  // The gradients of the scores of queries [i0, i0 + QT). A warp has one of them.
  __device__ void load_scores(int64_t i0) {
    const int64_t q = warp % QT, i = i0 + q, row = b * p.Tq + i, first = row * p.Tk + j0;
    const bool in_bounds = i < p.Tq, through_softmax = in_bounds && g.moments != nullptr;
    const int64_t keys = through_softmax ? this->count(i) : in_bounds ? n : 0;
    Sum total, mean;
    if (through_softmax) {
      const Sum* moments = static_cast<const Sum*>(g.moments) + 2 * row * g.splits;
      for (int64_t k = lane; k < g.splits; k += kWarp) {
        total.add(moments[2 * k]);
        mean.add(moments[2 * k + 1]);
      }
      total = warp_sum(total);
      mean = warp_sum(mean).over(total);
    }
    for (int64_t j = warp / QT * kWarp + lane; j < g.split; j += kDecodeThreads / QT) {
      float x = j < keys ? static_cast<const float*>(g.grad_scores)[first + j] : 0.0f;
      if (through_softmax && j < keys)
        x = weigh_difference(weight_at<T>(g.weights, g.narrow, first + j) / total.high, x, mean);
      smem.scores[q * g.split + j] = x;
    }
  }

  // Queries [i0, i0 + QT) and hidden units [c0, c0 + columns): gradients of keys, and into shared
  // memory the sums over the keys of each warp, of s u and of s t.
  __device__ void add_keys(int64_t i0, int64_t c0) {
    const int64_t c = c0 + lane * U, run = kRun * kDecodeWarps * KU;
    float query[QT][U], w[U];
    if (c < p.H) {
      unrolled<QT>([&](int q) {
        load_units<T, vectors>(row_at<T>(p.queries, b, smaller(i0 + q, p.Tq - 1)), c, p.H,
                               query[q]);
      });
      load_units<T, vectors>(static_cast<const T*>(p.w), c, p.H, w);
    }
    float* warp_sums = smem.sums + warp * (QT + 1) * columns + lane * U;
#pragma unroll 1
    for (int64_t from = 0; from == 0 || from < n; from += run) {
      float sums[QT + 1][U] = {};
      if (c < p.H) add_run(i0, c, from, smaller(n, from + run), query, w, sums);
#pragma unroll
      for (int q = 0; q <= QT; ++q)
        unrolled<U>([&](int u) {
          warp_sums[q * columns + u] =
              from == 0 ? sums[q][u] : warp_sums[q * columns + u] + sums[q][u];
        });
    }
  }

  // The same of the warp's keys in [from, end), into registers: of each query, and of w.
  __device__ __forceinline__ void add_run(int64_t i0, int64_t c, int64_t from, int64_t end,
                                          const float (&query)[QT][U], const float (&w)[U],
                                          float (&sums)[QT + 1][U]) const {
    for (int64_t first = from + warp * KU; first < end; first += kDecodeWarps * KU) {
      float key[KU][U];
      unrolled<KU>([&](int k) { this->load_valid(p.keys, first + k, c, p.H, key[k]); });
#pragma unroll
      for (int k = 0; k < KU; ++k) {
        if (first + k >= n) continue;
        float grad[U] = {};
        unrolled<QT>([&](int q) {
          const float s = smem.scores[q * g.split + first + k];
#pragma unroll
          for (int u = 0; u < U; u += 4) {
            float x[4], t[4], slope[4];
            unrolled<4>([&](int y) { x[y] = query[q][u + y] + key[k][u + y]; });
            four_tanh_of<T>(x, t, slope);
            unrolled<4>([&](int y) {
              const float su = s * slope[y];
              sums[QT][u + y] += s * t[y];
              sums[q][u + y] += su;
              grad[u + y] += su;
            });
          }
        });
        if (g.grad_keys != nullptr) store_key(i0, first + k, c, w, grad);
      }
    }
  }

  // Adds to the gradient of a key; stores it when no more queries follow.
  __device__ __forceinline__ void store_key(int64_t i0, int64_t j, int64_t c, const float* w,
                                            float* grad) const {
    float* const grads = smem.grads + j * columns + lane * U;
    unrolled<U>([&](int u) {
      if (i0 > 0) grad[u] += grads[u];
      if (i0 + QT < p.Tq) grads[u] = grad[u];
      grad[u] *= w[u];
    });
    if (i0 + QT >= p.Tq) store_units<T, vectors>(grad, this->row_of(g.grad_keys, j, p.H), c, p.H);
  }

  __device__ void store_sums(int64_t i0, int64_t c0) {
    const int64_t row = blockIdx.x % g.splits * p.B + b;
    for (int index = threadIdx.x; index < (QT + 1) * columns; index += kDecodeThreads) {
      const int64_t i = i0 + index / columns, h = c0 + index % columns;
      if (h >= p.H) continue;
      float sum = 0;
      for (int k = 0; k < kDecodeWarps; ++k) sum += smem.sums[k * (QT + 1) * columns + index];
      if (index >= QT * columns) {
        float* out = static_cast<float*>(g.w_parts) + row * p.H + h;
        if (g.w_parts != nullptr) *out = i0 == 0 ? sum : *out + sum;
      } else if (i < p.Tq && g.queries_parts != nullptr) {
        static_cast<float*>(g.queries_parts)[(row * p.Tq + i) * p.H + h] =
            sum * widen(static_cast<const T*>(p.w)[h]);
      }
    }
  }

  __device__ void run() {
    for (int64_t c0 = 0; c0 < p.H; c0 += columns)
      for (int64_t i0 = 0; i0 < p.Tq; i0 += QT) {
        if (c0 == 0 || p.Tq > QT) load_scores(i0);
        __syncthreads();
        add_keys(i0, c0);
        __syncthreads();
        store_sums(i0, c0);
      }
  }
};

template <class T, int QT, bool vectors>
__global__ void __launch_bounds__(kDecodeThreads, QT == 1 ? 2 : 1) grad_keys(const Backward g) {
  GradKeysTask<T, QT, vectors>(g).run();
}

// ---- the sums of parts, over blocks and, of w, over the batch ----

constexpr int kSumColumns = 4 * kWarp, kSumThreads = 1024;  // of a block, at most

struct Parts {
  const void* parts = nullptr;  // (rows,columns) of fp32
  void* sums = nullptr;         // (columns) of T
  int64_t rows = 0, columns = 0;
};

struct SumParts {
  Parts w, queries;
};

template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_parts(const SumParts all) {
  Carver from{shared_memory()};
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  float* sums = from.take<float>(warps * kSumColumns);
  const int64_t w_blocks = ceil_div(all.w.columns, kSumColumns), block = blockIdx.x;
  const bool is_w = block < w_blocks;
  const Parts g = is_w ? all.w : all.queries;
  const int64_t c0 = (is_w ? block : block - w_blocks) * kSumColumns;
  const float* parts = static_cast<const float*>(g.parts);
  constexpr int W = 4;  // rows whose loads are in flight
  float sum[4] = {};
#pragma unroll 1
  for (int64_t from = warp; from < g.rows; from += kRun * W * warps) {
    const int64_t end = smaller(g.rows, from + kRun * W * warps);
    float run_sum[4] = {};
#pragma unroll 1
    for (int64_t first = from; first < end; first += W * warps) {
      float part[W][4];
      unrolled<W, 4>([&](int k, int u) {
        part[k][u] = parts[smaller(first + k * warps, g.rows - 1) * g.columns +
                           smaller(c0 + u * kWarp + lane, g.columns - 1)];
      });
      unrolled<W, 4>(
          [&](int k, int u) { run_sum[u] += first + k * warps < g.rows ? part[k][u] : 0.0f; });
    }
    unrolled<4>([&](int u) { sum[u] += run_sum[u]; });
  }
  unrolled<4>([&](int u) { sums[warp * kSumColumns + u * kWarp + lane] = sum[u]; });
  __syncthreads();
  const int64_t c = c0 + threadIdx.x;
  if (threadIdx.x >= kSumColumns || c >= g.columns) return;
  float total = 0;
  for (int k = 0; k < warps; ++k) total += sums[k * kSumColumns + threadIdx.x];
  narrow(total, static_cast<T*>(g.sums) + c);
}

}  // namespace bahdanau_fast::gpu

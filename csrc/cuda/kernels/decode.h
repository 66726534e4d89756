// Forward for few queries, a decoder step or its beams: everything in one launch.
//
//   score[b,i,j] = w . tanh(query[b,i] + key[b,j]),  weights = softmax over j < key_count[b,i]
//   context[b,i] = sum_j dropout(weights)[b,i,j] value[b,j]
//
//   queries (B,Tq,H), keys (B,Tk,H), values (B,Tk,Dv), w (H): T; context (B,Tq,Dv): T;
//   weights (B,Tq,Tk): fp32; or queries (B,Tq,Dq) and W_q (H,Dq), projected in the same launch
//
// A block is (batch row, split of its keys). Its warps take keys in turn; lanes hold neighbouring
// hidden units, then neighbouring columns of the values, 16 bytes at a time (`vectors`), or number
// by number where rows are not aligned so: a plain kernel, which projects nothing. Reads the keys
// and values of the split once for up to four queries, (H + Dv) numbers for each key; further
// queries read them from the caches. Splits compute sums relative to their own maximum; the last
// block of a batch row to finish combines them, in the order of the splits.
#pragma once

#include "decode_plan.h"
#include "tanh.h"

namespace bahdanau_fast::gpu {

template <class T, int QT, bool vectors>
struct DecodeTask {
  static constexpr int U = kVector<T>;
  static constexpr int KU = QT == 1 ? 4 : sizeof(T) == 2 ? 2 : 1;  // keys of a warp at a time
  const DecodeForward& d;
  const Problem& p;
  DecodeShared<T, QT> mine;
  int64_t b, s, j0, n;
  int lane, warp;

  __device__ explicit DecodeTask(const DecodeForward& all)
      : d(all), p(all.p), mine(shared_memory(), all) {
    b = blockIdx.x / d.splits;
    s = blockIdx.x % d.splits;
    j0 = s * d.split;
    n = smaller(d.split, p.Tk - j0);
    lane = threadIdx.x % kWarp;
    warp = threadIdx.x / kWarp;
  }

  __device__ bool uniform(int64_t i) const { return mine.counts[i] < 0; }
  __device__ int64_t count(int64_t i) const {
    return mine.counts[i] < 0 ? -1 - mine.counts[i] : mine.counts[i];
  }
  __device__ void count_keys() {
    for (int64_t i = warp; i < p.Tq; i += kDecodeWarps) {
      const int64_t valid = key_count(p, b, i);
      if (lane == 0) mine.counts[i] = valid == 0 ? -1 - n : larger(0, smaller(valid - j0, n));
    }
  }

  // W_q q of queries [i0, i0 + QT) into shared memory; a warp computes one hidden unit at a time.
  // Each block reads all of W_q, all but the first from the caches.
  __device__ void project_queries(int64_t i0) {
    const T* rows[QT];  // past the last query, the last
#pragma unroll
    for (int q = 0; q < QT; ++q) rows[q] = row_at<T>(p.queries, b, smaller(i0 + q, p.Tq - 1));
    for (int64_t h = warp; h < p.H; h += kDecodeWarps) {
      float sums[QT] = {};
      for (int64_t c = lane * U; c < d.Dq; c += kWarp * U) {
        float weight[U], query[U];
        load_units<T, true>(static_cast<const T*>(d.w_q) + h * d.Dq, c, d.Dq, weight);
#pragma unroll
        for (int q = 0; q < QT; ++q) {
          load_units<T, true>(rows[q], c, d.Dq, query);
#pragma unroll
          for (int k = 0; k < U; ++k) sums[q] += weight[k] * query[k];
        }
      }
      const float sum = warp_sums<QT>(sums, lane);
      constexpr int each = kWarp / QT;
      if (lane % each == 0) mine.queries[lane / each * mine.width + h] = sum;
    }
    __syncthreads();
  }

  // The same, together with the other blocks of the cluster: each computes a share of the hidden
  // units, two at a time in a warp, for the queries of all blocks, and writes them to the shared
  // memory of those. So W_q is read once for each cluster.
  __device__ void project_for_cluster(int64_t i0) {
    constexpr int units = 2, most = 8;  // blocks of a cluster
    constexpr int each = kWarp / (most * units);
    const int blocks = cluster_size(), rank = cluster_rank();
    const T* w_q = static_cast<const T*>(d.w_q);
    cluster_barrier();  // every block has started, and is done with the last queries
    const int64_t step = blocks * kDecodeWarps * units;
    int64_t offsets[most];  // of the queries of the cluster's blocks: a division is slow
#pragma unroll
    for (int m = 0; m < most; ++m) {
      const uint32_t block = blockIdx.x - rank + smaller(m, blocks - 1);
      offsets[m] = smaller(block / uint32_t(d.splits), p.B - 1) * p.queries.batch_stride;
    }
    for (int64_t i = i0; i < smaller(i0 + QT, p.Tq); ++i) {
      const T* first = static_cast<const T*>(p.queries.data) + i * p.queries.row_stride;
      for (int64_t h0 = (rank * kDecodeWarps + warp) * units; h0 < p.H; h0 += step) {
        float sums[most * units] = {};
        for (int64_t c = lane * U; c < d.Dq; c += kWarp * U) {
          float weight[units][U];
#pragma unroll
          for (int x = 0; x < units; ++x)
            load_units<T, true>(w_q + smaller(h0 + x, p.H - 1) * d.Dq, c, d.Dq, weight[x]);
#pragma unroll
          for (int m = 0; m < most; ++m) {
            float query[U];
            load_units<T, true>(first + offsets[m], c, d.Dq, query);
#pragma unroll
            for (int x = 0; x < units; ++x)
#pragma unroll
              for (int k = 0; k < U; ++k) sums[m * units + x] += weight[x][k] * query[k];
          }
        }
        const float sum = warp_sums<most * units>(sums, lane);
        const int target = lane / each / units;
        const int64_t h = h0 + lane / each % units;
        float* place = mine.queries + (i - i0) * mine.width + h;
        if (lane % each == 0 && target < blocks && h < p.H) *in_block(place, target) = sum;
      }
    }
    cluster_barrier();
  }

  __device__ void project(int64_t i0) {
    cluster_size() > 1 ? project_for_cluster(i0) : project_queries(i0);
  }

  // True in a block past the last, which only completes a cluster, after its share of the
  // projection.
  __device__ bool helped() {
    if (b < p.B) return false;
    for (int64_t i0 = 0; i0 < p.Tq; i0 += QT) project(i0);
    return true;
  }

  // Queries [i0, i0 + QT) and w into shared memory. True if the queries are exponentials there.
  __device__ bool load_queries(int64_t i0, bool may_exponentiate = true) {
    if constexpr (vectors)
      if (d.w_q != nullptr) project(i0);
    float largest = 0, largest_w = 0;
    for (int64_t at = threadIdx.x; at < QT * mine.width; at += kDecodeThreads) {
      const int64_t i = i0 + at / mine.width, h = at % mine.width;
      float a = 0;
      if (i < p.Tq && h < p.H)
        a = d.w_q != nullptr ? mine.queries[at] : widen(row_at<T>(p.queries, b, i)[h]);
      mine.queries[at] = a;
      largest = fabs(a) > largest || a != a ? fabs(a) : largest;
    }
    for (int64_t h = threadIdx.x; h < mine.width; h += kDecodeThreads) {
      const float x = h < p.H ? widen(static_cast<const T*>(p.w)[h]) : 0.0f;
      mine.w[h] = x;
      largest_w = fabs(x) > largest_w || x != x ? fabs(x) : largest_w;
    }
    bool exponentials = false;
    if constexpr (QT > 1 && sizeof(T) == 2) {
      if (may_exponentiate) {
        largest = block_max(largest, mine.scratch);
        largest_w = block_max(largest_w, mine.scratch);
        exponentials = largest <= kClamped && largest_w <= kLargestW;
      }
      for (int64_t at = threadIdx.x; exponentials && at < QT * mine.width; at += kDecodeThreads)
        mine.queries[at] = exp_of_two(mine.queries[at]);
    }
    __syncthreads();
    return exponentials;
  }

  template <bool exponentials>
  __device__ __forceinline__ void score_keys(int64_t i0, int64_t keys) {
    float sum_w = 0;
    if (exponentials)
      for (int64_t h = lane * U; h < p.H; h += kWarp * U)
#pragma unroll
        for (int k = 0; k < U; ++k) sum_w += mine.w[h + k];
    for (int64_t first = warp * KU; first < keys; first += kDecodeWarps * KU) {
      float sums[KU * QT];
#pragma unroll
      for (int k = 0; k < KU * QT; ++k) sums[k] = sum_w;
      for (int64_t h = lane * U; h < p.H; h += kWarp * U) {
        float key[KU][U];
#pragma unroll
        for (int k = 0; k < KU; ++k)
          load_units<T, vectors>(row_at<T>(p.keys, b, j0 + smaller(first + k, keys - 1)), h, p.H,
                                 key[k]);
        const float* w = mine.w + h;
#pragma unroll
        for (int k = 0; k < KU; ++k)
#pragma unroll
          for (int u = 0; u < U; u += 4)
            add_four<exponentials>(h + u, key[k] + u, w + u, sums + k * QT);
      }
      const float sum = warp_sums<KU * QT>(sums, lane);
      constexpr int each = kWarp / (KU * QT);
      const int64_t j = first + lane / each / QT, i = i0 + lane / each % QT;
      if (lane % each == 0 && j < keys && i < p.Tq)
        mine.scores[i * d.split + j] = sees(p, b, i, j0 + j) ? sum : -INFINITY;
    }
  }

  // What four hidden units of a key add to its scores.
  template <bool exponentials>
  __device__ __forceinline__ void add_four(int64_t h, const float* key, const float* w,
                                           float* sums) {
    float e[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) e[x] = exponentials ? exp_of_key(key[x]) : key[x];
#pragma unroll
    for (int q = 0; q < QT; ++q) {
      const float* query = mine.queries + q * mine.width + h;
      if constexpr (exponentials) {
        sums[q] -= 2.0f * sum_of_four_fractions(query, e, w);
      } else {
        const float x[4] = {query[0] + e[0], query[1] + e[1], query[2] + e[2], query[3] + e[3]};
        sums[q] += sum_of_four_tanh<T>(x, w);
      }
    }
  }

  __device__ void score() {
    for (int64_t i0 = 0; i0 < p.Tq; i0 += QT) {
      __syncthreads();
      const bool exponentials = load_queries(i0);
      int64_t keys = 0;
      for (int64_t i = i0; i < smaller(i0 + QT, p.Tq); ++i)
        if (!uniform(i)) keys = larger(keys, count(i));
      if constexpr (QT > 1 && sizeof(T) == 2) {
        if (exponentials) {
          score_keys<true>(i0, keys);
          continue;
        }
      }
      score_keys<false>(i0, keys);
    }
    __syncthreads();
  }

  // A warp per query: from scores to dropped-out weights, unnormalised if there are several splits.
  __device__ void softmax() {
    const Dropout dropout(p);
    for (int64_t i = warp; i < p.Tq; i += kDecodeWarps) {
      float* row = mine.scores + i * d.split;
      const int64_t keys = count(i), at = b * p.Tq + i;
      if (uniform(i))
        for (int64_t j = lane; j < n; j += kWarp) row[j] = 0.0f;
      float best = -INFINITY, total = 0;
      for (int64_t j = lane; j < keys; j += kWarp)
        best = row[j] > best || row[j] != row[j] ? row[j] : best;
      best = warp_max(best);
      for (int64_t j = lane; j < keys; j += kWarp) {
        if (d.splits > 1 && d.weights != nullptr)
          static_cast<float*>(d.weights)[at * p.Tk + j0 + j] = row[j];
        row[j] = odds(row[j], best);
        total += row[j];
      }
      total = warp_sum(total);
      if (lane == 0) mine.totals[i] = total;
      if (d.splits > 1 && lane == 0) {
        static_cast<float*>(d.maxima)[at * d.splits + s] = best;
        static_cast<float*>(d.sums)[at * d.splits + s] = total;
      }
      for (int64_t j = lane; j < n; j += kWarp) {
        float x = j < keys ? row[j] : 0.0f;
        if (d.splits == 1) {
          if (j < keys) x = x / total;
          if (d.weights != nullptr) static_cast<float*>(d.weights)[at * p.Tk + j] = x;
        }
        row[j] = x * dropout.factor(at, j0 + j);
      }
    }
    __syncthreads();
  }

  __device__ void weigh_values() {
    constexpr int columns = kWarp * U;
    for (int64_t i0 = 0; i0 < p.Tq; i0 += QT) {
      int64_t keys = 0;
      for (int64_t i = i0; i < smaller(i0 + QT, p.Tq); ++i) keys = larger(keys, count(i));
      for (int64_t c0 = 0; c0 < p.Dv; c0 += columns) {
        float sums[QT][U] = {};
        const int64_t c = c0 + lane * U;
        if (c < p.Dv) {
          constexpr int V = QT == 1 ? 4 : 2;  // values of a warp at a time
          for (int64_t first = warp; first < keys; first += V * kDecodeWarps) {
            float value[V][U];
#pragma unroll
            for (int v = 0; v < V; ++v)
              load_units<T, vectors>(
                  row_at<T>(p.values, b, j0 + smaller(first + v * kDecodeWarps, keys - 1)), c, p.Dv,
                  value[v]);
#pragma unroll
            for (int v = 0; v < V; ++v) {
              const int64_t j = first + v * kDecodeWarps;
#pragma unroll
              for (int q = 0; q < QT; ++q) {
                const float weight =
                    j < keys ? mine.scores[smaller(i0 + q, p.Tq - 1) * d.split + j] : 0.0f;
#pragma unroll
                for (int k = 0; k < U; ++k) sums[q][k] += weight * value[v][k];
              }
            }
          }
        }
#pragma unroll
        for (int q = 0; q < QT; ++q)
#pragma unroll
          for (int k = 0; k < U; ++k)
            mine.parts[(warp * QT + q) * columns + lane * U + k] = sums[q][k];
        __syncthreads();
        for (int at = threadIdx.x; at < QT * columns; at += kDecodeThreads) {
          const int64_t i = i0 + at / columns, column = c0 + at % columns;
          if (i >= p.Tq || column >= p.Dv) continue;
          float sum = 0;
          for (int k = 0; k < kDecodeWarps; ++k) sum += mine.parts[k * QT * columns + at];
          store_context(i, column, sum);
        }
        __syncthreads();
      }
    }
  }

  // From the scores to the results of the block.
  __device__ void finish() {
    softmax();
    weigh_values();
    join();
  }

  __device__ void join() {
    if (d.splits > 1 && is_last()) combine();
  }

  // A column of the context of query i, summed over the keys of the block.
  __device__ void store_context(int64_t i, int64_t column, float sum) {
    const int64_t row = b * p.Tq + i;
    if (d.splits == 1)
      narrow(sum, static_cast<T*>(d.context) + row * p.Dv + column);
    else
      static_cast<float*>(d.contexts)[(row * d.splits + s) * p.Dv + column] = sum;
  }

  // True in the block of a batch row that finishes last, which can then read what the others wrote.
  __device__ bool is_last() {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *mine.last = atomicAdd(d.arrived + b, 1u) == unsigned(d.splits - 1);
      __threadfence();
      if (*mine.last) atomicExch(d.arrived + b, 0u);  // zero for the next launch
    }
    __syncthreads();
    return *mine.last != 0;
  }

  __device__ void combine() {
    for (int64_t i = 0; i < p.Tq; ++i) {
      const int64_t row = b * p.Tq + i;
      const float* maxima = static_cast<const float*>(d.maxima) + row * d.splits;
      float best = maxima[0], total = 0;
      for (int64_t k = 1; k < d.splits; ++k)
        best = maxima[k] > best || maxima[k] != maxima[k] ? maxima[k] : best;
      __syncthreads();
      for (int64_t k = threadIdx.x; k < d.splits; k += kDecodeThreads)
        mine.parts[k] = odds(maxima[k], best);
      __syncthreads();
      for (int64_t k = 0; k < d.splits; ++k)
        total += static_cast<const float*>(d.sums)[row * d.splits + k] * mine.parts[k];
      for (int64_t c = threadIdx.x; c < p.Dv; c += kDecodeThreads) {
        float sum = 0;
        for (int64_t k = 0; k < d.splits; ++k)
          sum += static_cast<const float*>(d.contexts)[(row * d.splits + k) * p.Dv + c] *
                 mine.parts[k];
        narrow(sum / total, static_cast<T*>(d.context) + row * p.Dv + c);
      }
      if (d.weights == nullptr) continue;
      const int64_t valid = key_count(p, b, i), keys = valid == 0 ? p.Tk : valid;
      float* weights = static_cast<float*>(d.weights) + row * p.Tk;
      constexpr int W = 8;  // loads in flight
      for (int64_t first = threadIdx.x; first < p.Tk; first += W * kDecodeThreads) {
        float score[W];
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const int64_t j = first + k * kDecodeThreads;
          score[k] = j < keys ? weights[j] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const int64_t j = first + k * kDecodeThreads;
          if (j < p.Tk) weights[j] = j < keys ? expf(score[k] - best) / total : 0.0f;
        }
      }
    }
  }
};

template <class T, int QT, bool vectors>
__global__ void __launch_bounds__(kDecodeThreads, QT == 1 && sizeof(T) == 2 ? 2 : 1)
    decode_forward(const DecodeForward d) {
  DecodeTask<T, QT, vectors> task(d);
  if (task.helped()) return;
  task.count_keys();
  task.score();
  task.finish();
}

}  // namespace bahdanau_fast::gpu

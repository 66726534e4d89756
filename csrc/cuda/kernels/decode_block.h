// What a block of decode.h begins with: the rings of its warps, and what is the same for all keys.
#pragma once

#include "decode_plan.h"
#include "tanh.h"

namespace bahdanau_fast::gpu {

template <class T, int QT, int floats, bool vectors>
struct DecodeBlock {
  using Sizes = DecodeSizes<T, QT, floats>;
  static constexpr int U = Sizes::U, KU = Sizes::KU, N = KU * QT;
  static constexpr int lanes_per_score = kWarp / N;  // of a stage: (key, query)
  static constexpr int warp_columns = kWarp * U;     // that its lanes have at a time
  const DecodeForward& d;
  const Problem& p;
  const DecodeLayout& sizes;
  const DecodeShared smem;
  int64_t b, i0 = 0, c0 = 0, j0, s;
  const T *next_key, *next_value;  // where the lane copies from next
  int n, columns, lane, warp;      // n keys in the split; columns of the values in the group
  int keys = 0;                    // that a query sees, of those
  float half_w = 0;                // half the sum of w, as score() takes it

  __device__ explicit DecodeBlock(const DecodeForward& all)
      : d(all), p(all.p), sizes(all.layout), smem{all.layout} {
    const unsigned row = blockIdx.x / unsigned(d.splits);  // of 64 bits it is slow
    s = blockIdx.x - row * unsigned(d.splits);
    b = row;
    if (d.column_groups > 1) {
      b = row / unsigned(d.column_groups);
      c0 = (row - b * d.column_groups) * Sizes::columns;
    }
    if (d.query_groups > 1) {
      const unsigned query_row = unsigned(b);
      b = query_row / unsigned(d.query_groups);
      i0 = (query_row - b * d.query_groups) * QT;
    }
    j0 = s * d.split;
    n = int(larger(0, smaller(d.split, p.Tk - j0)));
    columns = int(smaller(Sizes::columns, p.Dv - c0));
    lane = threadIdx.x % kWarp;
    warp = threadIdx.x / kWarp;
    next_key = row_at<T>(p.keys, b, j0 + warp * KU) + lane * U;
    next_value = row_at<T>(p.values, b, j0 + warp * KU) + c0 + lane * U;
  }

  // ---- the ring ----

  __device__ T* stage(int slot) const {
    return reinterpret_cast<T*>(smem.rings + warp * sizes.warp_bytes) + slot * sizes.stage;
  }
  // The first key of a stage.
  __device__ int first_of(int t) const { return (t * d.warps + warp) * KU; }

  // The lane's piece of a row; `left` numbers from there on.
  static __device__ __forceinline__ void copy_piece(T* to, const T* from, int left) {
    if constexpr (vectors) {
      if (left > 0) copy16(to, from);
    } else {
      unrolled<U>([&](int u) {
        if (left > 0) to[u] = u < left ? from[u] : T{};
      });
    }
  }

  // Begins to copy the keys of stage t, and their values; past the last key, that one again.
  __device__ __forceinline__ void fill(int t, T* to) {
    if (first_of(t) < n) {
      const T *key = next_key, *value = next_value;
      to += lane * U;
      unrolled<KU>([&](int k) {
        if (k > 0 && first_of(t) + k < n) {
          key += p.keys.row_stride;
          value += p.values.row_stride;
        }
        constexpr int most = vectors ? 4 : 1;
        unrolled<most>([&](int c) {
          copy_piece(to + c * warp_columns, key + c * warp_columns,
                     int(p.H) - lane * U - c * warp_columns);
        });
        for (int c = most * warp_columns; c < p.H; c += warp_columns)
          copy_piece(to + c, key + c, int(p.H) - lane * U - c);
        unrolled<floats / U>([&](int c) {
          copy_piece(to + sizes.width + c * warp_columns, value + c * warp_columns,
                     columns - lane * U - c * warp_columns);
        });
        to += sizes.width + sizes.values;
      });
      next_key += d.warps * KU * p.keys.row_stride;
      next_value += d.warps * KU * p.values.row_stride;
    }
    commit_copies();
  }

  // ---- what is the same for all keys ----

  // W_q q into shared memory, together with the other blocks of the cluster, at most `most`: a
  // block computes a share of the hidden units, two at a time in a warp, for the query of every
  // block, and writes them to their shared memory. So W_q is read once per cluster.
  template <int most>
  __device__ void project() {
    constexpr int units = 2, lanes_per_sum = kWarp / (most * units);
    const int blocks = cluster_size(), rank = cluster_rank();
    const T* w_q = static_cast<const T*>(d.w_q);
    relaxed_cluster_barrier();  // every block has started
    int64_t offsets[most];      // of the queries of the cluster's blocks: a division is slow
    unrolled<most>([&](int m) {
      const uint32_t block = blockIdx.x - rank + smaller(m, blocks - 1);
      const uint32_t row_of_block = block / uint32_t(d.splits) / uint32_t(d.column_groups);
      offsets[m] = smaller(row_of_block, p.B - 1) * p.queries.batch_stride;
    });
    const T* first = static_cast<const T*>(p.queries.data);
    for (int h0 = (rank * d.warps + warp) * units; h0 < p.H; h0 += blocks * d.warps * units) {
      float sums[most * units] = {};
      for (int64_t c = lane * U; c < d.Dq; c += warp_columns) {
        float weight[units][U];
        unrolled<units>([&](int x) {
          load_units<T, true>(w_q + smaller(h0 + x, p.H - 1) * d.Dq, c, d.Dq, weight[x]);
        });
        unrolled<most>([&](int m) {
          float query[U];
          load_units<T, true>(first + offsets[m], c, d.Dq, query);
          unrolled<units, U>([&](int x, int k) { sums[m * units + x] += weight[x][k] * query[k]; });
        });
      }
      const float sum = warp_sums<most * units>(sums, lane);
      const int target = lane / lanes_per_sum / units, h = h0 + lane / lanes_per_sum % units;
      if (lane % lanes_per_sum == 0 && target < blocks && h < p.H)
        *in_block(smem.queries + h, target) = sum;
    }
    cluster_barrier();
  }

  // True in a block past the last, which only completes a cluster, after its share of the work.
  __device__ bool helps() {
    if constexpr (vectors && QT == 1)
      if (d.w_q != nullptr) cluster_size() > 1 ? project<8>() : project<1>();
    return b >= p.B;
  }

  __device__ bool uniform(int q) const { return smem.counts[q] < 0; }
  __device__ int count(int q) const {
    return smem.counts[q] < 0 ? -1 - smem.counts[q] : smem.counts[q];
  }

  // How many keys the queries have, and which of them the mask shows. A warp counts for a query.
  __device__ void count_keys() {
    for (int q = warp; q < QT; q += d.warps) {
      const int64_t valid = i0 + q < p.Tq ? key_count(p, b, i0 + q) : 0;
      const int in_split = int(larger(0, smaller(valid - j0, n)));
      if (lane == 0) smem.counts[q] = i0 + q >= p.Tq ? 0 : valid == 0 ? -1 - n : in_split;
      if (lane == 0 && s == 0 && c0 == 0 && i0 + q < d.counts_row)
        d.counts[b * d.counts_row + i0 + q] = int32_t(valid);
    }
    if (p.mask.data == nullptr) return;
    for (int q = 0; q < QT && i0 + q < p.Tq; ++q)
      for (int j = threadIdx.x; j < n; j += blockDim.x)
        smem.seen[q * d.split + j] = sees(p, b, i0 + q, j0 + j);
  }

  // Queries and w as score() takes them, zero past the last; true if those are exponentials.
  __device__ bool load_queries() {
    const int units = int(p.H), last = int(smaller(QT, p.Tq - i0)) - 1;
    const T* rows[QT];
    unrolled<QT>([&](int q) { rows[q] = row_at<T>(p.queries, b, i0 + (q < last ? q : last)); });
    float largest = 0, largest_w = 0, sum_w = 0;
#pragma unroll 4
    for (int h = threadIdx.x; h < sizes.width; h += blockDim.x) {
      const int index = h < units ? h : units - 1;
      float x = widen(read_only(static_cast<const T*>(p.w) + index)), a[QT];
      x = h < units ? x : 0.0f;
      unrolled<QT>([&](int q) {
        a[q] =
            QT == 1 && d.w_q != nullptr ? smem.queries[index] : widen(read_only(rows[q] + index));
        a[q] = q <= last && h < units ? a[q] : 0.0f;
      });
      largest_w = larger_or_nan(largest_w, fabs(x));
      smem.w[h] = sizeof(T) == 2 ? kSmallW * x : x;
      sum_w += smem.w[h];
      unrolled<QT>([&](int q) {
        smem.queries[q * sizes.width + h] = sizeof(T) == 2 ? 2.0f * kLog2e * a[q] : a[q];
        largest = larger_or_nan(largest, fabs(a[q]));
      });
    }
    bool exponentials = false;
    if constexpr (QT > 1 && sizeof(T) == 2) {
      const auto max = [](float x) { return warp_max(x); };
      largest = over_block(largest, 0.0f, smem.scratch, max);
      largest_w = over_block(largest_w, 0.0f, smem.scratch, max);
      exponentials = largest <= kClamped && largest_w <= kLargestW;
      for (int k = threadIdx.x; exponentials && k < QT * sizes.width; k += blockDim.x)
        smem.queries[k] = exp2_approx(smem.queries[k]);
    }
    sum_w = warp_sum(0.5f * sum_w);
    if (lane == 0) smem.sums[warp] = sum_w;
    __syncthreads();
    unrolled<kMostWarps>([&](int k) { half_w += k < d.warps ? smem.sums[k] : 0.0f; });
    for (int q = 0; q < QT; ++q) keys = int(larger(keys, count(q)));
    return exponentials;
  }
};

}  // namespace bahdanau_fast::gpu

// Forward for few queries, a decoder step or its beams: everything in one launch.
//
//   score[b,i,j] = w . tanh(query[b,i] + key[b,j]),  weights = softmax over j < key_count[b,i]
//   context[b,i] = sum_j dropout(weights)[b,i,j] value[b,j]
//
//   queries (B,Tq,H), keys (B,Tk,H), values (B,Tk,Dv), w (H): T; context (B,Tq,Dv): T;
//   weights (B,Tq,Tk): fp32 or T; or queries (B,Tq,Dq) and W_q (H,Dq), projected in the same launch
//
// A block is (batch row, up to QT queries, columns of the values, split of the keys). Its warps
// take a few keys in turn and have rings of stages in shared memory for them, which they fill
// by asynchronous copies before anything else is read: where they lie depends on the split alone. A
// lane copies the pieces of 16 bytes that it reads, so that a stage needs a wait and no barrier.
// Where rows are not aligned so, lanes copy number by number (`vectors` is false), and nothing is
// projected. Every warp has the softmax of its keys: their largest score so far, and sums relative
// to it. At the end the warps are reduced, in their order. Where a row has 2, 4 or 8 splits they
// are neighbours in a cluster, and all their warps are reduced in shared memory: a block writes a
// share of the columns, and the weights of its keys. More splits than a cluster has, or splits on a
// GPU without clusters, are left in memory for combine_splits. Reads (H + Dv) numbers per key.
#pragma once

#include "decode_block.h"

namespace bahdanau_fast::gpu {

template <class T, int QT, int floats, bool vectors>
struct DecodeTask : DecodeBlock<T, QT, floats, vectors> {
  using Base = DecodeBlock<T, QT, floats, vectors>;
  using Base::b, Base::c0, Base::columns, Base::count, Base::d, Base::lanes_per_score, Base::fill,
      Base::first_of, Base::half_w, Base::i0, Base::j0, Base::keys, Base::KU, Base::lane,
      Base::smem, Base::N, Base::n, Base::p, Base::warp_columns, Base::s, Base::sizes, Base::stage,
      Base::U, Base::uniform, Base::warp;
  using typename Base::Sizes;

  __device__ explicit DecodeTask(const DecodeForward& all) : Base(all) {}

  // ---- keys ----

  // The lane's score of the keys of a stage (warp_sums). In 16 bits from the sum of w / d (tanh.h).
  template <bool exponentials>
  __device__ __forceinline__ float score(const T* keys_of_stage) const {
    float sums[N] = {};
    for (int h = lane * U; h < sizes.width; h += warp_columns) {
      float key[KU][U];
      unrolled<KU>([&](int k) {
        unpack<T>(bytes_at(keys_of_stage + k * (sizes.width + sizes.values) + h), key[k]);
        if constexpr (exponentials) unrolled<U>([&](int u) { key[k][u] = exp_of_key(key[k][u]); });
      });
#pragma unroll
      for (int u = 0; u < U; u += 4) {
        float w[4];
        load_four(smem.w + h + u, w);
        unrolled<QT>([&](int q) {
          float query[4];
          load_four(smem.queries + q * sizes.width + h + u, query);
          unrolled<KU>(
              [&](int k) { add_four<T, exponentials>(query, key[k] + u, w, &sums[k * QT + q]); });
        });
      }
    }
    const float sum = warp_sums<N>(sums, lane);
    if constexpr (sizeof(T) != 2) return sum;
    return 2.0f / kSmallW * (half_w - (exponentials ? 1.0f : kShrunk) * sum);
  }

  // All keys of the warp, into the scores and the warp's part of the context.
  template <bool exponentials>
  __device__ __forceinline__ void score_keys() {
    const Dropout dropout(p);
    const int index = lane / lanes_per_score, q = index % QT, end = count(q);  // of its scores
    const bool is_uniform = uniform(q), stores = lane % lanes_per_score == 0 && i0 + q < p.Tq;
    float* scores = smem.scores + q * d.split;
    const bool* seen = p.mask.data != nullptr && !is_uniform ? smem.seen + q * d.split : nullptr;
    float best = kLowest, total = 0, context[QT][floats] = {};
#pragma unroll 1
    for (int t = 0, slot = 0; first_of(t) < keys; ++t, slot = slot + 1 < kStages ? slot + 1 : 0) {
      wait_for_copies<kStages - 1>();
      T* staged = stage(slot);
      const int j = first_of(t) + index / QT;
      float x = score<exponentials>(staged);
      if (is_uniform) x = 0;
      if (j >= end || (seen != nullptr && !seen[j])) x = -INFINITY;
      if (stores && j < n) scores[j] = x;
      float top = larger_or_nan(best, x);
#pragma unroll
      for (int offset = lanes_per_score * QT; offset < kWarp; offset *= 2)
        top = larger_or_nan(top, __shfl_xor_sync(kAllLanes, top, offset));
      if (QT == 1 ? top != best : any_lane(top != best)) {
        const float factor = exp_of<T>(best - top);
        best = top;
        total *= factor;
        unrolled<QT>([&](int q) {
          const float query_factor = __shfl_sync(kAllLanes, factor, q * lanes_per_score);
          unrolled<floats>([&](int c) { context[q][c] *= query_factor; });
        });
      }
      float weight = exp_of<T>(x - best);
      total += weight;
      if (dropout.on) weight *= dropout.factor(b * p.Tq + i0 + q, j0 + j);
      weigh_values(staged + sizes.width + lane * U, keys - first_of(t), weight, context);
      fill(t + kStages, staged);
    }
    store_partials(best, total, context);
  }

  // Adds the values of a stage, times the weights that the lanes have, but for those past the last
  // key of any query, which may be anything.
  __device__ __forceinline__ void weigh_values(const T* values, int left, float weight,
                                               float (&context)[QT][floats]) const {
#pragma unroll
    for (int k = 0; k < KU; ++k) {
      if (k >= left) break;
      float query_weight[QT];
      unrolled<QT>([&](int q) {
        query_weight[q] = __shfl_sync(kAllLanes, weight, (k * QT + q) * lanes_per_score);
      });
#pragma unroll
      for (int c = 0; c < floats / U; ++c) {
        if (c * warp_columns >= columns - lane * U) continue;
        float value[U];
        unpack<T>(bytes_at(values + k * (sizes.width + sizes.values) + c * warp_columns), value);
        unrolled<QT, U>([&](int q, int u) { context[q][c * U + u] += query_weight[q] * value[u]; });
      }
    }
  }

  // The warp's partial result, where its ring was.
  __device__ void store_partials(float best, float total, const float (&context)[QT][floats]) {
    wait_for_copies<0>();
    __syncthreads();
    float* part = reinterpret_cast<float*>(smem.rings + warp * sizes.warp_bytes);
#pragma unroll
    for (int q = 0; q < QT; ++q)
#pragma unroll
      for (int c = 0; c < floats; c += 4)
        store_four(&context[q][c],
                   part + q * Sizes::columns + c / U * warp_columns + lane * U + c % U);
#pragma unroll
    for (int offset = lanes_per_score * QT; offset < kWarp; offset *= 2)
      total += __shfl_xor_sync(kAllLanes, total, offset);
    if (lane % lanes_per_score == 0 && lane / lanes_per_score < QT) {
      smem.maxima[warp * QT + lane / lanes_per_score] = best;
      smem.sums[warp * QT + lane / lanes_per_score] = total;
    }
  }

  // ---- the warps' partial results ----

  __device__ void reduce_warps() {
    const bool apart = d.contexts != nullptr;  // the splits of a row do not meet here
    const int blocks = apart ? 1 : int(d.splits), share = apart ? 0 : int(s);
    const int first = cluster_rank() - share, width = apart ? (columns + 3) / 4 * 4 : columns;
    const auto remote = [&](auto* x, int m) { return blocks > 1 ? in_block(x, first + m) : x; };
    if (blocks > 1)
      cluster_barrier();
    else
      __syncthreads();
    const int block = lane / kMostWarps, part = lane % kMostWarps * QT;  // of a lane's warp
    const bool in_bounds = block < blocks && lane % kMostWarps < d.warps;
#pragma unroll 1
    for (int q = 0; q < QT && i0 + q < p.Tq; ++q) {
      const float top = in_bounds ? remote(smem.maxima + part + q, block)[0] : kLowest;
      float total = in_bounds ? remote(smem.sums + part + q, block)[0] : 0.0f;
      const float best = warp_max(top), factor = exp_of<T>(top - best);
      total = warp_sum(factor * total);
      const int64_t row = b * p.Tq + i0 + q, part_row = row * d.splits + s;
#pragma unroll 1
      for (int from = (share * d.warps + warp) * kWarp; from < width;
           from += blocks * d.warps * kWarp) {
        const int c = from + lane;
        const float sum = sum_of_warps(q, c, factor, blocks, remote);
        if (c >= width) continue;
        if (apart)
          static_cast<float*>(d.contexts)[part_row * d.width + c0 + c] = sum;
        else
          narrow(over<T>(sum, total), static_cast<T*>(d.context) + row * p.Dv + c0 + c);
      }
      if (c0 > 0) continue;
      if (apart && threadIdx.x == 0) {
        static_cast<float*>(d.maxima)[part_row] = best;
        static_cast<float*>(d.sums)[part_row] = total;
      }
      if (d.weights == nullptr) continue;
      const int64_t first_weight = row * p.Tk + j0;
      for (int j = threadIdx.x; j < n; j += blockDim.x) {
        const float x = j < count(q) ? smem.scores[q * d.split + j] : -INFINITY;
        if (apart)
          static_cast<float*>(d.scores)[first_weight + j] = x;
        else
          store_weight<T>(d, over<T>(exp_of<T>(x - best), total), first_weight + j);
      }
    }
    // No block ends while another reads its shared memory.
    if (blocks > 1) relaxed_cluster_barrier();
  }

  // Column c of the context of a query, over the warps of the blocks; `factor` is of a lane's warp.
  template <class Remote>
  __device__ __forceinline__ float sum_of_warps(int q, int c, float factor, int blocks,
                                                const Remote& remote) const {
    float sum = 0;
#pragma unroll 2
    for (int m = 0; m < blocks; ++m) {
      const char* from = remote(smem.rings + (q * Sizes::columns + c) * int(sizeof(float)), m);
      float parts[kMostWarps], block_sum = 0;
      unrolled<kMostWarps>([&](int k) {
        parts[k] =
            k < d.warps ? *reinterpret_cast<const float*>(from + k * sizes.warp_bytes) : 0.0f;
      });
      unrolled<kMostWarps>([&](int k) {
        block_sum += __shfl_sync(kAllLanes, factor, m * kMostWarps + k) * parts[k];
      });
      sum += block_sum;
    }
    return sum;
  }
};

template <class T, int QT, int floats, bool vectors>
__global__ void __launch_bounds__(kMostWarps* kWarp, DecodeSizes<T, QT, floats>::blocks)
    decode_forward(const DecodeForward d) {
  DecodeTask<T, QT, floats, vectors> task(d);
  if (task.b < d.p.B)
#pragma unroll 1
    for (int t = 0; t < kStages; ++t) task.fill(t, task.stage(t));
  if (task.helps()) return;
  task.count_keys();
  if constexpr (QT > 1 && sizeof(T) == 2) {
    if (task.load_queries())
      task.template score_keys<true>();
    else
      task.template score_keys<false>();
  } else {
    task.load_queries();
    task.template score_keys<false>();
  }
  task.reduce_warps();
}

}  // namespace bahdanau_fast::gpu

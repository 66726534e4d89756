// Forward for few queries, a decoder step or its beams: everything in one launch.
//
//   score[b,i,j] = w . tanh(query[b,i] + key[b,j]),  weights = softmax over j < key_count[b,i]
//   context[b,i] = sum_j dropout(weights)[b,i,j] value[b,j]
//
//   queries (B,Tq,H), keys (B,Tk,H), values (B,Tk,Dv), w (H): T; context (B,Tq,Dv): T;
//   weights (B,Tq,Tk): fp32 or T; or queries (B,Tq,Dq) and W_q (H,Dq), projected in the same launch
//
// A block is (batch row, up to QT queries, columns of the values, split of the keys). Each of its
// warps takes a few keys in turn and has a ring of stages in shared memory for them, which it fills
// by asynchronous copies before anything else is read: where they lie depends on the split alone. A
// lane copies the pieces of 16 bytes that it reads, so that a stage needs a wait and no barrier.
// Where rows are not aligned so, lanes copy number by number (`vectors` is false), and nothing is
// projected. Every warp keeps the softmax of its keys: their largest score so far, and sums
// relative to it. At the end the warps meet, in their order. Where a row has 2, 4 or 8 splits they
// are neighbours in a cluster, and all of their warps meet in shared memory: each block writes a
// share of the columns, and the weights of its own keys. More splits than a cluster has, or splits
// on a GPU without clusters, are left in memory for combine_splits. Reads (H + Dv) numbers for
// each key.
#pragma once

#include "decode_block.h"

namespace bahdanau_fast::gpu {

template <class T, int QT, int floats, bool vectors>
struct DecodeTask : DecodeBlock<T, QT, floats, vectors> {
  using Base = DecodeBlock<T, QT, floats, vectors>;
  using Base::b, Base::c0, Base::columns, Base::count, Base::d, Base::each, Base::fill,
      Base::first_of, Base::half_w, Base::i0, Base::j0, Base::keys, Base::KU, Base::lane,
      Base::mine, Base::N, Base::n, Base::p, Base::piece, Base::s, Base::sizes, Base::stage,
      Base::U, Base::uniform, Base::warp;
  using typename Base::Sizes;

  __device__ explicit DecodeTask(const DecodeForward& all) : Base(all) {}

  // ---- keys ----

  static __device__ __forceinline__ Bytes16 bytes_at(const T* x) {
    return *reinterpret_cast<const Bytes16*>(x);
  }

  // The lane's score of the keys of a stage (warp_sums). In 16 bits from the sum of w / d (tanh.h).
  template <bool exponentials>
  __device__ __forceinline__ float score(const T* keys_of_stage) const {
    float sums[N] = {};
    for (int h = lane * U; h < sizes.width; h += piece) {
      float key[KU][U];
      unrolled<KU>([&](int k) {
        unpack<T>(bytes_at(keys_of_stage + k * (sizes.width + sizes.values) + h), key[k]);
        if constexpr (exponentials) unrolled<U>([&](int u) { key[k][u] = exp_of_key(key[k][u]); });
      });
#pragma unroll
      for (int u = 0; u < U; u += 4) {
        float w[4];
        load_four(mine.w + h + u, w);
        unrolled<QT>([&](int q) {
          float query[4];
          load_four(mine.queries + q * sizes.width + h + u, query);
          unrolled<KU>(
              [&](int k) { add_four<T, exponentials>(query, key[k] + u, w, &sums[k * QT + q]); });
        });
      }
    }
    const float sum = warp_sums<N>(sums, lane);
    if constexpr (sizeof(T) != 2) return sum;
    return 2.0f * (half_w - (exponentials ? 1.0f / kSmallW : kShrunk / kSmallW) * sum);
  }

  // All keys of the warp, into the scores and the warp's part of the context.
  template <bool exponentials>
  __device__ __forceinline__ void meet_keys() {
    const Dropout dropout(p);
    const int own = lane / each, q = own % QT, end = count(q);  // of the lane's scores
    const bool alike = uniform(q), stores = lane % each == 0 && i0 + q < p.Tq;
    float* scores = mine.scores + q * d.split;
    const bool* seen = p.mask.data != nullptr && !alike ? mine.seen + q * d.split : nullptr;
    float best = kLowest, total = 0, context[QT][floats] = {};
#pragma unroll 1
    for (int t = 0, slot = 0; first_of(t) < keys; ++t, slot = slot + 1 < kStages ? slot + 1 : 0) {
      wait_for_copies<kStages - 1>();
      T* here = stage(slot);
      const int j = first_of(t) + own / QT;
      float x = score<exponentials>(here);
      if (alike) x = 0;
      if (j >= end || (seen != nullptr && !seen[j])) x = -INFINITY;
      if (stores && j < n) scores[j] = x;
      float top = larger_or_nan(best, x);
#pragma unroll
      for (int offset = each * QT; offset < kWarp; offset *= 2)
        top = larger_or_nan(top, __shfl_xor_sync(kAllLanes, top, offset));
      if (QT == 1 ? top != best : any_lane(top != best)) {
        const float factor = exp_of<T>(best - top);
        best = top;
        total *= factor;
        unrolled<QT>([&](int q) {
          const float of_query = __shfl_sync(kAllLanes, factor, q * each);
          unrolled<floats>([&](int c) { context[q][c] *= of_query; });
        });
      }
      float odd = exp_of<T>(x - best);
      total += odd;
      if (dropout.on) odd *= dropout.factor(b * p.Tq + i0 + q, j0 + j);
      weigh_values(here + sizes.width + lane * U, keys - first_of(t), odd, context);
      fill(t + kStages, here);
    }
    lay_down(best, total, context);
  }

  // Adds the values of a stage, times the weights that the lanes have, but for those past the last
  // key of any query, which may be anything.
  __device__ __forceinline__ void weigh_values(const T* values, int left, float weight,
                                               float (&context)[QT][floats]) const {
#pragma unroll
    for (int k = 0; k < KU; ++k) {
      if (k >= left) break;
      float of_query[QT];
      unrolled<QT>(
          [&](int q) { of_query[q] = __shfl_sync(kAllLanes, weight, (k * QT + q) * each); });
#pragma unroll
      for (int c = 0; c < floats / U; ++c) {
        if (c * piece >= columns - lane * U) continue;
        float value[U];
        unpack<T>(bytes_at(values + k * (sizes.width + sizes.values) + c * piece), value);
        unrolled<QT, U>([&](int q, int u) { context[q][c * U + u] += of_query[q] * value[u]; });
      }
    }
  }

  // The warp's part, where its ring was.
  __device__ void lay_down(float best, float total, const float (&context)[QT][floats]) {
    wait_for_copies<0>();
    __syncthreads();
    float* part = reinterpret_cast<float*>(mine.rings + warp * sizes.of_warp);
#pragma unroll
    for (int q = 0; q < QT; ++q)
#pragma unroll
      for (int c = 0; c < floats; c += 4)
        store_four(&context[q][c], part + q * Sizes::columns + c / U * piece + lane * U + c % U);
#pragma unroll
    for (int offset = each * QT; offset < kWarp; offset *= 2)
      total += __shfl_xor_sync(kAllLanes, total, offset);
    if (lane % each == 0 && lane / each < QT) {
      mine.maxima[warp * QT + lane / each] = best;
      mine.sums[warp * QT + lane / each] = total;
    }
  }

  // ---- the parts of warps ----

  __device__ void meet_warps() {
    const bool apart = d.contexts != nullptr;  // the splits of a row do not meet here
    const int blocks = apart ? 1 : int(d.splits), share = apart ? 0 : int(s);
    const int first = cluster_rank() - share, width = apart ? (columns + 3) / 4 * 4 : columns;
    const auto of_block = [&](auto* x, int m) { return blocks > 1 ? in_block(x, first + m) : x; };
    if (blocks > 1)
      cluster_barrier();
    else
      __syncthreads();
    const int block = lane / kMostWarps, part = lane % kMostWarps * QT;  // of a lane's warp
    const bool there = block < blocks && lane % kMostWarps < d.warps;
#pragma unroll 1
    for (int q = 0; q < QT && i0 + q < p.Tq; ++q) {
      const float top = there ? of_block(mine.maxima + part + q, block)[0] : kLowest;
      float total = there ? of_block(mine.sums + part + q, block)[0] : 0.0f;
      const float best = warp_max(top), factor = exp_of<T>(top - best);
      total = warp_sum(factor * total);
      const int64_t at = b * p.Tq + i0 + q, of_split = at * d.splits + s;
#pragma unroll 1
      for (int from = (share * d.warps + warp) * kWarp; from < width;
           from += blocks * d.warps * kWarp) {
        const int c = from + lane;
        const float sum = sum_of_warps(q, c, factor, blocks, of_block);
        if (c >= width) continue;
        if (apart)
          static_cast<float*>(d.contexts)[of_split * d.width + c0 + c] = sum;
        else
          narrow(over<T>(sum, total), static_cast<T*>(d.context) + at * p.Dv + c0 + c);
      }
      if (c0 > 0) continue;
      if (apart && threadIdx.x == 0) {
        static_cast<float*>(d.maxima)[of_split] = best;
        static_cast<float*>(d.sums)[of_split] = total;
      }
      if (d.weights == nullptr) continue;
      const int64_t row = at * p.Tk + j0;
      for (int j = threadIdx.x; j < n; j += blockDim.x) {
        const float x = j < count(q) ? mine.scores[q * d.split + j] : -INFINITY;
        if (apart)
          static_cast<float*>(d.scores)[row + j] = x;
        else
          store_weight<T>(d, over<T>(exp_of<T>(x - best), total), row + j);
      }
    }
    // No block ends while another reads its shared memory.
    if (blocks > 1) relaxed_cluster_barrier();
  }

  // Column c of the context of a query, over the warps of the blocks; `factor` is of a lane's warp.
  template <class OfBlock>
  __device__ __forceinline__ float sum_of_warps(int q, int c, float factor, int blocks,
                                                const OfBlock& of_block) const {
    float sum = 0;
#pragma unroll 2
    for (int m = 0; m < blocks; ++m) {
      const char* from = of_block(mine.rings + (q * Sizes::columns + c) * int(sizeof(float)), m);
      float parts[kMostWarps], of_part = 0;
      unrolled<kMostWarps>([&](int k) {
        parts[k] = k < d.warps ? *reinterpret_cast<const float*>(from + k * sizes.of_warp) : 0.0f;
      });
      unrolled<kMostWarps>(
          [&](int k) { of_part += __shfl_sync(kAllLanes, factor, m * kMostWarps + k) * parts[k]; });
      sum += of_part;
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
      task.template meet_keys<true>();
    else
      task.template meet_keys<false>();
  } else {
    task.load_queries();
    task.template meet_keys<false>();
  }
  task.meet_warps();
}

}  // namespace bahdanau_fast::gpu

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
// relative to it. The warps of a block meet at the end, and the splits of a row in the block that
// finishes last, in the order of both. Reads (H + Dv) numbers for each key.
#pragma once

#include "decode_block.h"

namespace bahdanau_fast::gpu {

template <class T, int QT, int floats, bool vectors>
struct DecodeTask : DecodeBlock<T, QT, floats, vectors> {
  using Base = DecodeBlock<T, QT, floats, vectors>;
  using Base::b;
  using Base::c0;
  using Base::columns;
  using Base::count;
  using Base::d;
  using Base::each;
  using Base::fill;
  using Base::first_of;
  using Base::half_w;
  using Base::i0;
  using Base::j0;
  using Base::keys;
  using Base::KU;
  using Base::lane;
  using Base::mine;
  using Base::N;
  using Base::n;
  using Base::p;
  using Base::piece;
  using Base::row;
  using Base::s;
  using Base::sizes;
  using Base::stage;
  using Base::U;
  using Base::uniform;
  using Base::warp;
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
#pragma unroll
      for (int k = 0; k < KU; ++k) {
        unpack<T>(bytes_at(keys_of_stage + k * (sizes.width + sizes.values) + h), key[k]);
        if constexpr (exponentials)
#pragma unroll
          for (int u = 0; u < U; ++u) key[k][u] = exp_of_key(key[k][u]);
      }
#pragma unroll
      for (int u = 0; u < U; u += 4) {
        float w[4];
        load_four(mine.w + h + u, w);
#pragma unroll
        for (int q = 0; q < QT; ++q) {
          float query[4];
          load_four(mine.queries + q * sizes.width + h + u, query);
#pragma unroll
          for (int k = 0; k < KU; ++k)
            add_four<T, exponentials>(query, key[k] + u, w, &sums[k * QT + q]);
        }
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
#pragma unroll
        for (int q = 0; q < QT; ++q) {
          const float of_query = __shfl_sync(kAllLanes, factor, q * each);
#pragma unroll
          for (int c = 0; c < floats; ++c) context[q][c] *= of_query;
        }
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
#pragma unroll
      for (int q = 0; q < QT; ++q)
        of_query[q] = __shfl_sync(kAllLanes, weight, (k * QT + q) * each);
#pragma unroll
      for (int c = 0; c < floats / U; ++c) {
        if (c * piece >= columns - lane * U) continue;
        float value[U];
        unpack<T>(bytes_at(values + k * (sizes.width + sizes.values) + c * piece), value);
#pragma unroll
        for (int q = 0; q < QT; ++q)
#pragma unroll
          for (int u = 0; u < U; ++u) context[q][c * U + u] += of_query[q] * value[u];
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
    __syncthreads();
  }

  // ---- the parts of warps and of splits ----

  __device__ void meet_warps() {
#pragma unroll 1
    for (int q = 0; q < QT && i0 + q < p.Tq; ++q) {
      float best = kLowest, total = 0, factors[kMostWarps] = {};
#pragma unroll
      for (int k = 0; k < kMostWarps; ++k)
        if (k < d.warps) best = larger_or_nan(best, mine.maxima[k * QT + q]);
#pragma unroll
      for (int k = 0; k < kMostWarps; ++k) {
        if (k >= d.warps) break;
        factors[k] = exp_of<T>(mine.maxima[k * QT + q] - best);
        total += factors[k] * mine.sums[k * QT + q];
      }
      const int64_t at = b * p.Tq + i0 + q, part = (row * d.splits + s) * QT + q;
#pragma unroll 1
      for (int c = 4 * threadIdx.x; c < columns; c += 4 * blockDim.x) {
        const char* from = mine.rings + (q * Sizes::columns + c) * int(sizeof(float));
        float sums[4] = {};
#pragma unroll
        for (int k = 0; k < kMostWarps; ++k) {
          if (k >= d.warps) break;
          float of_warp[4];
          load_four(reinterpret_cast<const float*>(from + k * sizes.of_warp), of_warp);
#pragma unroll
          for (int u = 0; u < 4; ++u) sums[u] += factors[k] * of_warp[u];
        }
        if (d.splits == 1)
          store_context(sums, total, at, c);
        else
          store_four(sums, static_cast<float*>(d.contexts) + part * Sizes::columns + c);
      }
      if (d.splits > 1 && threadIdx.x == 0) {
        static_cast<float*>(d.maxima)[part] = best;
        static_cast<float*>(d.sums)[part] = total;
      }
      if (d.weights == nullptr || c0 > 0) continue;
      const int64_t first = at * p.Tk + j0;
      for (int j = threadIdx.x; j < n; j += blockDim.x) {
        const float x = j < count(q) ? mine.scores[q * d.split + j] : -INFINITY;
        if (d.splits > 1)
          static_cast<float*>(d.scores)[first + j] = x;
        else
          store_weight(over<T>(exp_of<T>(x - best), total), first + j);
      }
    }
    if (d.splits > 1 && is_last()) meet_splits();
  }

  __device__ __forceinline__ void store_weight(float x, int64_t at) const {
    if (d.narrow)
      narrow(x, static_cast<T*>(d.weights) + at);
    else
      static_cast<float*>(d.weights)[at] = x;
  }

  // Columns [c, c + 4) of the context of a query.
  __device__ void store_context(const float* sums, float total, int64_t at, int c) {
    T* out = static_cast<T*>(d.context) + at * p.Dv + c0 + c;
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (c + u < columns) narrow(over<T>(sums[u], total), out + u);
  }

  // True in the block of a row that finishes last, which can then read what the others wrote.
  __device__ bool is_last() {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *mine.last = atomicAdd(d.arrived + row, 1u) == unsigned(d.splits - 1);
      __threadfence();
      if (*mine.last) d.arrived[row] = 0;  // for the next launch
    }
    __syncthreads();
    return *mine.last != 0;
  }

  __device__ void meet_splits() {
    constexpr int W = 4;  // loads in flight
#pragma unroll 1
    for (int q = 0; q < QT && i0 + q < p.Tq; ++q) {
      const int64_t first = row * d.splits * QT + q, at = b * p.Tq + i0 + q;
      float best = kLowest, total = 0;
      __syncthreads();
#pragma unroll 1
      for (int from = lane; from < d.splits; from += W * kWarp) {
        float tops[W], sums[W];
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const int64_t part = first + (from + k * kWarp < d.splits ? from + k * kWarp : lane) * QT;
          tops[k] = static_cast<const float*>(d.maxima)[part];
          sums[k] = from + k * kWarp < d.splits ? static_cast<const float*>(d.sums)[part] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < W; ++k) {
          if (warp == 0 && from + k * kWarp < d.splits) mine.scratch[from + k * kWarp] = tops[k];
          const float both = larger_or_nan(best, tops[k]);
          total = total * exp_of<T>(best - both) + sums[k] * exp_of<T>(tops[k] - both);
          best = both;
        }
      }
      const float top = warp_max(best);
      total = warp_sum(total * exp_of<T>(best - top));
      __syncthreads();
      meet_contexts(static_cast<const float*>(d.contexts) + first * Sizes::columns, top, total, at);
      if (d.weights != nullptr && c0 == 0) meet_scores(at * p.Tk, top, total);
    }
  }

  __device__ void meet_contexts(const float* parts, float best, float total, int64_t at) {
    constexpr int W = 16;  // loads in flight
    const int splits = int(d.splits);
#pragma unroll 1
    for (int c = 4 * threadIdx.x; c < columns; c += 4 * blockDim.x) {
      float context[4] = {};
#pragma unroll 1
      for (int first = 0; first < splits; first += W) {
        float part[W][4];
        const float* from = parts + first * (QT * Sizes::columns) + c;
#pragma unroll
        for (int k = 0; k < W; ++k)  // past the last, the first of them
          load_four(from + (first + k < splits ? k * QT * Sizes::columns : 0), part[k]);
        float sums[4] = {};
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const float factor =
              first + k < splits ? exp_of<T>(mine.scratch[first + k] - best) : 0.0f;
#pragma unroll
          for (int u = 0; u < 4; ++u) sums[u] += factor * part[k][u];
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) context[u] += sums[u];
      }
      store_context(context, total, at, c);
    }
  }

  // From the scores of a row to its weights, which begin at `row`.
  __device__ void meet_scores(int64_t row, float best, float total) {
    const float* of_row = static_cast<const float*>(d.scores) + row;
    constexpr int W = 16;  // loads in flight
#pragma unroll 1
    for (int64_t first = threadIdx.x; first < p.Tk; first += W * blockDim.x) {
      const int left = int(smaller(p.Tk - first, W * blockDim.x)), step = int(blockDim.x);
      float scores[W];
#pragma unroll
      for (int k = 0; k < W; ++k) scores[k] = of_row[first + (k * step < left ? k * step : 0)];
#pragma unroll
      for (int k = 0; k < W; ++k)
        if (k * step < left)
          store_weight(over<T>(exp_of<T>(scores[k] - best), total), row + first + k * step);
    }
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

// Forward for few queries from keys that are not projected yet: everything in one launch.
//
//   score[b,i,j] = w . tanh(query[b,i] + W_k key[b,j] + bias), then as in decode.h
//
//   keys (B,Tk,Dk), W_k (H,Dk), bias (H): T, 16 bits of it, in rows of whole aligned vectors; the
//   rest as there
//
// A block is (batch row, split of its keys) and loads 64 keys at a time into shared memory. W_k is
// read for each such tile, 16 bytes by each lane, 32 hidden units by each warp, and multiplied with
// it on tensor cores; of the product only w . tanh() leaves the registers. The order of the
// features in the product is free, as long as it is the same for keys and weight: lane q of four
// holds features 8q to 8q + 7 of 32, so that every load has 16 bytes and needs no shuffle. Reads
// W_k once per 64 keys, from L2, and the keys once. If the values are the keys, the context is
// computed from the tile as well, relative to the largest score so far. Otherwise the values are
// read at the end.
#pragma once

#include "decode.h"

namespace bahdanau_fast::gpu {

constexpr int kRawTile = 64;      // keys in shared memory
constexpr int kRawUnits = 32;     // hidden units of a warp
constexpr int kRawFeatures = 32;  // features of a step, two products' depth

struct RawKeys {
  DecodeForward d;  // its p.keys are (B,Tk,Dk)
  const void* w_k = nullptr;
  const void* bias = nullptr;  // may be null
  int64_t Dk = 0;
  bool values_are_keys = false;
};

template <class T, int QT>
struct RawShared {
  T* tile;       // (64,pitch)
  float* parts;  // (8,QT,64)
  // If the values are the keys: exp(score - best) of a tile (QT,64), the context so far
  // (QT,features), the largest score so far (QT) and the factor that sums relative to the previous
  // one need (QT).
  float *odds, *context, *best, *rescale;
  int64_t bytes, features, pitch;

  __host__ __device__ RawShared(char* base, const RawKeys& r) {
    Carver from{base, DecodeShared<T, QT>(nullptr, r.d).bytes};
    features = ceil_div(r.Dk, kRawFeatures) * kRawFeatures;
    pitch = ceil_div(r.Dk, 64) * 64 + 32;  // neighbouring rows are in different banks
    tile = from.take<T>(kRawTile * pitch);
    parts = from.take<float>(kDecodeWarps * QT * kRawTile);
    odds = from.take<float>(r.values_are_keys ? QT * kRawTile : 0);
    context = from.take<float>(r.values_are_keys ? QT * features : 0);
    best = from.take<float>(QT);
    rescale = from.take<float>(QT);
    bytes = from.used;
  }
};

template <class T, int QT>
struct RawTask : DecodeTask<T, QT, true> {
  using Base = DecodeTask<T, QT, true>;
  using Base::b;
  using Base::j0;
  using Base::lane;
  using Base::mine;
  using Base::p;
  using Base::warp;
  const RawKeys& r;
  RawShared<T, QT> raw;

  __device__ explicit RawTask(const RawKeys& all)
      : Base(all.d), r(all), raw(shared_memory(), all) {}

  // Features [c, c + 8) of a row, zero from Dk on.
  __device__ __forceinline__ Bytes16 load_eight(const T* row, int64_t c) const {
    return c < r.Dk ? load16(row + c) : Bytes16{};
  }

  __device__ void load_tile(int64_t first, int64_t keys) {
    const int64_t pieces = raw.features / 8;
    for (int64_t at = threadIdx.x; at < kRawTile * pieces; at += kDecodeThreads) {
      const int64_t j = at / pieces, c = at % pieces * 8;
      Bytes16 bytes{};
      if (first + j < keys) bytes = load_eight(row_at<T>(p.keys, b, j0 + first + j), c);
      *reinterpret_cast<Bytes16*>(raw.tile + j * raw.pitch + c) = bytes;
    }
  }

  // sums[m][n]: 16 keys (m) by 8 hidden units (n) of the warp's 32, in the layout of the tensor
  // cores: lane 4g + q has keys g and g + 8, hidden units 2q and 2q + 1.
  __device__ __forceinline__ void multiply(int64_t h0, float (&sums)[4][4][4]) {
    const int g = lane / 4, q = lane % 4;
    const T* w_k = static_cast<const T*>(r.w_k);
    for (int64_t c = 8 * q; c < raw.features; c += kRawFeatures) {
      Bytes16 weight[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int64_t h = h0 + 8 * n + g;
        weight[n] = h < p.H ? load_eight(w_k + h * r.Dk, c) : Bytes16{};
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const T* rows = raw.tile + (16 * m + g) * raw.pitch + c;
        const Bytes16 low = *reinterpret_cast<const Bytes16*>(rows);
        const Bytes16 high = *reinterpret_cast<const Bytes16*>(rows + 8 * raw.pitch);
#pragma unroll
        for (int s = 0; s < 4; s += 2) {
          const uint32_t key[4] = {low.word[s], high.word[s], low.word[s + 1], high.word[s + 1]};
#pragma unroll
          for (int n = 0; n < 4; ++n)
            multiply_add<T>(sums[m][n], key, weight[n].word[s], weight[n].word[s + 1]);
        }
      }
    }
  }

  // Adds the part of the warp's 32 hidden units to the scores of the tile.
  __device__ __forceinline__ void add_scores(int64_t h0, const float (&sums)[4][4][4]) {
    const int g = lane / 4, q = lane % 4;
#pragma unroll
    for (int i = 0; i < QT; ++i)
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum = 0;
#pragma unroll
          for (int n = 0; n < 4; n += 2) {
            const int64_t h = h0 + 8 * n + 2 * q;
            const float* a = mine.queries + i * mine.width + h;
            const float* w = mine.w + h;
            const float x[4] = {a[0] + sums[m][n][2 * half], a[1] + sums[m][n][2 * half + 1],
                                a[8] + sums[m][n + 1][2 * half],
                                a[9] + sums[m][n + 1][2 * half + 1]};
            const float weight[4] = {w[0], w[1], w[8], w[9]};
            sum += sum_of_four_tanh<T>(x, weight);
          }
          sum += __shfl_xor_sync(kAllLanes, sum, 1);
          sum += __shfl_xor_sync(kAllLanes, sum, 2);
          if (q == 0) raw.parts[(warp * QT + i) * kRawTile + 16 * m + 8 * half + g] += sum;
        }
  }

  __device__ void score_tiles(int64_t keys) {
    for (int64_t first = 0; first < keys; first += kRawTile) {
      __syncthreads();
      load_tile(first, keys);
      for (int at = threadIdx.x; at < kDecodeWarps * QT * kRawTile; at += kDecodeThreads)
        raw.parts[at] = 0;
      __syncthreads();
      for (int64_t h0 = warp * kRawUnits; h0 < p.H; h0 += kDecodeWarps * kRawUnits) {
        float sums[4][4][4] = {};
        multiply(h0, sums);
        add_scores(h0, sums);
      }
      __syncthreads();
      for (int at = threadIdx.x; at < QT * kRawTile; at += kDecodeThreads) {
        const int64_t i = at / kRawTile, j = first + at % kRawTile;
        if (i >= p.Tq || j >= keys) continue;
        float sum = 0;
        for (int k = 0; k < kDecodeWarps; ++k) sum += raw.parts[k * QT * kRawTile + at];
        mine.scores[i * this->d.split + j] = sees(p, b, i, j0 + j) ? sum : -INFINITY;
      }
      if (r.values_are_keys) add_context(first);
    }
  }

  // Adds the tile to the contexts.
  __device__ void add_context(int64_t first) {
    __syncthreads();
    if (warp < QT) weigh_tile(first);
    __syncthreads();
    for (int64_t c = 2 * threadIdx.x; c < r.Dk; c += 2 * kDecodeThreads) {
      float sums[QT][2];
#pragma unroll
      for (int i = 0; i < QT; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k)
          sums[i][k] = first == 0 ? 0.0f : raw.context[i * raw.features + c + k] * raw.rescale[i];
#pragma unroll 4
      for (int j = 0; j < kRawTile; ++j) {
        const T* pair = raw.tile + j * raw.pitch + c;
        const float x[2] = {widen(pair[0]), widen(pair[1])};
#pragma unroll
        for (int i = 0; i < QT; ++i)
#pragma unroll
          for (int k = 0; k < 2; ++k) sums[i][k] += raw.odds[i * kRawTile + j] * x[k];
      }
#pragma unroll
      for (int i = 0; i < QT; ++i)
#pragma unroll
        for (int k = 0; k < 2; ++k) raw.context[i * raw.features + c + k] = sums[i][k];
    }
  }

  // A warp per query: exp(score - best) of the keys of the tile, best being the largest score so
  // far. Past the last query zeros, which add_context() reads too.
  __device__ void weigh_tile(int64_t first) {
    const bool used = warp < p.Tq;
    const int64_t keys = used ? this->count(warp) : 0;
    const bool alike = used && this->uniform(warp);
    // By lane 0 alone, which writes it below: shuffles do not order memory.
    const float before = first == 0 || lane != 0 ? -INFINITY : raw.best[warp];
    float scores[kRawTile / kWarp], best = before;
#pragma unroll
    for (int k = 0; k < kRawTile / kWarp; ++k) {
      const int64_t j = first + lane + k * kWarp;
      scores[k] = j >= keys ? -INFINITY : alike ? 0.0f : mine.scores[warp * this->d.split + j];
      best = scores[k] > best || scores[k] != scores[k] ? scores[k] : best;
    }
    best = warp_max(best);
#pragma unroll
    for (int k = 0; k < kRawTile / kWarp; ++k)
      raw.odds[warp * kRawTile + lane + k * kWarp] =
          first + lane + k * kWarp < keys ? odds(scores[k], best) : 0.0f;
    if (lane != 0) return;
    raw.best[warp] = best;
    raw.rescale[warp] = before == best ? 1.0f : expf(before - best);
  }

  __device__ void finish() {
    if (!r.values_are_keys) return Base::finish();
    this->softmax();
    for (int64_t at = threadIdx.x; at < p.Tq * p.Dv; at += kDecodeThreads) {
      const int64_t i = at / p.Dv, c = at % p.Dv;
      const float sum = this->count(i) == 0 ? 0.0f : raw.context[i * raw.features + c];
      this->store_context(i, c, this->d.splits == 1 ? sum / mine.totals[i] : sum);
    }
    this->join();
  }

  __device__ void score() {
    __syncthreads();
    this->load_queries(0, false);
    if (r.bias != nullptr)
      for (int64_t at = threadIdx.x; at < QT * mine.width; at += kDecodeThreads)
        if (at % mine.width < p.H)
          mine.queries[at] += widen(static_cast<const T*>(r.bias)[at % mine.width]);
    int64_t keys = 0;
    for (int64_t i = 0; i < p.Tq; ++i)
      if (r.values_are_keys || !this->uniform(i)) keys = larger(keys, this->count(i));
    score_tiles(keys);
    __syncthreads();
  }
};

template <class T, int QT>
__global__ void __launch_bounds__(kDecodeThreads, 1) raw_keys_forward(const RawKeys r) {
  RawTask<T, QT> task(r);
  if (task.helped()) return;
  task.count_keys();
  task.score();
  task.finish();
}

}  // namespace bahdanau_fast::gpu

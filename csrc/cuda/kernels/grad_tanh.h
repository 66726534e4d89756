// Gradients through the tanh: with s = grad_score, t = tanh(query + key), u = 1 - t^2,
//
//   grad_query[b,i] = w sum_j s u,  grad_key[b,j] = w sum_i s u,  grad_w = sum_bij s t
//
//   queries (B,Tq,H), keys (B,Tk,H), w (H), grad_keys (B,Tk,H): T; grad_scores (B,Tq,Tk): fp32;
//   per chunk of keys its part of grad_queries (chunks,B,Tq,H) and of grad_w (B,chunks,H): fp32
//
// A block is (batch row, chunk of 64 keys, 32 hidden units), a lane one hidden unit. The warps form
// a grid of `across` along the queries, QT each, and 8 / across along the keys: 8 x 1 for many
// queries, 1 x 8 for a decoder step. A warp holds its queries in registers; the keys of the chunk
// are in shared memory, exponentiated once. t is recomputed, four elements sharing a reciprocal:
// nothing of size Tq x Tk x H is stored. Sums over warps go through shared memory, in the order of
// the warps. Reads the keys once, and the queries once for each chunk; writes grad_keys once.
#pragma once

#include "tanh.h"

namespace bahdanau_fast::gpu {

constexpr int kGradThreads = 256, kGradWarps = kGradThreads / kWarp;
constexpr int kGradKeys = 64;  // of a chunk
constexpr int kGradTile = 8;   // keys of a warp between two sums over warps

struct GradTanh {
  Problem p;
  int across = 1;  // warps along the queries
  const void* grad_scores = nullptr;
  void* grad_keys = nullptr;      // null: not asked for
  void* queries_parts = nullptr;  // null: not asked for
  void* w_parts = nullptr;        // null: not asked for
};

__host__ __device__ constexpr int64_t grad_chunks(int64_t Tk) { return ceil_div(Tk, kGradKeys); }

template <int QT>
struct GradTanhShared {
  float *keys, *grad_keys;  // (kGradKeys, 32)
  float* scores;            // (8 QT, kGradKeys)
  float* parts;             // (8, kGradTile, 32)
  unsigned* largest;        // bits of max |query| and |key|; how many keys any query uses
  int64_t bytes;

  __host__ __device__ explicit GradTanhShared(char* base) {
    Carver from{base};
    keys = from.take<float>(kGradKeys * kWarp);
    grad_keys = from.take<float>(kGradKeys * kWarp);
    scores = from.take<float>(kGradWarps * QT * kGradKeys);
    parts = from.take<float>(kGradWarps * kGradTile * kWarp);
    largest = from.take<unsigned>(3);
    bytes = from.used;
  }
};

template <class T, int QT>
struct GradTanhTask {
  const GradTanh& g;
  const Problem& p;
  GradTanhShared<QT> mine;
  int64_t b, chunk, j0, n, h;
  int lane, warp, wq, wk, along;  // the warp's place in the grid of across x along
  float w, sum_w = 0;

  __device__ explicit GradTanhTask(const GradTanh& all) : g(all), p(all.p), mine(shared_memory()) {
    const int64_t slices = ceil_div(p.H, kWarp), chunks = grad_chunks(p.Tk);
    lane = threadIdx.x % kWarp;
    warp = threadIdx.x / kWarp;
    h = blockIdx.x % slices * kWarp + lane;
    chunk = blockIdx.x / slices % chunks;
    b = blockIdx.x / slices / chunks;
    j0 = chunk * kGradKeys;
    wq = warp % g.across;
    wk = warp / g.across;
    along = kGradWarps / g.across;
    w = h < p.H ? widen(static_cast<const T*>(p.w)[h]) : 0.0f;
  }

  __device__ float query_at(int64_t i) const {
    return i < p.Tq && h < p.H ? widen(row_at<T>(p.queries, b, i)[h]) : 0.0f;
  }

  // How many of the chunk's keys any query uses; the others may be anything.
  __device__ void count_keys() {
    if (threadIdx.x < 3) mine.largest[threadIdx.x] = 0;
    __syncthreads();
    int64_t used = 0;
    for (int64_t i = threadIdx.x; i < p.Tq; i += kGradThreads)
      used = larger(used, smaller(kGradKeys, key_count(p, b, i) - j0));
    if (used > 0) atomicMax(mine.largest + 2, unsigned(used));
    __syncthreads();
    n = mine.largest[2];
  }

  // The chunk's keys into shared memory; one form for them and all queries.
  __device__ Form load_keys() {
    float most = 0, most_query = 0;
    for (int64_t j = warp; j < kGradKeys; j += kGradWarps) {
      const float x = j < n && h < p.H ? widen(row_at<T>(p.keys, b, j0 + j)[h]) : 0.0f;
      mine.keys[j * kWarp + lane] = x;
      mine.grad_keys[j * kWarp + lane] = 0;
      const float size = fabsf(float(x));
      most = size > most || size != size ? size : most;
    }
    for (int64_t i = warp; i < p.Tq; i += kGradWarps) {
      const float size = fabsf(query_at(i));
      most_query = size > most_query || size != size ? size : most_query;
    }
    // Floats that are not negative have the order of their bits, NaN above all.
    const unsigned queries_max = __reduce_max_sync(kAllLanes, to_bits(most_query));
    const unsigned keys_max = __reduce_max_sync(kAllLanes, to_bits(most));
    if (lane == 0) {
      atomicMax(mine.largest, queries_max);
      atomicMax(mine.largest + 1, keys_max);
    }
    __syncthreads();
    const Form form = choose_form<T>(from_bits(mine.largest[0]), from_bits(mine.largest[1]), 0.0f);
    for (int64_t j = warp; j < kGradKeys && form != Form::direct; j += kGradWarps)
      mine.keys[j * kWarp + lane] = exp_of_key<T>(mine.keys[j * kWarp + lane], form);
    __syncthreads();
    return form;
  }

  // Score gradients of the queries of a pass, zero for masked keys and past the last query.
  __device__ void load_scores(int64_t i0, int64_t queries) {
    const float* from = static_cast<const float*>(g.grad_scores);
    for (int64_t at = threadIdx.x; at < queries * kGradKeys; at += kGradThreads) {
      const int64_t i = i0 + at / kGradKeys, j = at % kGradKeys;
      mine.scores[at] = i < p.Tq && j < n ? from[(b * p.Tq + i) * p.Tk + j0 + j] : 0.0f;
    }
  }

  // One pass: the warp's queries against its keys.
  __device__ void pass(int64_t i0, Form form) {
    float query[QT], grad[QT] = {};
#pragma unroll
    for (int q = 0; q < QT; ++q) {
      query[q] = query_at(i0 + wq * QT + q);
      if (form != Form::direct) query[q] = exp_of_two<T>(query[q]);
    }
    for (int64_t first = wk * kGradTile; first < kGradKeys; first += along * kGradTile) {
      float sums[kGradTile] = {};
#pragma unroll
      for (int k = 0; k < kGradTile; k += 4) {
        float key[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) key[x] = mine.keys[(first + k + x) * kWarp + lane];
#pragma unroll
        for (int q = 0; q < QT; ++q) {
          float t[4], slope[4];
          four_tanh<T>(query[q], key, form, t, slope);
          const float* s = mine.scores + (wq * QT + q) * kGradKeys + first + k;
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            const float su = s[x] * slope[x];
            sum_w += s[x] * t[x];
            grad[q] += su;
            sums[k + x] += su;
          }
        }
      }
      add_to_keys(first, sums);
    }
    if (g.queries_parts != nullptr) store_queries(i0, grad);
  }

  // Adds up the sums of the warps that have the same keys.
  __device__ void add_to_keys(int64_t first, const float* sums) {
    if (g.grad_keys == nullptr) return;
    if (g.across == 1) {
#pragma unroll
      for (int k = 0; k < kGradTile; ++k) mine.grad_keys[(first + k) * kWarp + lane] += sums[k];
      return;
    }
#pragma unroll
    for (int k = 0; k < kGradTile; ++k) mine.parts[(warp * kGradTile + k) * kWarp + lane] = sums[k];
    __syncthreads();
    for (int at = wq; at < kGradTile; at += g.across) {
      float sum = 0;
      for (int k = 0; k < g.across; ++k)
        sum += mine.parts[((wk * g.across + k) * kGradTile + at) * kWarp + lane];
      mine.grad_keys[(first + at) * kWarp + lane] += sum;
    }
    __syncthreads();
  }

  __device__ void store_queries(int64_t i0, const float* grad) {
    float* out = static_cast<float*>(g.queries_parts) + (chunk * p.B + b) * p.Tq * p.H;
    __syncthreads();
#pragma unroll
    for (int q = 0; q < QT; ++q) mine.parts[(warp * QT + q) * kWarp + lane] = grad[q];
    __syncthreads();
    for (int q = wk; q < QT; q += along) {
      float sum = 0;
      for (int k = 0; k < along; ++k)
        sum += mine.parts[((k * g.across + wq) * QT + q) * kWarp + lane];
      const int64_t i = i0 + wq * QT + q;
      if (i < p.Tq && h < p.H) out[i * p.H + h] = sum * w;
    }
    __syncthreads();
  }

  __device__ void run() {
    count_keys();
    const Form form = load_keys();
    const int64_t queries = QT * g.across;
    for (int64_t i0 = 0; i0 < p.Tq; i0 += queries) {
      __syncthreads();
      load_scores(i0, queries);
      __syncthreads();
      pass(i0, form);
    }
    __syncthreads();
    if (g.grad_keys != nullptr && h < p.H)
      for (int64_t j = warp; j < smaller(kGradKeys, p.Tk - j0); j += kGradWarps)
        narrow(mine.grad_keys[j * kWarp + lane] * w,
               static_cast<T*>(g.grad_keys) + (b * p.Tk + j0 + j) * p.H + h);
    if (g.w_parts == nullptr) return;
    mine.parts[warp * kWarp + lane] = sum_w;
    __syncthreads();
    if (warp != 0 || h >= p.H) return;
    float sum = 0;
    for (int k = 0; k < kGradWarps; ++k) sum += mine.parts[k * kWarp + lane];
    static_cast<float*>(g.w_parts)[(b * grad_chunks(p.Tk) + chunk) * p.H + h] = sum;
  }
};

template <class T, int QT>
__global__ void __launch_bounds__(kGradThreads, 2) grad_tanh(const GradTanh g) {
  GradTanhTask<T, QT>(g).run();
}

// out[x] = sum over parts of parts[part][x], in their order, a few at a time.
struct SumParts {
  const void* parts = nullptr;  // (count, size) of fp32
  int64_t count = 0, size = 0;
  void* out = nullptr;  // (size) of T
};

template <class T>
__global__ void __launch_bounds__(kGradThreads) sum_parts(const SumParts s) {
  Carver from{shared_memory()};
  float* sums = from.take<float>(kGradThreads);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t x = int64_t(blockIdx.x) * kWarp + lane;
  float sum = 0;
  for (int64_t k = warp; k < s.count && x < s.size; k += kGradWarps)
    sum += static_cast<const float*>(s.parts)[k * s.size + x];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0 || x >= s.size) return;
  for (int k = 1; k < kGradWarps; ++k) sum += sums[k * kWarp + lane];
  narrow(sum, static_cast<T*>(s.out) + x);
}

}  // namespace bahdanau_fast::gpu

// The parts that decode.h left in memory, added up in their order: the second launch of a call
// whose splits do not meet in a cluster.
//
//   weights = exp(score - maximum) / sum over a row,  context from its splits likewise
//
// A block is (batch row, query, 128 columns of the values), and writes a share of the weights. Its
// warps take splits in turn, lanes four columns. Reads (Dv + 2) numbers for each split.
#pragma once

#include "decode_plan.h"
#include "tanh.h"

namespace bahdanau_fast::gpu {

constexpr int kCombineColumns = 4 * kWarp, kCombineThreads = 256;

// Blocks of a row.
__host__ __device__ inline int64_t combining_blocks(const Problem& p) {
  return larger(1, ceil_div(p.Dv, kCombineColumns));
}

constexpr int64_t kCombineShared =
    (kCombineThreads / kWarp) * (kCombineColumns + 1) * int64_t(sizeof(float));

template <class T>
__global__ void __launch_bounds__(kCombineThreads, 2) combine_splits(const DecodeForward d) {
  constexpr int warps = kCombineThreads / kWarp, W = 8;  // W loads of a thread in flight
  const Problem& p = d.p;
  Carver from{shared_memory()};
  float* parts = from.take<float>(warps * kCombineColumns);
  float* scratch = from.take<float>(warps);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t blocks = combining_blocks(p), row = blockIdx.x / blocks;
  const int64_t block = blockIdx.x - row * blocks, c0 = block * kCombineColumns;
  const float* maxima = static_cast<const float*>(d.maxima) + row * d.splits;
  const float* sums = static_cast<const float*>(d.sums) + row * d.splits;
  float best = kLowest, total = 0;
#pragma unroll 1
  for (int64_t s = threadIdx.x; s < d.splits; s += kCombineThreads)
    best = larger_or_nan(best, maxima[s]);
  best = over_block(best, kLowest, scratch, [](float x) { return warp_max(x); });
#pragma unroll 1
  for (int64_t s = threadIdx.x; s < d.splits; s += kCombineThreads)
    total += exp_of<T>(maxima[s] - best) * sums[s];
  total = over_block(total, 0.0f, scratch, [](float x) { return warp_sum(x); });

  float context[4] = {};
  if (c0 + 4 * lane < d.width) {
    const int64_t splits = d.splits, of_row = row * splits * d.width + c0 + 4 * lane;
    const float* contexts = static_cast<const float*>(d.contexts) + of_row;
#pragma unroll 1
    for (int64_t first = warp; first < splits; first += W * warps) {
      float part[W][4], tops[W], run[4] = {};
      unrolled<W>([&](int k) {  // past the last, the first of them
        const int64_t s = first + k * warps < splits ? first + k * warps : first;
        load_four(contexts + s * d.width, part[k]);
        tops[k] = maxima[s];
      });
      unrolled<W>([&](int k) {
        const float factor = exp_of<T>(tops[k] - best);
        unrolled<4>(
            [&](int u) { run[u] += first + k * warps < splits ? factor * part[k][u] : 0.0f; });
      });
      unrolled<4>([&](int u) { context[u] += run[u]; });
    }
  }
  store_four(context, parts + warp * kCombineColumns + 4 * lane);
  __syncthreads();
  if (const int64_t c = c0 + threadIdx.x; threadIdx.x < kCombineColumns && c < p.Dv) {
    float sum = 0;
    for (int k = 0; k < warps; ++k) sum += parts[k * kCombineColumns + threadIdx.x];
    narrow(over<T>(sum, total), static_cast<T*>(d.context) + row * p.Dv + c);
  }

  if (d.weights == nullptr) return;
  const float* of_all = static_cast<const float*>(d.scores);
  const int64_t step = blocks * kCombineThreads, end = (row + 1) * p.Tk;
  for (int64_t at = row * p.Tk + block * kCombineThreads + threadIdx.x; at < end; at += W * step) {
    float scores[W];
    unrolled<W>([&](int k) { scores[k] = of_all[at + k * step < end ? at + k * step : at]; });
    unrolled<W>([&](int k) {
      if (at + k * step < end)
        store_weight<T>(d, over<T>(exp_of<T>(scores[k] - best), total), at + k * step);
    });
  }
}

}  // namespace bahdanau_fast::gpu

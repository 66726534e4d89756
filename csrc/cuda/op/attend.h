// How forward and backward are cut into launches. Host code without torch.
#pragma once

#include "common/limits.h"
#include "cuda/kernels/decode.h"
#include "cuda/kernels/decode_backward.h"
#include "cuda/kernels/decode_combine.h"
#include "cuda/kernels/types.h"
#include "cuda/runtime/launch.h"
#include "persistent.h"

namespace bahdanau_fast::gpu {

// A launch projects a single query, where each block, or each cluster, reads at most so many bytes
// of W_q.
// measured: gpu-h200.csv, the GPU gains nothing: "cuda, W_q in front: (64,1,50,64), forward,
// bfloat16" takes as long as "cuda, W_q inside shared: (64,1,50,64), forward, bfloat16", and "cuda,
// W_q in front: (64,4,50,128), forward, bfloat16" much less than "cuda, W_q inside shared:
// (64,4,50,128), forward, bfloat16"; the host has a launch less.
constexpr int64_t kOwnWeight = 8 * 1024;
// A cluster shares W_q from so many bytes on; below, each of its blocks reads all of it.
// measured: gpu-h200.csv, "cuda, W_q inside shared: (64,1,50,64), forward, bfloat16" takes less
// than "cuda, W_q inside each: (64,1,50,64), forward, bfloat16".
constexpr int64_t kSharedWeight = 8 * 1024;
// Forward: keys of a split for each warp, with one query and with several, at the least.
// measured: gpu-h200.csv, "cuda, 4 splits: (64,1,50,512), forward, bfloat16" and "cuda, 2 splits:
// (64,4,50,512), forward, bfloat16" take least.
LAB_CONSTEXPR int64_t kLeastKeys = 4, kLeastKeysOfSeveral = 8;
// Forward: most splits of a row for the sake of idle multiprocessors, scores of a block, keys that
// a warp adds up one after the other in fp32, whose roundings grow with the sum, and bytes of
// shared memory with rings and without scores.
// not measured: others; (64,1,50,512) with one and two splits, (1,1,40000,512) with 132 and 512.
LAB_CONSTEXPR int64_t kMostSplits = 256, kMostScores = 4096, kMostInTurn = 128,
                      kRingLimit = 76 * 1024;

template <class T>
struct Attend {
  // The kernels for one query, for four at a time, and the plain one, for rows of any alignment.
  using Entries = void (*const[3])(Backward);
  static constexpr Entries all_grad_values = {
      gpu::grad_values<T, 1, true>, gpu::grad_values<T, 4, true>, gpu::grad_values<T, 4, false>};
  static constexpr Entries all_grad_keys = {gpu::grad_keys<T, 1, true>, gpu::grad_keys<T, 4, true>,
                                            gpu::grad_keys<T, 4, false>};
  static int entry_of(const Problem& p, bool vectors) { return !vectors ? 2 : p.Tq == 1 ? 0 : 1; }
  static int queries_of(int entry) { return entry == 0 ? 1 : 4; }

  static bool in_row(const void* data, int64_t columns) {
    return in_vectors<T>({data, 0, columns}, columns);
  }

  static bool serves(const Problem& p) { return p.Tq <= kDecodeQueries && p.H <= kDecodeHidden; }

  // ---- forward ----

  // A kernel of decode.h, and what cuts its work: queries, columns of the values and keys of a
  // stage.
  struct Step {
    void (*kernel)(DecodeForward);
    int queries, columns, keys, blocks;
    DecodeLayout (*layout)(const DecodeForward&);
  };
  template <int QT, int floats, bool vectors>
  static constexpr Step step() {
    using S = DecodeSizes<T, QT, floats>;
    return {decode_forward<T, QT, floats, vectors>, QT, S::columns, S::KU, S::blocks, S::layout};
  }
  static constexpr Step steps[] = {step<1, 16, true>(), step<1, 32, true>(), step<4, 16, true>(),
                                   step<4, 16, false>()};

  static const Step& step_of(const Problem& p) {
    if (!in_vectors<T>(p.keys, p.H) || !in_vectors<T>(p.values, p.Dv)) return steps[3];
    return steps[p.Tq > 1 ? 2 : p.Dv > steps[0].columns ? 1 : 0];
  }

  static int64_t bytes_of_w_q(const Forward& f) { return f.p.H * f.Dq * int64_t(sizeof(T)); }

  // What a launch can project, rows in vectors and all queries at once, and what pays.
  static bool projects(const Forward& f, const Device& device) {
    const Step& step = step_of(f.p);
    return f.p.Tq == 1 && bytes_of_w_q(f) <= kOwnWeight * device.cluster && &step != &steps[3] &&
           f.Dq > 0 && in_vectors<T>(f.p.queries, f.Dq) && in_row(f.w_q, f.Dq);
  }

  // Splits the keys of a row if there are too few rows for the GPU, or if the scores of a whole row
  // need too much shared memory: in a power of two where the splits meet in a cluster, which are
  // neighbours in the grid.
  static DecodeForward plan(const Forward& f, const Device& device) {
    const Problem& p = f.p;
    const Step& step = step_of(p);
    DecodeForward d{f};
    d.query_groups = ceil_div(p.Tq, step.queries);
    d.column_groups = larger(1, ceil_div(p.Dv, step.columns));
    if (f.w_q != nullptr && bytes_of_w_q(f) >= kSharedWeight) d.cluster = device.cluster;
    while (d.warps > 1 && step.layout(d).bytes > kRingLimit) d.warps /= 2;
    const int64_t pass = d.warps * step.keys;
    const int64_t of_warp = step.queries > 1 ? kLeastKeysOfSeveral : kLeastKeys;
    const int64_t least = ceil_div(d.warps * of_warp, pass) * pass;
    int64_t least_splits = ceil_div(p.Tk, kMostScores / step.queries);
    if (sizeof(T) == 4) least_splits = larger(least_splits, ceil_div(p.Tk, kMostInTurn * d.warps));
    int64_t splits = int64_t(device.multiprocessors) * step.blocks / rows_of(d);
    splits = larger(smaller(smaller(splits, kMostSplits), ceil_div(p.Tk, least)), least_splits);
    d.split = ceil_div(ceil_div(p.Tk, splits), pass) * pass;
    d.splits = ceil_div(p.Tk, d.split);
    if (d.splits <= device.cluster) {
      int64_t inside = 1;
      while (inside < least_splits || 2 * inside <= d.splits) inside *= 2;
      d.splits = inside;
      d.split = ceil_div(p.Tk, inside);
      d.cluster = int(larger(d.cluster, inside));
    }
    d.layout = step.layout(d);
    return d;
  }

  static int64_t rows_of(const DecodeForward& d) {
    return d.p.B * d.query_groups * d.column_groups;
  }

  // Sets the pointers of splits that do not meet in a cluster, into memory at `base`; returns its
  // size, also for a null base.
  static int64_t lay_out(DecodeForward* d, char* base) {
    Carver from{base};
    const Problem& p = d->p;
    const int64_t rows = p.B * p.Tq, parts = rows * d->splits;
    d->width = ceil_div(p.Dv, 4) * 4;
    d->maxima = from.take<float>(parts);
    d->sums = from.take<float>(parts);
    d->contexts = from.take<float>(parts * d->width);
    const bool apart = d->narrow && d->weights != nullptr;
    d->scores = apart ? from.take<float>(rows * p.Tk) : d->weights;
    return from.used;
  }

  // Blocks of the largest cluster that every kernel launched in clusters can have.
  static int clusters() {
    int least = clusters_on ? 8 : 1;
    for (const Step& step : steps)
      least = smaller(least, largest_cluster(step.kernel, kMostWarps * kWarp));
    return least;
  }

  static const char* problem() { return why_not(steps[0].kernel); }

  static void forward(const Forward& f, const Device& device, const Memory& memory) {
    DecodeForward d = plan(f, device);
    const int64_t rows = rows_of(d);
    const bool apart = d.splits > d.cluster;
    if (apart) lay_out(&d, static_cast<char*>(memory(lay_out(&d, nullptr))));
    launch(step_of(f.p).kernel,
           {"decode_forward", ceil_div(rows * d.splits, d.cluster) * d.cluster, d.warps * kWarp,
            d.layout.bytes, device.stream, d.cluster},
           d);
    if (apart)
      launch(combine_splits<T>,
             {"combine_splits", f.p.B * f.p.Tq * combining_blocks(f.p), kCombineThreads,
              kCombineShared, device.stream},
             d);
  }

  // ---- backward ----

  static bool in_vectors_backward(const Problem& p) {
    return in_vectors<T>(p.queries, p.H) && in_vectors<T>(p.keys, p.H) && in_row(p.w, p.H) &&
           in_vectors<T>(p.values, p.Dv);
  }

  static float* of_fp32(const void* wanted, int64_t numbers, const Memory& memory) {
    return wanted ? static_cast<float*>(memory(numbers * int64_t(sizeof(float)))) : nullptr;
  }

  // Not for many queries, nor values of many columns.
  static bool backward(const Backward& all, const Device& device, const Memory& memory) {
    Backward g = in_splits(all, device);
    const Problem& p = g.p;
    const int entry = entry_of(p, in_vectors_backward(p));
    const int64_t shared = GradValuesShared<T>(nullptr, g, queries_of(entry)).bytes;
    if (p.Tq > kBackwardQueries || shared > kSharedLimit) return false;
    const bool through_tanh = g.grad_queries || g.grad_keys || g.grad_w;
    if (through_tanh) {
      const int64_t rows = p.B * p.Tq, moments = rows * g.splits * 2 * int64_t(sizeof(Sum));
      char* base = static_cast<char*>(memory(moments + rows * p.Tk * int64_t(sizeof(float))));
      g.moments = base;
      g.grad_scores = base + moments;
    }
    launch(all_grad_values[entry],
           {"grad_values", p.B * g.splits, kDecodeThreads, shared, device.stream}, g);
    if (through_tanh) grad_keys(g, device, memory);
    return true;
  }

  // With the keys cut into parts, two of which a multiprocessor has; for more than four queries
  // into short ones, whose gradients are added up in shared memory.
  static Backward in_splits(Backward g, const Device& device) {
    const Problem& p = g.p;
    const int64_t even = ceil_div(p.B * p.Tk, larger(1, device.multiprocessors * int64_t(2)));
    g.split = p.Tq > 4 ? 32 : larger(32, smaller(even, 512));
    g.splits = ceil_div(p.Tk, g.split);
    return g;
  }

  static void grad_rows(const Backward& g, const Device& device) {
    const int64_t warps = smaller(kRowThreads / kWarp, ceil_div(g.p.Tk, kWarp));
    launch(gpu::grad_rows<T>,
           {"grad_rows", g.p.B * g.p.Tq, int(warps) * kWarp, warps * int64_t(sizeof(Sum)),
            device.stream},
           g);
  }

  static void grad_keys(const Backward& all, const Device& device, const Memory& memory) {
    Backward g = in_splits(all, device);
    const Problem& p = g.p;
    g.queries_parts = of_fp32(g.grad_queries, g.splits * p.B * p.Tq * p.H, memory);
    g.w_parts = of_fp32(g.grad_w, g.splits * p.B * p.H, memory);
    const int entry = entry_of(p, in_vectors_backward(p));
    const int64_t shared = GradKeysShared<T>(nullptr, g, queries_of(entry)).bytes;
    launch(all_grad_keys[entry],
           {"grad_keys", p.B * g.splits, kDecodeThreads, shared, device.stream}, g);
    sum_parts(g, device);
  }

  static void sum_parts(const Backward& g, const Device& device) {
    const Problem& p = g.p;
    SumParts sums;
    if (g.w_parts != nullptr) sums.w = {g.w_parts, g.grad_w, g.splits * p.B, p.H};
    if (g.queries_parts != nullptr)
      sums.queries = {g.queries_parts, g.grad_queries, g.splits, p.B * p.Tq * p.H};
    const int64_t blocks =
        ceil_div(sums.w.columns, kSumColumns) + ceil_div(sums.queries.columns, kSumColumns);
    const int threads = sums.queries.columns > 0 ? kDecodeThreads : kSumThreads;  // few rows each
    launch(gpu::sum_parts<T>,
           {"sum_parts", blocks, threads, threads / kWarp * kSumColumns * int64_t(sizeof(float)),
            device.stream},
           sums);
  }
};

template <class T>
constexpr Kernels kernels_of() {
  using All = Attend<T>;
  Kernels of{All::serves,    All::projects,  All::forward, All::backward,
             All::grad_rows, All::grad_keys, All::clusters};
  if constexpr (sizeof(T) == 2) {
    of.why_not_decode = Decode<T>::why_not;
    of.decode = Decode<T>::template run<DecoderForward>;
    of.decode_backward = Decode<T>::template run<DecoderBackward>;
  }
  of.why_not = All::problem;
  return of;
}

}  // namespace bahdanau_fast::gpu

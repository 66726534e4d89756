// How forward and backward are cut into launches. Host code without torch.
#pragma once

#include "common/limits.h"
#include "cuda/kernels/decode.h"
#include "cuda/kernels/decode_backward.h"
#include "cuda/kernels/types.h"
#include "cuda/runtime/launch.h"

namespace bahdanau_fast::gpu {

// A cluster shares W_q from so many bytes on; below, each of its blocks reads all of it.
// not measured: no row projects in the launch; steps of 64 and 128 hidden units would.
constexpr int64_t kSharedWeight = 16 * 1024;
// Forward: most splits of a row for the sake of idle multiprocessors, scores of a block, keys that
// a warp adds up one after the other in fp32, whose roundings grow with the sum, and bytes of
// shared memory with rings and without scores.
// not measured: others; (64,1,50,512) with one and two splits, (1,1,40000,512) with 132 and 512.
constexpr int64_t kMostSplits = 256, kMostScores = 4096, kMostInTurn = 128, kRingLimit = 76 * 1024;

template <class T>
struct Attend {
  // The kernels for one query, for four at a time, and the plain one, for rows of any alignment.
  template <class P>
  using Entries = void (*const[3])(P);
  static constexpr Entries<DecodeBackward> decode_backwards = {
      decode_backward<T, 1, true>, decode_backward<T, 4, true>, decode_backward<T, 4, false>};
  static constexpr Entries<GradKeys> all_grad_keys = {
      gpu::grad_keys<T, 1, true>, gpu::grad_keys<T, 4, true>, gpu::grad_keys<T, 4, false>};
  static int entry_of(const Problem& p, bool vectors) { return !vectors ? 2 : p.Tq == 1 ? 0 : 1; }

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
    using Sizes = DecodeSizes<T, QT, floats>;
    return {decode_forward<T, QT, floats, vectors>,
            QT,
            Sizes::columns,
            Sizes::KU,
            Sizes::blocks,
            Sizes::layout};
  }
  static constexpr Step steps[] = {step<1, 16, true>(), step<1, 32, true>(), step<4, 16, true>(),
                                   step<4, 16, false>()};

  static const Step& step_of(const Problem& p) {
    if (!in_vectors<T>(p.keys, p.H) || !in_vectors<T>(p.values, p.Dv)) return steps[3];
    return steps[p.Tq > 1 ? 2 : p.Dv > steps[0].columns ? 1 : 0];
  }

  // What a launch may project: rows in vectors, and all queries at once.
  static bool projects(const Forward& f) {
    const Step& step = step_of(f.p);
    return &step != &steps[3] && f.p.Tq <= step.queries && in_vectors<T>(f.p.queries, f.Dq) &&
           in_row(f.w_q, f.Dq);
  }

  // Splits the keys of a row if there are too few rows for the GPU, or if the scores of a whole row
  // need too much shared memory.
  static DecodeForward plan(const Forward& f, const Device& device) {
    const Problem& p = f.p;
    const Step& step = step_of(p);
    DecodeForward d;
    d.p = p;
    d.w_q = f.w_q;
    d.Dq = f.Dq;
    d.query_groups = ceil_div(p.Tq, step.queries);
    d.column_groups = larger(1, ceil_div(p.Dv, step.columns));
    if (f.w_q != nullptr && p.H * f.Dq * int64_t(sizeof(T)) >= kSharedWeight)
      d.cluster = device.cluster;
    while (d.warps > 1 && step.layout(d).bytes > kRingLimit) d.warps /= 2;
    const int64_t pass = d.warps * step.keys, least = ceil_div(d.warps * 4, pass) * pass;
    int64_t splits = int64_t(device.multiprocessors) * step.blocks / rows_of(d);
    splits = larger(1, smaller(smaller(splits, kMostSplits), ceil_div(p.Tk, least)));
    splits = larger(splits, ceil_div(p.Tk, kMostScores / step.queries));
    if (sizeof(T) == 4) splits = larger(splits, ceil_div(p.Tk, kMostInTurn * d.warps));
    d.split = ceil_div(ceil_div(p.Tk, splits), pass) * pass;
    d.splits = ceil_div(p.Tk, d.split);
    d.layout = step.layout(d);
    return d;
  }

  static int64_t rows_of(const DecodeForward& d) {
    return d.p.B * d.query_groups * d.column_groups;
  }

  // Sets the pointers into the workspace at `base`; returns its size, also for a null base.
  static int64_t lay_out(DecodeForward* d, const Forward& f, const Device& device, char* base) {
    Carver from{base};
    d->context = f.context;
    d->weights = f.weights;
    d->narrow = f.narrow;
    d->counts = f.counts;
    d->counts_row = f.counts_row;
    if (d->splits == 1) return 0;
    const Step& step = step_of(d->p);
    const int64_t rows = rows_of(*d), parts = rows * d->splits * step.queries;
    d->arrived = device.counters != nullptr ? device.counters : from.take<unsigned>(rows);
    d->maxima = from.take<float>(parts);
    d->sums = from.take<float>(parts);
    d->contexts = from.take<float>(parts * step.columns);
    const bool apart = f.narrow && f.weights != nullptr;
    d->scores = apart ? from.take<float>(d->p.B * d->p.Tq * d->p.Tk) : f.weights;
    return from.used;
  }

  // Blocks of the largest cluster that every kernel launched in clusters can have.
  static int clusters() {
    int least = 8;
    for (int k = 0; k < 3; ++k) {
      least = smaller(least, largest_cluster(steps[k].kernel, kMostWarps * kWarp));
      least = smaller(least, largest_cluster(decode_backwards[k], kDecodeThreads));
    }
    return least;
  }

  static const char* problem() { return why_not(steps[0].kernel); }

  static int64_t counters(const Forward& f, const Device& device) {
    const DecodeForward d = plan(f, device);
    return d.splits > 1 ? rows_of(d) : 0;
  }

  static int64_t forward_workspace(const Forward& f, const Device& device) {
    DecodeForward d = plan(f, device);
    return lay_out(&d, f, device, nullptr);
  }

  static void forward(const Forward& f, const Device& device, void* workspace) {
    DecodeForward d = plan(f, device);
    lay_out(&d, f, device, static_cast<char*>(workspace));
    const int64_t rows = rows_of(d);
    if (d.splits > 1 && device.counters == nullptr)
      fill_zero(d.arrived, rows * int64_t(sizeof(unsigned)), device.stream);
    const Step& step = step_of(f.p);
    launch(step.kernel,
           {"decode_forward", ceil_div(rows * d.splits, d.cluster) * d.cluster, d.warps * kWarp,
            d.layout.bytes, device.stream, d.cluster},
           d);
  }

  // ---- backward ----

  static bool in_vectors_backward(const Problem& p) {
    return in_vectors<T>(p.queries, p.H) && in_vectors<T>(p.keys, p.H) && in_row(p.w, p.H) &&
           in_vectors<T>(p.values, p.Dv);
  }

  static int64_t decode_backward_shared(const DecodeBackward& d) {
    return entry_of(d.p, in_vectors_backward(d.p)) == 0
               ? DecodeBackwardShared<T, 1>(nullptr, d.p, d.split).bytes
               : DecodeBackwardShared<T, 4>(nullptr, d.p, d.split).bytes;
  }

  // One launch aims at two blocks for each multiprocessor, within the size of a cluster and with at
  // least 32 keys each. False for many queries, if a block is too small, or for a few long rows
  // that would leave much of the GPU idle.
  static bool plan_backward(const Backward& g, const Device& device, DecodeBackward* d) {
    const Problem& p = g.p;
    if (p.Tq > kBackwardQueries) return false;
    int64_t splits = 1;
    while (2 * splits <= device.cluster && p.B * splits < 2 * device.multiprocessors &&
           p.Tk > 32 * splits)
      splits *= 2;
    *d = {p, splits, ceil_div(p.Tk, splits), g.weights, g.grad_context, g.grad_weights, g.narrow};
    d->grad_queries = g.grad_queries;
    d->grad_keys = g.grad_keys;
    d->grad_values = g.grad_values;
    d->w_parts = g.w_parts;
    if (p.B * splits < device.multiprocessors && d->split > 32) return false;
    return decode_backward_shared(*d) <= kSharedLimit;
  }

  static void backward(const Backward& g, const Device& device) {
    DecodeBackward d;
    plan_backward(g, device, &d);
    const Launch at{"decode_backward",         g.p.B * d.splits, kDecodeThreads,
                    decode_backward_shared(d), device.stream,    int(d.splits)};
    launch(decode_backwards[entry_of(g.p, in_vectors_backward(g.p))], at, d);
  }

  // Keys of a part, two of which a multiprocessor has.
  static int64_t grad_keys_split(const Problem& p, const Device& device) {
    if (p.Tq > 4) return 32;  // their gradients are added up in shared memory
    const int64_t even = ceil_div(p.B * p.Tk, larger(1, device.multiprocessors * int64_t(2)));
    return larger(32, smaller(even, 512));
  }

  static int64_t backward_splits(const Backward& g, const Device& device) {
    DecodeBackward d;
    if (plan_backward(g, device, &d)) return 0;
    return ceil_div(g.p.Tk, grad_keys_split(g.p, device));
  }

  static void grad_rows(const Backward& g, const Device& device) {
    const GradRows rows{g.p,           g.weights, g.products, g.grad_weights,
                        g.grad_scores, g.dropped, g.narrow};
    const int64_t warps = smaller(kRowThreads / kWarp, ceil_div(g.p.Tk, kWarp));
    launch(gpu::grad_rows<T>,
           {"grad_rows", g.p.B * g.p.Tq, int(warps) * kWarp, warps * int64_t(sizeof(Sum)),
            device.stream},
           rows);
  }

  static void grad_keys(const Backward& g, const Device& device) {
    const int64_t split = grad_keys_split(g.p, device), splits = ceil_div(g.p.Tk, split);
    const GradKeys d{g.p, splits, split, g.grad_scores, g.grad_keys, g.queries_parts, g.w_parts};
    const int entry = entry_of(g.p, in_vectors_backward(g.p));
    const int64_t shared = entry == 0 ? GradKeysShared<T, 1>(nullptr, g.p, split).bytes
                                      : GradKeysShared<T, 4>(nullptr, g.p, split).bytes;
    launch(all_grad_keys[entry],
           {"grad_keys", g.p.B * splits, kDecodeThreads, shared, device.stream}, d);
  }

  static void sum_parts(const Backward& g, int64_t splits, const Device& device) {
    const Problem& p = g.p;
    SumParts sums;
    if (g.w_parts != nullptr) sums.w = {g.w_parts, g.grad_w, splits * p.B, p.H};
    if (g.queries_parts != nullptr)
      sums.queries = {g.queries_parts, g.grad_queries, splits, p.B * p.Tq * p.H};
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
  return {All::serves,    All::projects,        All::counters, All::forward_workspace,
          All::forward,   All::backward_splits, All::backward, All::grad_rows,
          All::grad_keys, All::sum_parts,       All::clusters, All::problem};
}

}  // namespace bahdanau_fast::gpu

// How forward and backward are cut into launches. Host code without torch.
#pragma once

#include "common/limits.h"
#include "cuda/kernels/decode_backward.h"
#include "cuda/kernels/raw_keys.h"
#include "cuda/kernels/types.h"

namespace bahdanau_fast::gpu {

// A cluster shares W_q from so many bytes on; below, each of its blocks reads all of it.
constexpr int64_t kSharedWeight = 16 * 1024;

template <class T>
struct Attend {
  // The kernels for one query, for four at a time, and the plain one, for rows of any alignment.
  template <class P>
  using Entries = void (*const[3])(P);
  static constexpr Entries<DecodeForward> decode_forwards = {
      decode_forward<T, 1, true>, decode_forward<T, 4, true>, decode_forward<T, 4, false>};
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

  static bool in_vectors_forward(const Forward& f) {
    return in_vectors<T>(f.p.keys, f.w_k == nullptr ? f.p.H : f.Dk) &&
           in_vectors<T>(f.p.values, f.p.Dv);
  }

  // What a launch may project: rows in vectors, for tensor cores of 16 bits.
  static bool projects(const Forward& f, const Device& device) {
    if (!in_vectors_forward(f)) return false;
    if (f.w_q != nullptr && !(in_vectors<T>(f.p.queries, f.Dq) && in_row(f.w_q, f.Dq)))
      return false;
    if (f.w_k == nullptr) return true;
    if (sizeof(T) != 2 || f.p.Tq > kRawQueries || !in_row(f.w_k, f.Dk)) return false;
    return raw_shared(raw_keys(f, plan(f, device))) <= kSharedLimit;
  }

  static int64_t decode_shared(const DecodeForward& d, bool vectors) {
    return entry_of(d.p, vectors) == 0 ? DecodeShared<T, 1>(nullptr, d).bytes
                                       : DecodeShared<T, 4>(nullptr, d).bytes;
  }

  static int64_t raw_shared(const RawKeys& r) {
    if constexpr (sizeof(T) == 2)
      return r.d.p.Tq == 1 ? RawShared<T, 1>(nullptr, r).bytes : RawShared<T, 4>(nullptr, r).bytes;
    return 0;
  }

  static RawKeys raw_keys(const Forward& f, const DecodeForward& d) {
    const View &keys = f.p.keys, &values = f.p.values;
    RawKeys r{d, f.w_k, f.bias, f.Dk};
    r.values_are_keys = values.data == keys.data && values.batch_stride == keys.batch_stride &&
                        values.row_stride == keys.row_stride && f.p.Dv == f.Dk &&
                        f.p.seed == nullptr;
    return r;
  }

  // Splits the keys of a row if there are too few rows for the GPU, or if the scores of a whole row
  // need too much shared memory.
  static DecodeForward plan(const Forward& f, const Device& device) {
    const Problem& p = f.p;
    DecodeForward d;
    d.p = p;
    d.w_q = f.w_q;
    d.Dq = f.Dq;
    const int64_t smallest = f.w_k != nullptr ? kRawTile : 32;
    // Two blocks on each multiprocessor, none that is alone with a part of a pass.
    int64_t splits = smaller(128, device.multiprocessors * int64_t(2) / p.B);
    splits = larger(1, smaller(splits, p.Tk / smallest));
    d.split = 0;
    const int64_t left = kSharedLimit - 1024 - decode_shared(d, false);
    const int64_t room = smaller(32 * 1024, left) / (p.Tq * int64_t(sizeof(float)));
    splits = larger(splits, ceil_div(p.Tk, room / 32 * 32));
    const int64_t weight_bytes = p.H * f.Dq * int64_t(sizeof(T));
    if (f.w_q != nullptr && weight_bytes >= kSharedWeight) d.cluster = device.cluster;
    d.split = ceil_div(p.Tk, splits);
    if (f.w_k != nullptr || splits > 1) d.split = ceil_div(d.split, smallest) * smallest;
    d.splits = ceil_div(p.Tk, d.split);
    return d;
  }

  // Sets the pointers into the workspace at `base`; returns its size, also for a null base.
  static int64_t lay_out(DecodeForward* d, const Forward& f, const Device& device, char* base) {
    Carver from{base};
    d->context = f.context;
    d->weights = f.weights;
    if (d->splits == 1) return 0;
    const Problem& p = f.p;
    const int64_t parts = p.B * p.Tq * d->splits;
    d->arrived = device.counters != nullptr ? device.counters : from.take<unsigned>(p.B);
    d->maxima = from.take<float>(parts);
    d->sums = from.take<float>(parts);
    d->contexts = from.take<float>(parts * p.Dv);
    return from.used;
  }

  // Blocks of the largest cluster that every kernel launched in clusters can have.
  static int clusters() {
    int least = 8;
    for (int k = 0; k < 3; ++k) {
      if (k < 2) least = smaller(least, largest_cluster(decode_forwards[k], kDecodeThreads));
      least = smaller(least, largest_cluster(decode_backwards[k], kDecodeThreads));
    }
    if constexpr (sizeof(T) == 2) {
      least = smaller(least, largest_cluster(raw_keys_forward<T, 1>, kDecodeThreads));
      least = smaller(least, largest_cluster(raw_keys_forward<T, 4>, kDecodeThreads));
    }
    return least;
  }

  static const char* problem() { return why_not(decode_forwards[0]); }

  static int64_t counters(const Forward& f, const Device& device) {
    return plan(f, device).splits > 1 ? f.p.B : 0;
  }

  static int64_t forward_workspace(const Forward& f, const Device& device) {
    DecodeForward d = plan(f, device);
    return lay_out(&d, f, device, nullptr);
  }

  static void forward(const Forward& f, const Device& device, void* workspace) {
    DecodeForward d = plan(f, device);
    lay_out(&d, f, device, static_cast<char*>(workspace));
    if (d.splits > 1 && device.counters == nullptr)
      fill_zero(d.arrived, f.p.B * int64_t(sizeof(unsigned)), device.stream);
    const int64_t blocks = ceil_div(f.p.B * d.splits, d.cluster) * d.cluster;
    if constexpr (sizeof(T) == 2) {
      if (f.w_k != nullptr) {
        const RawKeys r = raw_keys(f, d);
        const Launch at{"raw_keys_forward", blocks,        kDecodeThreads,
                        raw_shared(r),      device.stream, d.cluster};
        return f.p.Tq == 1 ? launch(raw_keys_forward<T, 1>, at, r)
                           : launch(raw_keys_forward<T, 4>, at, r);
      }
    }
    const bool vectors = in_vectors_forward(f);
    const Launch at{"decode_forward",          blocks,        kDecodeThreads,
                    decode_shared(d, vectors), device.stream, d.cluster};
    launch(decode_forwards[entry_of(f.p, vectors)], at, d);
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
    *d = {p, splits, ceil_div(p.Tk, splits), g.weights, g.grad_context, g.grad_weights};
    d->grad_queries = g.grad_queries;
    d->grad_keys = g.grad_keys;
    d->grad_values = g.grad_values;
    d->w_parts = g.w_parts;
    const int64_t longest = device.cluster > 1 ? 512 : 128;
    if (p.B * splits < device.multiprocessors && d->split > longest) return false;
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
    const GradRows rows{g.p, g.weights, g.products, g.grad_weights, g.grad_scores, g.dropped};
    launch(gpu::grad_rows<T>,
           {"grad_rows", g.p.B * g.p.Tq, kRowThreads, kRowThreads / kWarp * int64_t(sizeof(Sum)),
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
};

template <class T>
constexpr Kernels kernels_of() {
  using All = Attend<T>;
  return {All::serves,    All::projects,        All::counters, All::forward_workspace,
          All::forward,   All::backward_splits, All::backward, All::grad_rows,
          All::grad_keys, All::clusters,        All::problem};
}

}  // namespace bahdanau_fast::gpu

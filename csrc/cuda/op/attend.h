// How forward and backward are cut into launches. Host code without torch.
#pragma once

#include "common/limits.h"
#include "cuda/kernels/decode_backward.h"
#include "cuda/kernels/grad_scores.h"
#include "cuda/kernels/grad_tanh.h"
#include "cuda/kernels/matmul.h"
#include "cuda/kernels/raw_keys.h"
#include "cuda/kernels/scores.h"
#include "cuda/kernels/types.h"

namespace bahdanau_fast::gpu {

// A cluster shares W_q from so many bytes on; below, each of its blocks reads all of it.
constexpr int64_t kSharedWeight = 16 * 1024;

template <class T>
struct Attend {
  // ---- forward ----

  static int64_t decode_shared(const DecodeForward& d) {
    return d.p.Tq == 1 ? DecodeShared<T, 1>(nullptr, d).bytes
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
  // need too much shared memory. False if a block is too small for them, or for many queries.
  static bool plan_decode(const Forward& f, const Device& device, DecodeForward* d) {
    const Problem& p = f.p;
    const bool raw = f.w_k != nullptr;
    if (p.Tq > (raw ? kRawQueries : kDecodeQueries) || (raw && sizeof(T) != 2)) return false;
    const int64_t smallest = raw ? kRawTile : 32;
    const int64_t room = 32 * 1024 / (p.Tq * int64_t(sizeof(float)));
    // Two blocks on each multiprocessor, none that is alone with a part of a pass.
    int64_t splits = smaller(128, device.multiprocessors * int64_t(2) / p.B);
    splits = larger(1, smaller(splits, p.Tk / smallest));
    splits = larger(splits, ceil_div(p.Tk, room));
    d->p = p;
    d->w_q = f.w_q;
    d->Dq = f.Dq;
    const int64_t weight_bytes = p.H * f.Dq * int64_t(sizeof(T));
    if (f.w_q != nullptr && weight_bytes >= kSharedWeight) d->cluster = device.cluster;
    d->split = ceil_div(p.Tk, splits);
    if (raw || splits > 1) d->split = ceil_div(d->split, smallest) * smallest;
    d->splits = ceil_div(p.Tk, d->split);
    return (raw ? raw_shared(raw_keys(f, *d)) : decode_shared(*d)) <= kSharedLimit;
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
    int least = smaller(largest_cluster(decode_forward<T, 1>, kDecodeThreads),
                        largest_cluster(decode_forward<T, 4>, kDecodeThreads));
    least = smaller(least, largest_cluster(decode_backward<T, 1>, kDecodeThreads));
    least = smaller(least, largest_cluster(decode_backward<T, 4>, kDecodeThreads));
    if constexpr (sizeof(T) == 2) {
      least = smaller(least, largest_cluster(raw_keys_forward<T, 1>, kDecodeThreads));
      least = smaller(least, largest_cluster(raw_keys_forward<T, 4>, kDecodeThreads));
    }
    return least;
  }

  static const char* problem() { return why_not(decode_forward<T, 1>); }

  static bool is_one_launch(const Forward& f, const Device& device) {
    DecodeForward d;
    return plan_decode(f, device, &d);
  }

  static int64_t counters(const Forward& f, const Device& device) {
    DecodeForward d;
    return plan_decode(f, device, &d) && d.splits > 1 ? f.p.B : 0;
  }

  static int64_t forward_workspace(const Forward& f, const Device& device) {
    DecodeForward d;
    if (plan_decode(f, device, &d)) return lay_out(&d, f, device, nullptr);
    return f.weights == nullptr ? f.p.B * f.p.Tq * f.p.Tk * int64_t(sizeof(float)) : 0;
  }

  static void forward(const Forward& f, const Device& device, void* workspace) {
    DecodeForward d;
    if (plan_decode(f, device, &d))
      decode(&d, f, device, workspace);
    else
      many_queries(f, device, workspace);
  }

  static void decode(DecodeForward* d, const Forward& f, const Device& device, void* workspace) {
    lay_out(d, f, device, static_cast<char*>(workspace));
    if (d->splits > 1 && device.counters == nullptr)
      fill_zero(d->arrived, f.p.B * int64_t(sizeof(unsigned)), device.stream);
    const int64_t blocks = ceil_div(f.p.B * d->splits, d->cluster) * d->cluster;
    if constexpr (sizeof(T) == 2) {
      if (f.w_k != nullptr) {
        const RawKeys r = raw_keys(f, *d);
        const Launch at{"raw_keys_forward", blocks,        kDecodeThreads,
                        raw_shared(r),      device.stream, d->cluster};
        return f.p.Tq == 1 ? launch(raw_keys_forward<T, 1>, at, r)
                           : launch(raw_keys_forward<T, 4>, at, r);
      }
    }
    const Launch at{"decode_forward",  blocks,        kDecodeThreads,
                    decode_shared(*d), device.stream, d->cluster};
    if (f.p.Tq == 1)
      launch(decode_forward<T, 1>, at, *d);
    else
      launch(decode_forward<T, 4>, at, *d);
  }

  static void many_queries(const Forward& f, const Device& device, void* workspace) {
    const Problem& p = f.p;
    void* scores = f.weights == nullptr ? workspace : f.weights;
    const int64_t tiles = p.B * ceil_div(p.Tq, kTile) * ceil_div(p.Tk, kTile);
    launch(tile_scores<T>,
           {"tile_scores", tiles, kTileThreads, ScoresShared(nullptr).bytes, device.stream},
           Scores{p, scores});
    const int64_t scratch = kRowThreads / kWarp * 16;
    launch(row_softmax<T>, {"row_softmax", p.B * p.Tq, kRowThreads, scratch, device.stream},
           Softmax{p, scores});
    product<Product::context>({p, scores, {}, {}, f.context}, device);
  }

  template <Product which>
  static void product(const Matmul& m, const Device& device) {
    using Task = ProductTask<T, which>;
    launch(weights_product<T, which>,
           {"weights_product", Task::blocks(m.p), kProductThreads, Task::shared_bytes(),
            device.stream},
           m);
  }

  // ---- backward ----

  struct BackwardSpace {
    float *grad_scores, *queries_parts, *w_parts;
    int64_t bytes;

    BackwardSpace(const Backward& g, char* base) {
      const Problem& p = g.p;
      Carver from{base};
      const int64_t chunks = grad_chunks(p.Tk);
      grad_scores = from.take<float>(p.B * p.Tq * p.Tk);
      const bool some = g.grad_queries != nullptr, some_w = g.grad_w != nullptr;
      queries_parts = some ? from.take<float>(chunks * p.B * p.Tq * p.H) : nullptr;
      w_parts = some_w ? from.take<float>(chunks * p.B * p.H) : nullptr;
      bytes = from.used;
    }
  };

  static int64_t backward_workspace(const Backward& g, const Device& device) {
    DecodeBackward d;
    if (plan_decode_backward(g, device, &d))
      return g.grad_w != nullptr ? g.p.B * g.p.H * int64_t(sizeof(float)) : 0;
    return BackwardSpace(g, nullptr).bytes;
  }

  static int64_t decode_backward_shared(const DecodeBackward& d) {
    return d.p.Tq == 1 ? DecodeBackwardShared<T, 1>(nullptr, d.p, d.split).bytes
                       : DecodeBackwardShared<T, 4>(nullptr, d.p, d.split).bytes;
  }

  // Aims at two blocks for each multiprocessor, within the size of a cluster and with at least 32
  // keys each. False for many queries, if a block is too small, or for a few long rows that would
  // leave much of the GPU idle.
  static bool plan_decode_backward(const Backward& g, const Device& device, DecodeBackward* d) {
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
    if (p.B * splits < device.multiprocessors && d->split > 512) return false;
    return decode_backward_shared(*d) <= kSharedLimit;
  }

  static void step_backward(const Backward& g, DecodeBackward* d, const Device& device,
                            void* workspace) {
    const Problem& p = g.p;
    if (g.grad_w != nullptr) d->w_parts = workspace;
    const Launch at{"decode_backward",          p.B * d->splits, kDecodeThreads,
                    decode_backward_shared(*d), device.stream,   int(d->splits)};
    if (p.Tq == 1)
      launch(decode_backward<T, 1>, at, *d);
    else
      launch(decode_backward<T, 4>, at, *d);
    if (g.grad_w != nullptr) sum(SumParts{workspace, p.B, p.H, g.grad_w}, device);
  }

  static void backward(const Backward& g, const Device& device, void* workspace) {
    DecodeBackward d;
    if (plan_decode_backward(g, device, &d)) return step_backward(g, &d, device, workspace);
    const BackwardSpace space(g, static_cast<char*>(workspace));
    const bool through_tanh =
        g.grad_queries != nullptr || g.grad_keys != nullptr || g.grad_w != nullptr;
    if (!decode_scores(g, space, device)) many_scores(g, space, device, through_tanh);
    if (!through_tanh) return;
    launch(softmax_grad<T>,
           {"softmax_grad", g.p.B * g.p.Tq, kGradRowThreads, kGradRowThreads / kWarp * 16,
            device.stream},
           SoftmaxGrad{g.p, g.weights, space.grad_scores});
    if (g.p.H > 0) tanh(g, space, device);
  }

  static bool decode_scores(const Backward& g, const BackwardSpace& space, const Device& device) {
    const Problem& p = g.p;
    if (p.Tq > kDecodeQueries) return false;
    DecodeGrad d{p, 1, 1, g.weights, g.grad_context, g.grad_weights};
    d.grad_scores = space.grad_scores;
    d.grad_values = g.grad_values;
    const int64_t even = ceil_div(p.B * p.Tk, larger(1, device.multiprocessors * int64_t(4)));
    d.split = smaller(p.Tk, larger(kDecodeWarps, smaller(even, 256)));
    d.splits = ceil_div(p.Tk, d.split);
    const int64_t shared = DecodeGradShared<T>(nullptr, p, d.split).bytes;
    if (shared > kSharedLimit) return false;
    launch(decode_grad_weights<T>,
           {"decode_grad_weights", p.B * d.splits, kDecodeThreads, shared, device.stream}, d);
    return true;
  }

  static void many_scores(const Backward& g, const BackwardSpace& space, const Device& device,
                          bool through_tanh) {
    Matmul m{g.p, g.weights, g.grad_context, g.grad_weights, space.grad_scores};
    if (through_tanh) product<Product::grad_weights>(m, device);
    m.out = g.grad_values;
    if (m.out != nullptr) product<Product::grad_values>(m, device);
  }

  static void tanh(const Backward& g, const BackwardSpace& space, const Device& device) {
    const Problem& p = g.p;
    const int64_t chunks = grad_chunks(p.Tk), slices = ceil_div(p.H, kWarp);
    const int across = p.Tq <= 4 ? 1 : p.Tq <= 8 ? 2 : p.Tq <= 16 ? 4 : 8;
    const GradTanh t{p, across, space.grad_scores, g.grad_keys, space.queries_parts, space.w_parts};
    Launch at{"grad_tanh", p.B * chunks * slices, kGradThreads, 0, device.stream};
    if (p.Tq == 1) {
      at.shared = GradTanhShared<1>(nullptr).bytes;
      launch(grad_tanh<T, 1>, at, t);
    } else {
      at.shared = GradTanhShared<4>(nullptr).bytes;
      launch(grad_tanh<T, 4>, at, t);
    }
    if (g.grad_queries != nullptr)
      sum(SumParts{space.queries_parts, chunks, p.B * p.Tq * p.H, g.grad_queries}, device);
    if (g.grad_w != nullptr) sum(SumParts{space.w_parts, p.B * chunks, p.H, g.grad_w}, device);
  }

  static void sum(const SumParts& s, const Device& device) {
    launch(sum_parts<T>,
           {"sum_parts", ceil_div(s.size, kWarp), kGradThreads,
            kGradThreads * int64_t(sizeof(float)), device.stream},
           s);
  }
};

template <class T>
constexpr Kernels kernels_of() {
  using All = Attend<T>;
  return {All::is_one_launch,      All::counters, All::forward_workspace, All::forward,
          All::backward_workspace, All::backward, All::clusters,          All::problem};
}

}  // namespace bahdanau_fast::gpu

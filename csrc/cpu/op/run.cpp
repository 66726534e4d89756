#include "run.h"

#include <algorithm>

namespace bahdanau_fast {
namespace {

// Problems are cut into tasks by their sizes alone: results are the same for any number of threads.
constexpr int64_t kEnoughTasks = 16;
// Memory for the queries of a row in a task of the backward: half of a second-level cache.
constexpr int64_t kQueryBytes = 512 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t parts_per_row(int64_t rows) { return ceil_div(kEnoughTasks, rows); }

ForwardPlan plan_forward(const Problem& p) {
  ForwardPlan plan;
  plan.query_block = std::min(p.Tq, kQueryBlock);
  plan.query_blocks = ceil_div(p.Tq, plan.query_block);
  plan.chunk = p.Tk;
  const int64_t smallest =
      64;  // keys; combining the sums of smaller chunks takes longer than they save
  if (p.Tk >= 2 * smallest && p.B * p.Tq * p.Tk * p.H > kMaxFp64CpuElements) {
    const int64_t even = ceil_div(p.Tk, parts_per_row(p.B * plan.query_blocks));
    plan.chunk = even > smallest ? even : smallest;
  }
  plan.chunks = ceil_div(p.Tk, plan.chunk);
  return plan;
}

void forward(const Inputs& in, ForwardOut out) {
  const Problem& p = in.problem;
  const Kernels& k = kernels(in.kind);
  const ForwardPlan plan = plan_forward(p);
  const int64_t bytes = size_of(in.kind), rows = p.B * p.Tq;
  const bool split = plan.chunks > 1 && out.logits == nullptr;
  Buffer scores(split ? rows * p.Tk * bytes : 0);
  Buffer parts(split ? rows * plan.chunks * (2 + p.Dv) * bytes : 0);
  if (split) {
    out.scores = scores.get();
    out.maxima = parts.get();
    out.sums = static_cast<char*>(parts.get()) + rows * plan.chunks * bytes;
    out.contexts = static_cast<char*>(parts.get()) + 2 * rows * plan.chunks * bytes;
  }
  const int64_t work_bytes = k.forward_workspace(p, plan) * bytes;
  const int64_t tasks = p.B * plan.query_blocks * plan.chunks;
  parallel(
      tasks, plan.query_block * plan.chunk * (p.H + p.Dv / 4), [&] { return Buffer(work_bytes); },
      [&](int64_t task, const Buffer& work) { k.forward(p, plan, out, task, work.get()); });
  if (split)
    parallel(
        rows, p.Tk + plan.chunks * p.Dv, [] { return 0; },
        [&](int64_t row, int) { k.combine(p, plan, out, row); });
}

}  // namespace

void run_forward(const Inputs& in, void* context, void* weights) {
  ForwardOut out;
  out.context = context;
  out.weights = weights;
  forward(in, out);
}

void run_scores(const Inputs& in, void* scores) {
  ForwardOut out;
  out.logits = scores;
  forward(in, out);
}

void run_backward(const Inputs& in, Backward g, const SummedGradients& summed) {
  const Problem& p = in.problem;
  const Kernels& k = kernels(in.kind);
  const auto workspace = p.pools       ? k.grad_of_heads_workspace
                         : p.from_sums ? k.grad_of_sums_workspace
                                       : k.grad_tanh_workspace;
  const auto gradients = p.pools ? k.grad_of_heads : p.from_sums ? k.grad_of_sums : k.grad_tanh;
  const int64_t bytes = size_of(in.kind), w_size = (p.pools ? p.Tq : 1) * p.width;
  const int64_t w_f_size = p.inside.C * p.width, features_size = p.B * p.inside.C * p.Tk;
  Buffer w_parts(summed.w != nullptr ? p.B * w_size * bytes : 0);
  Buffer w_f_parts(summed.w_f != nullptr ? p.B * w_f_size * bytes : 0);
  if (summed.w != nullptr) g.grad_w = w_parts.get();
  if (summed.w_f != nullptr) g.grad_w_f = w_f_parts.get();
  const bool through_tanh =
      g.grad_queries || g.grad_keys || g.grad_gate || g.grad_w || summed.features || summed.w_f;

  // Tasks are whole batch rows if there are enough of them, else chunks of keys and then slices of
  // hidden units. Slices are also taken if the queries of a row do not fit the second-level cache.
  const int64_t parts = parts_per_row(p.B), line = 64;
  const int64_t fitting = kQueryBytes / (workspace(p, line) * bytes) * line;
  const int64_t even = ceil_div(ceil_div(p.width, parts), line) * line;
  const int64_t hidden = std::min({p.width, even, std::max(line, fitting)});
  const int64_t slices = hidden > 0 ? ceil_div(p.width, hidden) : 0;
  const int64_t chunk = parts == 1 ? p.Tk : std::max(line, ceil_div(p.Tk, parts));
  const int64_t chunks = ceil_div(p.Tk, chunk);
  const int64_t area = p.Tq * p.Tk, work_bytes = workspace(p, hidden) * bytes;
  const int64_t features_width = ceil_div(features_size, line) * line;  // for whole vectors
  Buffer feature_parts(summed.features != nullptr ? slices * features_width * bytes : 0);
  const auto scores_chunk = [&](int64_t b, int64_t c, void* scores) {
    k.grad_scores(p, g, b, c * chunk, std::min(p.Tk, (c + 1) * chunk), scores);
  };
  const auto tanh_slice = [&](int64_t b, int64_t s, const void* scores, void* work) {
    Backward of_slice = g;
    if (summed.features != nullptr)
      of_slice.grad_features = static_cast<char*>(feature_parts.get()) + s * features_width * bytes;
    if (through_tanh)
      gradients(p, of_slice, b, s * hidden, std::min(p.width, (s + 1) * hidden), scores, work);
  };
  if (parts == 1) {
    parallel(
        p.B, 4 * area * p.H, [&] { return Buffer(area * bytes + work_bytes); },
        [&](int64_t b, const Buffer& own) {
          void* work = static_cast<char*>(own.get()) + area * bytes;
          scores_chunk(b, 0, own.get());
          k.grad_softmax(p, g, b, own.get());
          for (int64_t s = 0; s < slices; ++s) tanh_slice(b, s, own.get(), work);
        });
  } else {
    Buffer scores(p.B * area * bytes);
    const auto nothing = [] { return 0; };
    const auto scores_of_row = [&](int64_t b) {
      return static_cast<void*>(static_cast<char*>(scores.get()) + b * area * bytes);
    };
    parallel(p.B * chunks, p.Tq * chunk * p.Dv, nothing, [&](int64_t task, int) {
      scores_chunk(task / chunks, task % chunks, scores_of_row(task / chunks));
    });
    parallel(p.B, 2 * area, nothing,
             [&](int64_t b, int) { k.grad_softmax(p, g, b, scores_of_row(b)); });
    parallel(
        p.B * slices, 4 * area * hidden, [&] { return Buffer(work_bytes); },
        [&](int64_t task, const Buffer& work) {
          tanh_slice(task / slices, task % slices, scores_of_row(task / slices), work.get());
        });
  }
  if (summed.w != nullptr) k.sum_rows(w_parts.get(), p.B, w_size, p.pools ? w_size : p.H, summed.w);
  if (summed.w_f != nullptr) k.sum_rows(w_f_parts.get(), p.B, w_f_size, w_f_size, summed.w_f);
  if (summed.features != nullptr)
    k.sum_rows(feature_parts.get(), slices, features_width, features_size, summed.features);
}

}  // namespace bahdanau_fast

// The operators of bahdanau_fast/ops/attend.py for CPU tensors.
#include "attend.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>

namespace bahdanau_fast {
namespace {

std::tuple<Tensor, Tensor> exp_keys(const Tensor& keys, bool precise) {
  STD_TORCH_CHECK(keys.dim() == 3, "keys must have 3 dimensions");
  const Kind kind = computing_kind(storage_kind(keys, "keys"), keys.numel(),
                                   precise ? kMaxFp64CpuElements : kMaxFp64ForwardTableElements);
  const int64_t B = keys.size(0), Tk = keys.size(1), H = keys.size(2);
  const ScalarType type = size_of(kind) == 8 ? ScalarType::Double : ScalarType::Float;
  Tensor table = new_tensor({B, Tk, table_width(H, kind)}, type);
  Tensor keys_max = new_tensor({B}, type);
  std::vector<Tensor> owned;
  fill_tables(kind, view_of(keys, owned), B, Tk, H, keys_max.mutable_data_ptr(),
              table.mutable_data_ptr());
  return {table, keys_max};
}

// Gradients of features (B,Tk,C), in memory (B,C,Tk), and of W_f (H,C).
class InsideGradients {
 public:
  InsideGradients(const Options& inside, int64_t needs)
      : features(new_features(inside, needs & need_features)),
        w_f(new_tensor(inside.w_f.has_value() ? gradient_shape(*inside.w_f, needs & need_w_f)
                                              : std::vector<int64_t>{0},
                       inside.w_f.has_value() ? inside.w_f->scalar_type() : ScalarType::Float)),
        wants_features_(features.dim() == 3),
        wants_w_f_(w_f.dim() == 2),
        weight_(wants_features_ ? packed(*inside.w_f) : features) {}

  void zero() {
    torch::stable::zero_(features);
    torch::stable::zero_(w_f);
  }

  // Fills them, and what else is named.
  void run(const Inputs& in, Backward g, void* grad_w) {
    const Problem& p = in.problem;
    const Buffer by_unit = wants_features_ ? in_sum_type(weight_, in.kind, "w_f") : Buffer(0);
    g.w_f = by_unit.get();
    const int64_t bytes = w_f.element_size(), C = p.inside.C;
    const Buffer transposed(wants_w_f_ ? C * p.width * bytes : 0);
    run_backward(
        in, g,
        {grad_w, data_or_null(features, wants_features_), wants_w_f_ ? transposed.get() : nullptr});
    if (!wants_w_f_) return;
    const char* from = static_cast<const char*>(transposed.get());
    char* to = static_cast<char*>(w_f.mutable_data_ptr());
    for (int64_t h = 0; h < p.H; ++h)
      for (int64_t c = 0; c < C; ++c)
        std::memcpy(to + (h * C + c) * bytes, from + (c * p.width + h) * bytes, bytes);
  }

  Tensor features, w_f;

 private:
  static Tensor new_features(const Options& inside, bool wanted) {
    if (!inside.features.has_value()) return new_tensor({0}, ScalarType::Float);
    const Tensor& t = *inside.features;
    if (!wanted) return new_tensor({0}, t.scalar_type());
    const int64_t B = t.size(0), Tk = t.size(1), C = t.size(2);
    return new_tensor({B, Tk, C}, {C * Tk, 1, Tk}, t.scalar_type(), aoti_torch_device_type_cpu(),
                      0);
  }

  bool wants_features_, wants_w_f_;
  Tensor weight_;  // W_f, contiguous
};

using SixGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

std::tuple<Tensor, Tensor> attend(const Tensor& queries, const Tensor& keys, const Tensor& values,
                                  const Tensor& w_v, MaybeTensor features, MaybeTensor w_f,
                                  MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor table,
                                  MaybeTensor keys_max, MaybeTensor seed, double dropout_p,
                                  int64_t activation, double negative_slope, bool need_weights,
                                  bool precise, int64_t backend, bool narrow) {
  check_backend(backend);
  const Options options{features, w_f,       valid_lens, mask,           table,  keys_max,
                        seed,     dropout_p, activation, negative_slope, precise};
  return attend_to(queries, keys, values, w_v, options, need_weights, narrow);
}

SixGradients backward(const Tensor& queries, const Tensor& keys, const Tensor& values,
                      const Tensor& w_v, const Options& options, const Tensor& weights,
                      MaybeTensor grad_context, MaybeTensor grad_weights, int64_t needs,
                      Tensor* onto) {
  Inputs in(queries, keys, values, w_v, options, Exponentials::as_read);
  in.problem.from_sums |= onto != nullptr;  // only that kernel adds to a sum
  Tensor grad_queries = gradient(queries, needs & need_queries);
  KeyGradients grads(keys, values, w_v, needs);
  InsideGradients inside(options, needs);
  if (in.problem.empty()) {
    torch::stable::zero_(grad_queries);
    grads.zero();
    inside.zero();
  } else {
    std::vector<Tensor> owned;
    Backward g = received(in, weights, grad_context, grad_weights, owned);
    g.grad_queries = data_or_null(grad_queries, needs & need_queries);
    grads.name_in(&g);
    if (onto != nullptr) {
      STD_TORCH_CHECK(onto->is_contiguous() && onto->scalar_type() == in.storage &&
                          onto->numel() == keys.numel() && !(needs & need_keys),
                      "onto must be contiguous, and have the size and dtype of keys");
      g.grad_keys = onto->mutable_data_ptr();
      g.adds_to_keys = true;
    }
    inside.run(in, g, grads.w_data());
  }
  return {grad_queries, grads.keys, grads.values, grads.w, inside.features, inside.w_f};
}

SixGradients attend_backward(const Tensor& weights, MaybeTensor grad_context,
                             MaybeTensor grad_weights, int64_t needs, const Tensor& queries,
                             const Tensor& keys, const Tensor& values, const Tensor& w_v,
                             MaybeTensor features, MaybeTensor w_f, MaybeTensor valid_lens,
                             MaybeTensor mask, MaybeTensor table, MaybeTensor keys_max,
                             MaybeTensor seed, double dropout_p, int64_t activation,
                             double negative_slope, int64_t backend) {
  check_backend(backend);
  const Options options{features, w_f,  valid_lens, mask,       table,
                        keys_max, seed, dropout_p,  activation, negative_slope};
  return backward(queries, keys, values, w_v, options, weights, grad_context, grad_weights, needs,
                  nullptr);
}

// The gradient of the keys is added to `onto` (B,Tk,H) instead of being a result.
SixGradients attend_backward_onto(const Tensor& weights, MaybeTensor grad_context,
                                  MaybeTensor grad_weights, int64_t needs, Tensor onto,
                                  const Tensor& queries, const Tensor& keys, const Tensor& values,
                                  const Tensor& w_v, MaybeTensor features, MaybeTensor w_f,
                                  MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor table,
                                  MaybeTensor keys_max, MaybeTensor seed, double dropout_p,
                                  int64_t activation, double negative_slope) {
  const Options options{features, w_f,  valid_lens, mask,       table,
                        keys_max, seed, dropout_p,  activation, negative_slope};
  return backward(queries, keys, values, w_v, options, weights, grad_context, grad_weights, needs,
                  &onto);
}

std::tuple<Tensor, Tensor, Tensor> attend_backward_queries(
    const Tensor& weights, MaybeTensor grad_context, MaybeTensor grad_weights, bool needed,
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
    MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor table, MaybeTensor keys_max,
    MaybeTensor seed, double dropout_p) {
  const Options options{std::nullopt, std::nullopt, valid_lens, mask,
                        table,        keys_max,     seed,       dropout_p};
  const Inputs in(queries, keys, values, w_v, options, Exponentials::as_read);
  const Problem& p = in.problem;
  Tensor grad_queries = gradient(queries, needed);
  Tensor grad_scores = gradient(weights, true);
  Tensor dropped_weights = gradient(weights, p.dropout);
  if (p.empty()) {
    for (Tensor* t : {&grad_queries, &grad_scores, &dropped_weights}) torch::stable::zero_(*t);
    return {grad_queries, grad_scores, dropped_weights};
  }
  std::vector<Tensor> owned;
  Backward g = received(in, weights, grad_context, grad_weights, owned);
  g.grad_queries = data_or_null(grad_queries, needed);
  g.grad_scores_out = grad_scores.mutable_data_ptr();
  g.dropped_weights = data_or_null(dropped_weights, p.dropout);
  run_backward(in, g, {});
  return {grad_queries, grad_scores, dropped_weights};
}

std::tuple<Tensor, Tensor, Tensor> attend_backward_keys(
    const Tensor& weights, MaybeTensor grad_context, const Tensor& grad_scores, int64_t needs,
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
    MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor table, MaybeTensor keys_max) {
  const Options options{std::nullopt, std::nullopt, valid_lens, mask, table, keys_max};
  const Inputs in(queries, keys, values, w_v, options, Exponentials::as_read);
  KeyGradients grads(keys, values, w_v, needs);
  if (in.problem.empty()) {
    grads.zero();
  } else {
    std::vector<Tensor> owned;
    Backward g = received(in, weights, grad_context, std::nullopt, owned);
    g.grad_scores_in =
        rows_like(grad_scores, weights_dtype(in.kind), "grad_scores", in.problem, owned);
    grads.name_in(&g);
    run_backward(in, g, {grads.w_data()});
  }
  return {grads.keys, grads.values, grads.w};
}

// Inputs of a call whose result are the scores: without values.
Inputs scores_inputs(const Tensor& queries, const Tensor& keys, const Tensor& w_v,
                     const Options& options, Exponentials exponentials) {
  Inputs in(queries, keys, keys, w_v, options, exponentials);
  in.problem.Dv = 0;
  return in;
}

Options inside_of(const MaybeTensor& features, const MaybeTensor& w_f, int64_t activation,
                  double negative_slope) {
  Options options{features, w_f};
  options.activation = activation;
  options.negative_slope = negative_slope;
  return options;
}

Tensor attend_scores(const Tensor& queries, const Tensor& keys, const Tensor& w_v,
                     MaybeTensor features, MaybeTensor w_f, int64_t activation,
                     double negative_slope, int64_t backend) {
  check_backend(backend);
  const Options options = inside_of(features, w_f, activation, negative_slope);
  const Inputs in = scores_inputs(queries, keys, w_v, options, exponentials_for(queries));
  const Problem& p = in.problem;
  Tensor scores = new_tensor({p.B, p.Tq, p.Tk}, weights_dtype(in.kind));
  if (!p.empty()) run_scores(in, scores.mutable_data_ptr());
  return scores;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attend_scores_backward(
    const Tensor& grad_scores, int64_t needs, const Tensor& queries, const Tensor& keys,
    const Tensor& w_v, MaybeTensor features, MaybeTensor w_f, int64_t activation,
    double negative_slope, int64_t backend) {
  check_backend(backend);
  const Options options = inside_of(features, w_f, activation, negative_slope);
  const Inputs in = scores_inputs(queries, keys, w_v, options, Exponentials::as_read);
  Tensor grad_queries = gradient(queries, needs & need_queries);
  KeyGradients grads(keys, keys, w_v, needs & ~need_values);
  InsideGradients inside(options, needs);
  if (in.problem.empty()) {
    torch::stable::zero_(grad_queries);
    grads.zero();
    inside.zero();
  } else {
    std::vector<Tensor> owned;
    Backward g;
    g.grad_scores_in =
        rows_like(grad_scores, weights_dtype(in.kind), "grad_scores", in.problem, owned);
    g.grad_queries = data_or_null(grad_queries, needs & need_queries);
    grads.name_in(&g);
    inside.run(in, g, grads.w_data());
  }
  return {grad_queries, grads.keys, grads.w, inside.features, inside.w_f};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("exp_keys", TORCH_BOX(&exp_keys));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("attend_backward", TORCH_BOX(&attend_backward));
  m.impl("attend_backward.onto", TORCH_BOX(&attend_backward_onto));
  m.impl("attend_backward_queries", TORCH_BOX(&attend_backward_queries));
  m.impl("attend_backward_keys", TORCH_BOX(&attend_backward_keys));
  m.impl("attend_scores", TORCH_BOX(&attend_scores));
  m.impl("attend_scores_backward", TORCH_BOX(&attend_scores_backward));
}

}  // namespace
}  // namespace bahdanau_fast

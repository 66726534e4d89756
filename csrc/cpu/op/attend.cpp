// The operators of bahdanau_fast/ops/attention.py for CPU tensors.
#include "attend.h"
#include "project.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

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
  InsideGradients(const AttentionArguments& inside, int64_t needs, ScalarType storage)
      : features(new_features(inside, needs & need_features, storage)),
        w_f(new_tensor(inside.w_f.has_value() ? gradient_shape(*inside.w_f, needs & need_w_f)
                                              : std::vector<int64_t>{0},
                       storage)),
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
  static Tensor new_features(const AttentionArguments& inside, bool wanted, ScalarType storage) {
    if (!wanted || !inside.features.has_value()) return new_tensor({0}, storage);
    const Tensor& t = *inside.features;
    const int64_t B = t.size(0), Tk = t.size(1), C = t.size(2);
    return new_tensor({B, Tk, C}, {C * Tk, 1, Tk}, storage, aoti_torch_device_type_cpu(), 0);
  }

  bool wants_features_, wants_w_f_;
  Tensor weight_;  // W_f, contiguous
};

// fp32 is projected in fp64 where the keys are projected here, too; else as by the matrix product
// that projected the keys.
int64_t fp64_limit(const MaybeTensor& w_k) { return w_k.has_value() ? kMaxFp64CpuElements : 0; }

void check_table(const AttentionArguments& args) {
  STD_TORCH_CHECK(!args.w_k.has_value() || !args.table.has_value(), "table must come without w_k");
}

// Queries or keys; with a weight they are projected, unless that is given.
class Side {
 public:
  // The gradients that are needed: of rows, weight and bias.
  using Needs = std::array<int64_t, 3>;

  Side(const Tensor& rows, const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& w_v,
       const MaybeTensor& projected, const char* name, const char* weight_name, int64_t limit,
       const Needs& needs = {})
      : rows_(rows), needs_(needs) {
    if (!weight.has_value()) return;
    projection_.emplace(rows, *weight, bias, w_v.numel(), name, weight_name, limit);
    rows_ = projection_->forward_unless(projected, name);
  }

  const Tensor& rows() const { return rows_; }
  bool is_needed() const { return needs_[0] || needs_[1] || needs_[2]; }

  // From the gradient of the projected rows, empty where it is not needed.
  std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad) const {
    if (projection_ && is_needed())
      return projection_->backward(grad, needs_[0], needs_[1], needs_[2]);
    const auto none = [&] { return new_tensor({0}, grad.scalar_type()); };
    return {projection_ ? none() : grad, none(), none()};
  }

 private:
  Tensor rows_;
  Needs needs_;
  std::optional<Projected> projection_;
};

// Each with the bits of what it needs: those of the rows, the weight and the bias.
Side queries_of(const AttentionArguments& args, const MaybeTensor& projected = kNone,
                int64_t needs = 0) {
  return Side(args.queries, args.w_q, kNone, args.w_v, projected, "queries", "w_q",
              fp64_limit(args.w_k), {needs & need_queries, needs & need_w_q, 0});
}
Side keys_of(const AttentionArguments& args, const MaybeTensor& projected = kNone,
             int64_t needs = 0) {
  return Side(args.keys, args.w_k, args.bias, args.w_v, projected, "keys", "w_k",
              kMaxFp64CpuElements,
              {needs & need_keys, needs & need_w_k, args.bias.has_value() ? needs & need_bias : 0});
}

std::tuple<Tensor, Tensor> attend(const AttentionArguments& args, bool need_weights, bool precise,
                                  bool narrow) {
  check_table(args);
  const auto& [queries, keys, w_v, w_q, w_k] =
      std::tie(args.queries, args.keys, args.w_v, args.w_q, args.w_k);
  const auto results = [&, precise = precise || w_k.has_value()](const auto& q, const auto& k) {
    return attend_to(Inputs(q, k, args, exponentials_for(q), precise, true), need_weights, narrow);
  };
  if (!w_q.has_value() && !w_k.has_value()) return results(queries, keys);
  const int64_t hidden = w_v.numel();
  if (!w_q.has_value())
    return results(queries, Projected(keys, *w_k, args.bias, hidden, "keys", "w_k").new_forward());
  const OwnRows q =
      Projected(queries, *w_q, std::nullopt, hidden, "queries", "w_q", fp64_limit(w_k)).forward();
  return w_k.has_value()
             ? results(q, Projected(keys, *w_k, args.bias, hidden, "keys", "w_k").forward())
             : results(q, keys);
}

// And what backward takes: how many keys the lengths leave, without a mask; projected queries and
// keys. What there is not of these has no elements.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attend_recorded(const AttentionArguments& args,
                                                                   bool, bool, bool narrow) {
  check_table(args);
  const Side q = queries_of(args), k = keys_of(args);
  const Inputs in(q.rows(), k.rows(), args, exponentials_for(q.rows()), true, true);
  const auto [context, weights] = attend_to(in, true, narrow);
  const auto none = [&](ScalarType type) { return new_tensor({0}, type); };
  const bool counted = args.valid_lens.has_value() && !args.mask.has_value();
  return {context, weights, counted ? in.counts(*args.valid_lens) : none(ScalarType::Int),
          args.w_q.has_value() ? q.rows() : none(in.storage),
          args.w_k.has_value() ? k.rows() : none(in.storage)};
}

using NineGradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Gradients of queries and keys that are projected already.
NineGradients backward(const Tensor& queries, const Tensor& keys, const AttentionArguments& args,
                       const Tensor& weights, const MaybeTensor& grad_context,
                       const MaybeTensor& grad_weights, int64_t needs, Tensor* onto = nullptr) {
  Inputs in(queries, keys, args, Exponentials::as_read, true, onto == nullptr);
  in.problem.from_sums |= onto != nullptr;  // only that kernel adds to a sum
  Tensor grad_queries = gradient(queries, needs & need_queries);
  KeyGradients grads(keys, args.values, args.w_v, needs);
  InsideGradients inside(args, needs, in.storage);
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
  const auto none = [&] { return new_tensor({0}, in.storage); };
  return {grad_queries, grads.keys, grads.values,    grads.w,   none(),
          none(),       none(),     inside.features, inside.w_f};
}

NineGradients attend_backward(const AttentionArguments& args,
                              const BackwardArguments& of_backward) {
  check_table(args);
  const auto& [weights, projected_queries, projected_keys, grad_context, grad_weights, needs] =
      of_backward;
  if (!args.w_q.has_value() && !args.w_k.has_value())
    return backward(args.queries, args.keys, args, weights, grad_context, grad_weights, needs);
  const Side of_queries = queries_of(args, projected_queries, needs);
  const Side of_keys = keys_of(args, projected_keys, needs);
  const int64_t through = (needs & ~int64_t(need_queries | need_keys)) |
                          (of_queries.is_needed() ? need_queries : 0) |
                          (of_keys.is_needed() ? need_keys : 0);
  const auto [grad_q, grad_k, grad_values, grad_w_v, n0, n1, n2, grad_features, grad_w_f] =
      backward(of_queries.rows(), of_keys.rows(), args, weights, grad_context, grad_weights,
               through);
  const auto [grad_queries, grad_w_q, none] = of_queries.backward(grad_q);
  const auto [grad_keys, grad_w_k, grad_bias] = of_keys.backward(grad_k);
  return {grad_queries, grad_keys, grad_values,   grad_w_v, grad_w_q,
          grad_w_k,     grad_bias, grad_features, grad_w_f};
}

// Of projected queries and keys; the gradient of the keys is added to `onto` (B,Tk,H) instead of
// being a result.
NineGradients attention_backward_onto(const Tensor& weights, MaybeTensor grad_context,
                                      MaybeTensor grad_weights, int64_t needs, Tensor onto,
                                      const Tensor& queries, const Tensor& keys,
                                      const Tensor& values, const Tensor& w_v, MaybeTensor features,
                                      MaybeTensor w_f, MaybeTensor valid_lens, MaybeTensor mask,
                                      MaybeTensor table, MaybeTensor keys_max, MaybeTensor seed,
                                      double dropout_p, int64_t activation, double negative_slope) {
  const AttentionArguments args{queries, keys,       values,     w_v,           features,
                                w_f,     valid_lens, mask,       table,         keys_max,
                                seed,    dropout_p,  activation, negative_slope};
  return backward(queries, keys, args, weights, grad_context, grad_weights, needs, &onto);
}

std::tuple<Tensor, Tensor, Tensor> attend_backward_queries(
    const Tensor& weights, MaybeTensor grad_context, MaybeTensor grad_weights, bool needed,
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
    MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor table, MaybeTensor keys_max,
    MaybeTensor seed, double dropout_p) {
  const AttentionArguments args{queries,    keys, values, w_v,      kNone, kNone,
                                valid_lens, mask, table,  keys_max, seed,  dropout_p};
  const Inputs in(queries, keys, args, Exponentials::as_read);
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

auto backward_keys(const AttentionArguments& args, const Tensor& weights,
                   const MaybeTensor& grad_context, const Tensor& grad_scores, int64_t needs) {
  const Inputs in(args.queries, args.keys, args, Exponentials::as_read);
  KeyGradients grads(args.keys, args.values, args.w_v, needs);
  if (in.problem.empty()) {
    grads.zero();
  } else {
    std::vector<Tensor> owned;
    Backward g = received(in, weights, grad_context, kNone, owned);
    g.grad_scores_in =
        rows_like(grad_scores, weights_dtype(in.kind), "grad_scores", in.problem, owned);
    grads.name_in(&g);
    run_backward(in, g, {grads.w_data()});
  }
  return std::tuple{grads.keys, grads.values, grads.w};
}

// Inputs of a call whose result are the scores: without values.
Inputs scores_inputs(const AttentionArguments& args, Exponentials exponentials) {
  Inputs in(args.queries, args.keys, args, exponentials);
  in.problem.Dv = 0;
  return in;
}

AttentionArguments arguments_of_scores(const Tensor& queries, const Tensor& keys, const Tensor& w_v,
                                       const MaybeTensor& features, const MaybeTensor& w_f,
                                       int64_t activation, double negative_slope) {
  return {queries, keys,  keys,  w_v,   features, w_f,        kNone,
          kNone,   kNone, kNone, kNone, 0.0,      activation, negative_slope};
}

Tensor attend_scores(const Tensor& queries, const Tensor& keys, const Tensor& w_v,
                     MaybeTensor features, MaybeTensor w_f, int64_t activation,
                     double negative_slope, int64_t backend) {
  const auto args =
      arguments_of_scores(queries, keys, w_v, features, w_f, activation, negative_slope);
  check_attention(args, backend);
  const Inputs in = scores_inputs(args, exponentials_for(queries));
  const Problem& p = in.problem;
  Tensor scores = new_tensor({p.B, p.Tq, p.Tk}, weights_dtype(in.kind));
  if (!p.empty()) run_scores(in, scores.mutable_data_ptr());
  return scores;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attend_scores_backward(
    const Tensor& grad_scores, int64_t needs, const Tensor& queries, const Tensor& keys,
    const Tensor& w_v, MaybeTensor features, MaybeTensor w_f, int64_t activation,
    double negative_slope, int64_t backend) {
  const auto args =
      arguments_of_scores(queries, keys, w_v, features, w_f, activation, negative_slope);
  check_attention(args, backend);
  const Inputs in = scores_inputs(args, Exponentials::as_read);
  Tensor grad_queries = gradient(queries, needs & need_queries);
  KeyGradients grads(keys, keys, w_v, needs & ~need_values);
  InsideGradients inside(args, needs, in.storage);
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
  m.impl("attention", TORCH_BOX(&attention<attend>));
  m.impl("attention.recorded", TORCH_BOX(&attention<attend_recorded>));
  m.impl("attention_backward", TORCH_BOX(&attention_backward<attend_backward>));
  m.impl("attention_backward.onto", TORCH_BOX(&attention_backward_onto));
  m.impl("attend_backward_queries", TORCH_BOX(&attend_backward_queries));
  m.impl("attend_backward_keys", TORCH_BOX(&attend_backward_keys<backward_keys>));
  m.impl("attend_scores", TORCH_BOX(&attend_scores));
  m.impl("attend_scores_backward", TORCH_BOX(&attend_scores_backward));
}

}  // namespace
}  // namespace bahdanau_fast

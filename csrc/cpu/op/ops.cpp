// The operators of bahdanau_fast/ops for CPU tensors.
#include "project.h"
#include "run.h"

#include <torch/csrc/stable/library.h>

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

template <class Queries, class Keys>
std::tuple<Tensor, Tensor> attend_to(const Queries& queries, const Keys& keys,
                                     const MaybeTensor& table, const MaybeTensor& keys_max,
                                     const Tensor& values, const Tensor& w_v,
                                     const MaybeTensor& valid_lens, const MaybeTensor& seed,
                                     double dropout_p, bool need_weights) {
  const Inputs in(queries, keys, table, keys_max, values, w_v, valid_lens, seed, dropout_p,
                  exponentials_for(queries));
  const Problem& p = in.problem;
  Tensor context = new_tensor({p.B, p.Tq, p.Dv}, queries.scalar_type());
  const std::vector<int64_t> shape = {p.B, p.Tq, p.Tk}, none = {0};
  Tensor weights = new_tensor(need_weights ? shape : none, weights_dtype(in.kind));
  if (p.B == 0 || p.Tq == 0) return {context, weights};
  if (p.Tk == 0) return {torch::stable::zero_(context), weights};

  run_forward(in, context.mutable_data_ptr(), need_weights ? weights.mutable_data_ptr() : nullptr);
  return {context, weights};
}

std::tuple<Tensor, Tensor> attend(const Tensor& queries, const Tensor& keys, MaybeTensor table,
                                  MaybeTensor keys_max, const Tensor& values, const Tensor& w_v,
                                  MaybeTensor valid_lens, MaybeTensor seed, double dropout_p,
                                  bool need_weights) {
  return attend_to(queries, keys, table, keys_max, values, w_v, valid_lens, seed, dropout_p,
                   need_weights);
}

// The gradients that are sums over the queries.
struct KeyGradients {
  KeyGradients(const Tensor& keys_, const Tensor& values_, const Tensor& w_v, int64_t needs_)
      : needs(needs_),
        keys(gradient(keys_, needs & need_keys)),
        values(gradient(values_, needs & need_values)),
        w(gradient(w_v, needs & need_w)) {}

  void zero() {
    for (Tensor* t : {&keys, &values, &w}) torch::stable::zero_(*t);
  }

  // Fills them, and the others that `g` names.
  void run(const Inputs& in, Backward g) {
    g.grad_keys = data_or_null(keys, needs & need_keys);
    g.grad_values = data_or_null(values, needs & need_values);
    run_backward(in, g, {data_or_null(w, needs & need_w)});
  }

  int64_t needs;
  Tensor keys, values, w;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& queries, const Tensor& keys, MaybeTensor table, MaybeTensor keys_max,
    const Tensor& values, const Tensor& w_v, MaybeTensor valid_lens, MaybeTensor seed,
    double dropout_p, const Tensor& weights, MaybeTensor grad_context, MaybeTensor grad_weights,
    int64_t needs) {
  const Inputs in(queries, keys, table, keys_max, values, w_v, valid_lens, seed, dropout_p,
                  Exponentials::as_read);
  Tensor grad_queries = gradient(queries, needs & need_queries);
  KeyGradients grads(keys, values, w_v, needs);
  if (in.problem.empty()) {
    torch::stable::zero_(grad_queries);
    grads.zero();
  } else {
    std::vector<Tensor> owned;
    Backward g = received(in, weights, grad_context, grad_weights, owned);
    g.grad_queries = data_or_null(grad_queries, needs & need_queries);
    grads.run(in, g);
  }
  return {grad_queries, grads.keys, grads.values, grads.w};
}

std::tuple<Tensor, Tensor, Tensor> attend_backward_queries(
    const Tensor& queries, const Tensor& keys, MaybeTensor table, MaybeTensor keys_max,
    const Tensor& values, const Tensor& w_v, MaybeTensor valid_lens, MaybeTensor seed,
    double dropout_p, const Tensor& weights, MaybeTensor grad_context, MaybeTensor grad_weights,
    bool needed) {
  const Inputs in(queries, keys, table, keys_max, values, w_v, valid_lens, seed, dropout_p,
                  Exponentials::as_read);
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
    const Tensor& queries, const Tensor& keys, MaybeTensor table, MaybeTensor keys_max,
    const Tensor& values, const Tensor& w_v, MaybeTensor valid_lens, const Tensor& weights,
    MaybeTensor grad_context, const Tensor& grad_scores, int64_t needs) {
  const Inputs in(queries, keys, table, keys_max, values, w_v, valid_lens, std::nullopt, 0.0,
                  Exponentials::as_read);
  KeyGradients grads(keys, values, w_v, needs);
  if (in.problem.empty()) {
    grads.zero();
  } else {
    std::vector<Tensor> owned;
    Backward g = received(in, weights, grad_context, std::nullopt, owned);
    g.grad_scores_in =
        rows_like(grad_scores, weights_dtype(in.kind), "grad_scores", in.problem, owned);
    grads.run(in, g);
  }
  return {grads.keys, grads.values, grads.w};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> additive_attention(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_q,
    const Tensor& w_k, const Tensor& w_v, MaybeTensor bias, MaybeTensor valid_lens,
    MaybeTensor seed, double dropout_p) {
  const Tensor projected_queries = Projected(queries, w_q, std::nullopt, "queries").new_forward();
  const Tensor projected_keys = Projected(keys, w_k, bias, "keys").new_forward();
  const auto [context, weights] =
      attend(projected_queries, projected_keys, std::nullopt, std::nullopt, values, w_v, valid_lens,
             seed, dropout_p, true);
  return {context, weights, projected_queries, projected_keys};
}

// attend() of queries, and with w_k of keys, that are not projected yet; without dropout and
// gradients. With w_k the results are, to the bit, those of additive_attention.
std::tuple<Tensor, Tensor> attend_step(const Tensor& queries, const Tensor& w_q, const Tensor& keys,
                                       MaybeTensor table, MaybeTensor keys_max,
                                       const Tensor& values, const Tensor& w_v,
                                       MaybeTensor valid_lens, MaybeTensor w_k, MaybeTensor bias) {
  STD_TORCH_CHECK(w_k.has_value() || !bias.has_value(), "bias must come with w_k");
  STD_TORCH_CHECK(!w_k.has_value() || !table.has_value(), "table must come without w_k");
  // Without w_k fp32 is projected in fp32, as by the matrix product this replaces.
  const int64_t limit = w_k.has_value() ? kMaxFp64CpuElements : 0;
  const OwnRows projected = Projected(queries, w_q, std::nullopt, "queries", limit).forward();
  const auto to = [&](const auto& projected_keys) {
    return attend_to(projected, projected_keys, table, keys_max, values, w_v, valid_lens,
                     std::nullopt, 0.0, true);
  };
  return w_k.has_value() ? to(Projected(keys, *w_k, bias, "keys").forward()) : to(keys);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> additive_attention_backward(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_q,
    const Tensor& w_k, const Tensor& w_v, MaybeTensor bias, MaybeTensor valid_lens,
    MaybeTensor seed, double dropout_p, const Tensor& weights, const Tensor& projected_queries,
    const Tensor& projected_keys, MaybeTensor grad_context, MaybeTensor grad_weights) {
  const auto [grad_a, grad_c, grad_values, grad_w_v] =
      attend_backward(projected_queries, projected_keys, std::nullopt, std::nullopt, values, w_v,
                      valid_lens, seed, dropout_p, weights, grad_context, grad_weights,
                      need_queries | need_keys | need_values | need_w);
  const auto [grad_queries, grad_w_q, none] =
      Projected(queries, w_q, std::nullopt, "queries").backward(grad_a);
  const auto [grad_keys, grad_w_k, grad_bias] = Projected(keys, w_k, bias, "keys").backward(grad_c);
  return {grad_queries, grad_keys, grad_values, grad_w_q, grad_w_k, grad_w_v, grad_bias};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("exp_keys", TORCH_BOX(&exp_keys));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("attend_backward", TORCH_BOX(&attend_backward));
  m.impl("attend_backward_queries", TORCH_BOX(&attend_backward_queries));
  m.impl("attend_backward_keys", TORCH_BOX(&attend_backward_keys));
  m.impl("additive_attention", TORCH_BOX(&additive_attention));
  m.impl("attend_step", TORCH_BOX(&attend_step));
  m.impl("additive_attention_backward", TORCH_BOX(&additive_attention_backward));
}

}  // namespace
}  // namespace bahdanau_fast

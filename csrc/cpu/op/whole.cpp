// The operators of bahdanau_fast/ops/whole.py for CPU tensors: those that project, too.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "attend.h"
#include "project.h"

namespace bahdanau_fast {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> additive_attention(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_q,
    const Tensor& w_k, const Tensor& w_v, MaybeTensor bias, MaybeTensor valid_lens,
    MaybeTensor mask, MaybeTensor seed, double dropout_p) {
  const Tensor projected_queries = Projected(queries, w_q, std::nullopt, "queries").new_forward();
  const Tensor projected_keys = Projected(keys, w_k, bias, "keys").new_forward();
  Options options;
  options.valid_lens = valid_lens, options.mask = mask;
  options.seed = seed, options.dropout_p = dropout_p;
  const auto [context, weights] =
      attend_to(projected_queries, projected_keys, values, w_v, options, true);
  return {context, weights, projected_queries, projected_keys};
}

// Attention to queries, and with w_k to keys, that are not projected yet; without dropout and
// gradients. With w_k the results are, to the bit, those of additive_attention.
std::tuple<Tensor, Tensor> attend_step(const Tensor& queries, const Tensor& keys,
                                       const Tensor& values, MaybeTensor w_q, MaybeTensor w_k,
                                       MaybeTensor bias, const Tensor& w_v, MaybeTensor valid_lens,
                                       MaybeTensor mask, MaybeTensor table, MaybeTensor keys_max,
                                       bool need_weights, bool narrow) {
  STD_TORCH_CHECK(w_q.has_value(), "w_q must be given on the cpu");
  STD_TORCH_CHECK(w_k.has_value() || !bias.has_value(), "bias must come with w_k");
  STD_TORCH_CHECK(!w_k.has_value() || !table.has_value(), "table must come without w_k");
  Options options;
  options.table = table, options.keys_max = keys_max;
  options.valid_lens = valid_lens, options.mask = mask;
  options.precise = w_k.has_value();
  // Without w_k fp32 is projected in fp32, as by the matrix product this replaces.
  const int64_t limit = w_k.has_value() ? kMaxFp64CpuElements : 0;
  const OwnRows asked = Projected(queries, *w_q, std::nullopt, "queries", limit).forward();
  if (!w_k.has_value()) return attend_to(asked, keys, values, w_v, options, need_weights, narrow);
  return attend_to(asked, Projected(keys, *w_k, bias, "keys").forward(), values, w_v, options,
                   need_weights, narrow);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> additive_attention_backward(
    const Tensor& weights, const Tensor& projected_queries, const Tensor& projected_keys,
    MaybeTensor grad_context, MaybeTensor grad_weights, const Tensor& queries, const Tensor& keys,
    const Tensor& values, const Tensor& w_q, const Tensor& w_k, const Tensor& w_v, MaybeTensor bias,
    MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor seed, double dropout_p) {
  Options options;
  options.valid_lens = valid_lens, options.mask = mask;
  options.seed = seed, options.dropout_p = dropout_p;
  const Inputs in(projected_queries, projected_keys, values, w_v, options, Exponentials::as_read);
  Tensor grad_asked = gradient(projected_queries, true);
  KeyGradients grads(projected_keys, values, w_v, need_keys | need_values | need_w);
  if (in.problem.empty()) {
    torch::stable::zero_(grad_asked);
    grads.zero();
  } else {
    std::vector<Tensor> owned;
    Backward g = received(in, weights, grad_context, grad_weights, owned);
    g.grad_queries = grad_asked.mutable_data_ptr();
    grads.name_in(&g);
    run_backward(in, g, {grads.w_data()});
  }
  const auto [grad_queries, grad_w_q, none] =
      Projected(queries, w_q, std::nullopt, "queries").backward(grad_asked);
  const auto [grad_keys, grad_w_k, grad_bias] =
      Projected(keys, w_k, bias, "keys").backward(grads.keys);
  return {grad_queries, grad_keys, grads.values, grad_w_q, grad_w_k, grads.w, grad_bias};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("additive_attention", TORCH_BOX(&additive_attention));
  m.impl("additive_attention_backward", TORCH_BOX(&additive_attention_backward));
  m.impl("attend_step", TORCH_BOX(&attend_step));
}

}  // namespace
}  // namespace bahdanau_fast

// The operators of bahdanau_fast/ops for CUDA tensors.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "inputs.h"
#include "products.h"

namespace bahdanau_fast::gpu {
namespace {

// How many keys the lengths leave, of their shape, where there is no mask: a forward counts.
Tensor new_counts(Inputs& in, const MaybeTensor& lens, const MaybeTensor& mask) {
  if (!lens.has_value() || mask.has_value()) return in.new_tensor({0}, ScalarType::Int);
  Tensor counts = in.new_tensor(gradient_shape(*lens, true), ScalarType::Int);
  in.forward.counts = static_cast<int32_t*>(counts.mutable_data_ptr());
  in.forward.counts_row = lens->dim() == 2 ? in.problem.Tq : 1;
  if (in.problem.empty()) torch::stable::zero_(counts);
  return counts;
}

// A recorded call also returns what backward takes; unused results have no elements. Backward
// projects the keys again, since a loop would save them at every step.
template <bool recorded>
auto attend(const AttentionArguments& args, bool need_weights, bool, bool narrow) {
  Inputs in(args, recorded ? Use::with_gradients : Use::forward);
  const Problem& p = in.problem;
  need_weights |= recorded;
  Tensor context = in.new_tensor({p.B, p.Tq, p.Dv}, in.dtype);
  Tensor weights =
      in.new_tensor({p.B, p.Tq, p.Tk}, narrow ? in.dtype : ScalarType::Float, need_weights);
  MaybeTensor counts;
  if constexpr (recorded) counts = new_counts(in, args.valid_lens, args.mask);
  in.forward.context = context.mutable_data_ptr();
  in.forward.weights = data_or_null(weights, need_weights);
  in.forward.narrow = narrow;
  if (p.empty())
    torch::stable::zero_(context);
  else
    in.kernels->forward(in.forward, in.device, in.memory());
  if constexpr (recorded) {
    return std::make_tuple(context, weights, *counts, in.projected ? *in.projected : in.none(),
                           in.none());
  } else {
    return std::make_tuple(context, weights);
  }
}

Tensor product(const Tensor& x, const Tensor& y) {  // in their dtype, autocast or not
  return cast(torch::stable::matmul(x, y), x.scalar_type());
}

// Of queries or keys (B,n,D), their weight (H,D) and bias.
struct Grads {
  Tensor rows, weight, bias;
};
using Needed = std::array<bool, 3>;

bool any(const Needed& needed) { return needed[0] || needed[1] || needed[2]; }

// From the gradient of the projected rows (B,n,H), by torch's products as in plain code.
Grads through_projection(const Inputs& in, const Tensor& grad, const Tensor& rows,
                         const MaybeTensor& weight, const Needed& needed) {
  Grads grads{grad, in.none(), in.none()};
  if (!weight.has_value()) return grads;
  grads.rows = needed[0] ? times(grad, *weight) : in.none();
  if (needed[1]) grads.weight = sum_of_products(grad, rows);
  if (needed[2]) grads.bias = torch::stable::sum(grad, std::vector<int64_t>{0, 1}, false, in.dtype);
  return grads;
}

// The products with the values are torch's, in the dtype of the inputs, as in plain code.
void in_several(Inputs& in, Backward g, const Tensor& values, const MaybeTensor& grad_context,
                Tensor* grad_values) {
  using torch::stable::transpose;
  const Problem& p = in.problem;
  const bool through_tanh = g.grad_queries || g.grad_keys || g.grad_w;
  const bool with_values = g.grad_values && grad_context.has_value();
  Tensor scores = in.new_tensor({p.B, p.Tq, p.Tk}, ScalarType::Float, through_tanh);
  Tensor dropped = in.new_tensor({p.B, p.Tq, p.Tk}, in.dtype, with_values);
  MaybeTensor products;
  if (through_tanh && grad_context.has_value()) {
    products = product(*grad_context, transpose(values, 1, 2));
    g.products = products->const_data_ptr();
  }
  g.grad_scores = data_or_null(scores, through_tanh);
  g.dropped = data_or_null(dropped, with_values);
  in.kernels->grad_rows(g, in.device);
  if (with_values) *grad_values = product(transpose(dropped, 1, 2), *grad_context);
  if (g.grad_values && !with_values) torch::stable::zero_(*grad_values);
  if (through_tanh) in.kernels->grad_keys(g, in.device, in.memory());
}

auto attend_backward(const AttentionArguments& args, const BackwardArguments& of_backward) {
  const auto& [weights, projected_queries, projected_keys, grad_context, grad_weights, needs] =
      of_backward;
  Inputs in(args, Use::with_gradients, projected_queries, projected_keys);
  const Problem& p = in.problem;
  const auto needed = [bits = needs](const MaybeTensor& input, int64_t bit) {
    return input.has_value() && (bits & bit) != 0;
  };
  const Needed q_needs{(needs & need_queries) != 0, needed(args.w_q, need_w_q), false};
  const Needed k_needs{(needs & need_keys) != 0, needed(args.w_k, need_w_k),
                       needed(args.bias, need_bias)};
  Tensor grad_q = in.new_tensor({p.B, p.Tq, p.H}, in.dtype, any(q_needs));
  Tensor grad_k = in.new_tensor({p.B, p.Tk, p.H}, in.dtype, any(k_needs));
  Tensor grad_values = in.new_tensor({p.B, p.Tk, p.Dv}, in.dtype, needs & need_values);
  Tensor grad_w = in.new_tensor(gradient_shape(args.w_v, needs & need_w), in.dtype);
  const ScalarType type = weights.scalar_type() == in.dtype ? in.dtype : ScalarType::Float;
  Backward g;
  g.p = p;
  g.weights = in.view_like(weights, type, "weights", p.Tk).data;
  STD_TORCH_CHECK(weights.is_contiguous(), "weights must be those attention returned");
  g.narrow = type == in.dtype;
  g.grad_context = in.view_like(grad_context, in.dtype, "grad_context", p.Dv);
  g.grad_weights = in.view_like(grad_weights, type, "grad_weights", p.Tk);
  g.grad_queries = data_or_null(grad_q, any(q_needs));
  g.grad_keys = data_or_null(grad_k, any(k_needs));
  g.grad_values = data_or_null(grad_values, needs & need_values);
  g.grad_w = data_or_null(grad_w, needs & need_w);
  if (p.empty() || p.H == 0)
    for (Tensor* t : {&grad_q, &grad_k, &grad_w}) torch::stable::zero_(*t);
  if (p.empty())
    torch::stable::zero_(grad_values);
  else if (!in.kernels->backward(g, in.device, in.memory()))
    in_several(in, g, args.values, grad_context, &grad_values);
  const Grads q = through_projection(in, grad_q, args.queries, args.w_q, q_needs);
  const Grads k = through_projection(in, grad_k, args.keys, args.w_k, k_needs);
  return std::tuple{q.rows,   k.rows, grad_values, grad_w,   q.weight,
                    k.weight, k.bias, in.none(),   in.none()};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention<attend<false>>));
  m.impl("attention.recorded", TORCH_BOX(&attention<attend<true>>));
  m.impl("attention_backward", TORCH_BOX(&attention_backward<attend_backward>));
}

}  // namespace
}  // namespace bahdanau_fast::gpu

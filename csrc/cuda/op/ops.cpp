// The operators of bahdanau_fast/ops for CUDA tensors.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <tuple>

#include "inputs.h"

namespace bahdanau_fast::gpu {
namespace {

// What only the CPU's kernels and the reference compute.
void check_plain(const MaybeTensor& features, int64_t activation) {
  STD_TORCH_CHECK(!features.has_value() && activation == 0,
                  "CUDA kernels take no features and no activation but tanh");
}

// Runs a forward; its problem is not empty.
std::tuple<Tensor, Tensor> launched(Inputs&& in, bool need_weights, bool narrow) {
  const Problem& p = in.problem;
  Tensor context = in.new_tensor({p.B, p.Tq, p.Dv}, in.dtype);
  const std::vector<int64_t> shape = {p.B, p.Tq, p.Tk}, none = {0};
  Tensor weights =
      in.new_tensor(need_weights ? shape : none, narrow ? in.dtype : ScalarType::Float);
  if (p.Tk == 0) return {torch::stable::zero_(context), weights};
  if (p.empty()) return {context, weights};
  Forward& f = in.forward;
  f.context = context.mutable_data_ptr();
  f.weights = data_or_null(weights, need_weights);
  f.narrow = narrow;
  in.kernels->forward(f, in.device, in.memory());
  return {context, weights};
}

// The table of exponentials (operator exp_keys) is not used: the special-function unit computes an
// exponential faster than it could be read from memory.
std::tuple<Tensor, Tensor> attend(const Tensor& queries, const Tensor& keys, const Tensor& values,
                                  const Tensor& w_v, MaybeTensor features, MaybeTensor,
                                  MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor,
                                  MaybeTensor, MaybeTensor seed, double dropout_p,
                                  int64_t activation, double, bool need_weights, bool,
                                  int64_t backend, bool narrow) {
  check_plain(features, activation);
  check_backend(backend);
  return launched({queries, keys, values, w_v, valid_lens, mask, seed, dropout_p}, need_weights,
                  narrow);
}

// The same, and how many keys the lengths leave, of their shape.
std::tuple<Tensor, Tensor, Tensor> attend_counted(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
    MaybeTensor features, MaybeTensor, MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor,
    MaybeTensor, MaybeTensor seed, double dropout_p, int64_t activation, double, bool need_weights,
    bool, int64_t backend, bool narrow) {
  check_plain(features, activation);
  check_backend(backend);
  STD_TORCH_CHECK(valid_lens.has_value() && !mask.has_value(),
                  "valid_lens must be given, without a mask");
  Inputs in(queries, keys, values, w_v, valid_lens, mask, seed, dropout_p);
  const bool by_query = valid_lens->dim() > 1;
  std::vector<int64_t> shape = {in.problem.B};
  if (by_query) shape.push_back(in.problem.Tq);
  Tensor counts = in.new_tensor(shape, ScalarType::Int);
  in.forward.counts = static_cast<int32_t*>(counts.mutable_data_ptr());
  in.forward.counts_row = by_query ? in.problem.Tq : 1;
  auto [context, weights] = launched(std::move(in), need_weights, narrow);
  return {context, weights, counts};
}

// Context and weights from queries (B,Tq,Dq) and, if W_k is given, keys (B,Tk,Dk) that are not
// projected yet: keys by torch's product, queries in the launch if it can. Without gradients and
// dropout.
std::tuple<Tensor, Tensor> attend_step(const Tensor& queries, const Tensor& keys,
                                       const Tensor& values, MaybeTensor w_q, MaybeTensor w_k,
                                       MaybeTensor bias, const Tensor& w_v, MaybeTensor valid_lens,
                                       MaybeTensor mask, MaybeTensor, MaybeTensor,
                                       bool need_weights, bool narrow) {
  const Tensor k = w_k.has_value() ? linear(keys, *w_k, bias) : keys;
  return launched({queries, k, values, w_v, valid_lens, mask, std::nullopt, 0.0, w_q}, need_weights,
                  narrow);
}

// ---- backward ----

Tensor product(const Tensor& x, const Tensor& y) {  // in their dtype, autocast or not
  return cast(torch::stable::matmul(x, y), x.scalar_type());
}

struct Grads {
  Tensor queries, keys, values, w;
};

// The products with the values are torch's, in the dtype of the inputs, as in plain code.
void in_several(Inputs& in, Backward g, int64_t needs, const Tensor& values,
                const MaybeTensor& grad_context, Tensor* grad_values) {
  using torch::stable::transpose;
  const Problem& p = in.problem;
  const bool through_tanh = needs & (need_queries | need_keys | need_w);
  const bool with_values = needs & need_values && grad_context.has_value();
  const auto wanted = [&](bool want, std::vector<int64_t> shape, ScalarType type) {
    return in.new_tensor(want ? shape : std::vector<int64_t>{0}, type);
  };
  Tensor scores = wanted(through_tanh, {p.B, p.Tq, p.Tk}, ScalarType::Float);
  Tensor dropped = wanted(with_values, {p.B, p.Tq, p.Tk}, in.dtype);
  MaybeTensor products;
  if (through_tanh && grad_context.has_value()) {
    products = product(*grad_context, transpose(values, 1, 2));
    g.products = products->const_data_ptr();
  }
  g.grad_scores = data_or_null(scores, through_tanh);
  g.dropped = data_or_null(dropped, with_values);
  in.kernels->grad_rows(g, in.device);
  if (with_values) *grad_values = product(transpose(dropped, 1, 2), *grad_context);
  if (needs & need_values && !with_values) torch::stable::zero_(*grad_values);
  if (through_tanh && p.H > 0) in.kernels->grad_keys(g, in.device, in.memory());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& weights, MaybeTensor grad_context, MaybeTensor grad_weights, int64_t needs,
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
    MaybeTensor features, MaybeTensor, MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor,
    MaybeTensor, MaybeTensor seed, double dropout_p, int64_t activation, double, int64_t backend) {
  check_plain(features, activation);
  check_backend(backend);
  Inputs in(queries, keys, values, w_v, valid_lens, mask, seed, dropout_p);
  const Problem& p = in.problem;
  const auto gradient = [&](const Tensor& tensor, int64_t bit) {
    return in.new_tensor(gradient_shape(tensor, needs & bit), tensor.scalar_type());
  };
  Grads grads{gradient(queries, need_queries), gradient(keys, need_keys),
              gradient(values, need_values), gradient(w_v, need_w)};
  const Tensor none = in.new_tensor({0}, ScalarType::Float),
               nothing = in.new_tensor({0}, ScalarType::Float);
  const auto all = [&] {
    return std::make_tuple(grads.queries, grads.keys, grads.values, grads.w, none, nothing);
  };
  if (p.empty() || p.H == 0)
    for (Tensor* t : {&grads.queries, &grads.keys, &grads.w}) torch::stable::zero_(*t);
  if (p.empty()) {
    torch::stable::zero_(grads.values);
    return all();
  }
  const ScalarType type = weights.scalar_type() == in.dtype ? in.dtype : ScalarType::Float;
  const View weights_view = in.view_like(weights, type, "weights", p.Tk);
  STD_TORCH_CHECK(weights.is_contiguous(), "weights must be those attend returned");
  Backward g;
  g.p = p;
  g.weights = weights_view.data;
  g.narrow = type == in.dtype;
  g.grad_context = in.view_like(grad_context, in.dtype, "grad_context", p.Dv);
  g.grad_weights = in.view_like(grad_weights, type, "grad_weights", p.Tk);
  g.grad_queries = data_or_null(grads.queries, needs & need_queries);
  g.grad_keys = data_or_null(grads.keys, needs & need_keys);
  g.grad_values = data_or_null(grads.values, needs & need_values);
  g.grad_w = data_or_null(grads.w, needs & need_w);
  if (!in.kernels->backward(g, in.device, in.memory()))
    in_several(in, g, needs, values, grad_context, &grads.values);
  return all();
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CUDA, m) {
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("attend.counted", TORCH_BOX(&attend_counted));
  m.impl("attend_step", TORCH_BOX(&attend_step));
  m.impl("attend_backward", TORCH_BOX(&attend_backward));
}

}  // namespace
}  // namespace bahdanau_fast::gpu

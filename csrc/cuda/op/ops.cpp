// The operators of bahdanau_fast/ops for CUDA tensors.
#include <torch/csrc/stable/library.h>

#include <array>
#include <tuple>

#include "cuda/runtime/counters.h"
#include "inputs.h"

namespace bahdanau_fast::gpu {
namespace {

using torch::stable::accelerator::DeviceGuard;

// Queues the launches of a forward.
void queue(const Inputs& in, const Forward& f, Device device) {
  const Kernels& k = kernels(in.kind);
  const int64_t counters = k.counters(f, device);
  if (counters > 0) device.counters = counters_of(in.device, device.stream, counters);
  Tensor workspace = in.new_tensor({k.forward_workspace(f, device)}, ScalarType::Byte);
  k.forward(f, device, workspace.mutable_data_ptr());
}

// What only the CPU's kernels and the reference compute.
void check_plain(const MaybeTensor& mask, const MaybeTensor& features, int64_t activation) {
  STD_TORCH_CHECK(!mask.has_value() && !features.has_value() && activation == 0,
                  "CUDA kernels take no mask, no features and no activation but tanh");
}

// The table of exponentials (operator exp_keys) is not used: the special-function unit computes an
// exponential faster than it could be read from memory.
std::tuple<Tensor, Tensor> attend_to(const Tensor& queries, const Tensor& keys,
                                     const Tensor& values, const Tensor& w_v,
                                     const MaybeTensor& valid_lens, const MaybeTensor& seed,
                                     double dropout_p, bool need_weights) {
  const Inputs in(queries, keys, values, w_v, valid_lens, seed, dropout_p);
  const Problem& p = in.problem;
  const DeviceGuard guard(in.device);
  Tensor context = in.new_tensor({p.B, p.Tq, p.Dv}, queries.scalar_type());
  const std::vector<int64_t> shape = {p.B, p.Tq, p.Tk}, none = {0};
  Tensor weights = in.new_tensor(need_weights ? shape : none, weights_dtype(in.kind));
  if (p.Tk == 0) return {torch::stable::zero_(context), weights};
  if (p.empty()) return {context, weights};
  Forward f = in.forward;
  f.context = context.mutable_data_ptr();
  f.weights = need_weights ? weights.mutable_data_ptr() : nullptr;
  queue(in, f, in.current());
  return {context, weights};
}

std::tuple<Tensor, Tensor> attend(const Tensor& queries, const Tensor& keys, const Tensor& values,
                                  const Tensor& w_v, MaybeTensor features, MaybeTensor,
                                  MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor,
                                  MaybeTensor, MaybeTensor seed, double dropout_p,
                                  int64_t activation, double, bool need_weights, bool,
                                  int64_t backend) {
  check_plain(mask, features, activation);
  check_backend(backend);
  return attend_to(queries, keys, values, w_v, valid_lens, seed, dropout_p, need_weights);
}

// torch.nn.functional.linear
Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(weight), from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Context and weights from queries (B,Tq,Dq) and, if W_k is given, keys (B,Tk,Dk) that are not
// projected yet: in one launch if the kernels can, else after torch's products. Without gradients
// and dropout.
std::tuple<Tensor, Tensor> attend_step(const Tensor& queries, const Tensor& keys,
                                       const Tensor& values, MaybeTensor w_q, MaybeTensor w_k,
                                       MaybeTensor bias, const Tensor& w_v, MaybeTensor valid_lens,
                                       MaybeTensor mask, MaybeTensor, MaybeTensor,
                                       bool need_weights) {
  STD_TORCH_CHECK(w_q.has_value(), "w_q must be given on CUDA devices");
  check_plain(mask, std::nullopt, 0);
  const Inputs in(queries, keys, values, w_v, valid_lens, std::nullopt, 0.0,
                  Projections{*w_q, w_k, bias});
  const Problem& p = in.problem;
  const DeviceGuard guard(in.device);
  const Device device = in.current();
  Forward f = in.forward;
  if (p.empty() || f.Dq == 0 || !kernels(in.kind).is_one_launch(f, device)) {
    const Tensor c = w_k.has_value() ? linear(keys, *w_k, bias) : keys;
    return attend_to(linear(queries, *w_q, std::nullopt), c, values, w_v, valid_lens, std::nullopt,
                     0.0, need_weights);
  }
  Tensor context = in.new_tensor({p.B, p.Tq, p.Dv}, queries.scalar_type());
  const std::vector<int64_t> shape = {p.B, p.Tq, p.Tk}, none = {0};
  Tensor weights = in.new_tensor(need_weights ? shape : none, weights_dtype(in.kind));
  f.context = context.mutable_data_ptr();
  f.weights = need_weights ? weights.mutable_data_ptr() : nullptr;
  queue(in, f, device);
  return {context, weights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& weights, MaybeTensor grad_context, MaybeTensor grad_weights, int64_t needs,
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
    MaybeTensor features, MaybeTensor, MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor,
    MaybeTensor, MaybeTensor seed, double dropout_p, int64_t activation, double, int64_t backend) {
  check_plain(mask, features, activation);
  check_backend(backend);
  Inputs in(queries, keys, values, w_v, valid_lens, seed, dropout_p);
  const Problem& p = in.problem;
  const DeviceGuard guard(in.device);
  const auto gradient = [&](const Tensor& tensor, int64_t bit) {
    return in.new_tensor(gradient_shape(tensor, needs & bit), tensor.scalar_type());
  };
  Tensor grad_queries = gradient(queries, need_queries), grad_keys = gradient(keys, need_keys);
  Tensor grad_values = gradient(values, need_values), grad_w = gradient(w_v, need_w);
  const Tensor none = in.new_tensor({0}, ScalarType::Float),
               nothing = in.new_tensor({0}, ScalarType::Float);
  if (p.empty() || p.H == 0) {
    for (Tensor* t : {&grad_queries, &grad_keys, &grad_w}) torch::stable::zero_(*t);
    if (p.empty()) {
      torch::stable::zero_(grad_values);
      return {grad_queries, grad_keys, grad_values, grad_w, none, nothing};
    }
  }
  const View weights_view = in.view_like(weights, weights_dtype(in.kind), "weights", p.Tk);
  STD_TORCH_CHECK(weights.is_contiguous(), "weights must be those attend returned");
  Backward g;
  g.p = p;
  g.weights = weights_view.data;
  g.grad_context = in.view_like(grad_context, queries.scalar_type(), "grad_context", p.Dv);
  g.grad_weights = in.view_like(grad_weights, weights.scalar_type(), "grad_weights", p.Tk);
  g.grad_queries = data_or_null(grad_queries, needs & need_queries);
  g.grad_keys = data_or_null(grad_keys, needs & need_keys);
  g.grad_values = data_or_null(grad_values, needs & need_values);
  g.grad_w = data_or_null(grad_w, needs & need_w);
  const Kernels& k = kernels(in.kind);
  const Device device = in.current();
  Tensor workspace = in.new_tensor({k.backward_workspace(g, device)}, ScalarType::Byte);
  k.backward(g, device, workspace.mutable_data_ptr());
  return {grad_queries, grad_keys, grad_values, grad_w, none, nothing};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CUDA, m) {
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("attend_step", TORCH_BOX(&attend_step));
  m.impl("attend_backward", TORCH_BOX(&attend_backward));
}

}  // namespace
}  // namespace bahdanau_fast::gpu

// The operators of bahdanau_fast/ops/pool.py for CPU tensors.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "attend.h"
#include "cpu/kernels/simd.h"
#include "project.h"

namespace bahdanau_fast {
namespace {

// The bits of `needs`, in the order of the inputs.
enum PoolNeeds : int64_t {
  need_pooled_keys = 1,
  need_w_v = 2,
  need_pooled_values = 4,
  need_b_v = 8,
  need_gate = 16,
  need_layer_w = 32,
  need_layer_b = 64,
  need_w_gate = 128,
  need_b_gate = 256
};

// Keys and what the layers make of them: w and b those inside tanh, w_gate and b_gate the gate.
struct Layers {
  Layers(const Tensor& keys, const Tensor& w_v, const MaybeTensor& gate, const MaybeTensor& w,
         const MaybeTensor& b, const MaybeTensor& w_gate, const MaybeTensor& b_gate) {
    STD_TORCH_CHECK(w.has_value() ? !gate.has_value() && (w_gate.has_value() || !b_gate.has_value())
                                  : !b.has_value() && !w_gate.has_value() && !b_gate.has_value(),
                    "gate must come without w; b and w_gate with w, and b_gate with w_gate");
    STD_TORCH_CHECK(w_v.dim() == 2, "w_v must have 2 dimensions");
    const auto project = [&](const Tensor& weight, const MaybeTensor& bias, const char* name) {
      return Projected(keys, weight, bias, w_v.size(-1), "keys", name,
                       kMaxFp64ForwardTableElements);
    };
    if (w.has_value()) inner.emplace(project(*w, b, "w"));
    if (w_gate.has_value()) of_gate.emplace(project(*w_gate, b_gate, "w_gate"));
  }

  std::optional<Projected> inner, of_gate;  // none: keys and gate are projected already
};

// Pooled values and weights; how many keys the lengths leave, without a mask; and what keys that
// are projected here become in both layers. A result that does not apply has shape (0,).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pool_recorded(
    const Tensor& keys, const Tensor& w_v, const Tensor& values, MaybeTensor b_v, MaybeTensor gate,
    MaybeTensor w, MaybeTensor b, MaybeTensor w_gate, MaybeTensor b_gate, MaybeTensor valid_lens,
    MaybeTensor mask, MaybeTensor seed, double dropout_p, bool narrow) {
  const Layers layers(keys, w_v, gate, w, b, w_gate, b_gate);
  const Tensor inner = layers.inner ? layers.inner->new_forward() : keys;
  if (layers.of_gate) gate = layers.of_gate->new_forward();
  const Inputs in(
      PoolingArguments{inner, w_v, values, b_v, gate, valid_lens, mask, seed, dropout_p});
  const auto [pooled, weights] = attend_to(in, true, narrow);
  const auto none = [&](ScalarType type) { return new_tensor({0}, type); };
  const bool counted = valid_lens.has_value() && !mask.has_value();
  return {pooled, weights, counted ? in.counts(*valid_lens) : none(ScalarType::Int),
          layers.inner ? inner : none(in.storage), layers.of_gate ? *gate : none(in.storage)};
}

std::tuple<Tensor, Tensor> pool(const Tensor& keys, const Tensor& w_v, const Tensor& values,
                                MaybeTensor b_v, MaybeTensor gate, MaybeTensor w, MaybeTensor b,
                                MaybeTensor w_gate, MaybeTensor b_gate, MaybeTensor valid_lens,
                                MaybeTensor mask, MaybeTensor seed, double dropout_p, bool narrow) {
  const auto results = pool_recorded(keys, w_v, values, b_v, gate, w, b, w_gate, b_gate, valid_lens,
                                     mask, seed, dropout_p, narrow);
  return {std::get<0>(results), std::get<1>(results)};
}

// *sum += gradient, both contiguous.
void add(const Tensor& gradient, Tensor* sum) {
  with_type_of(gradient, "gradient", [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(gradient.const_data_ptr());
    T* to = static_cast<T*>(sum->mutable_data_ptr());
    for (int64_t i = 0, count = sum->numel(); i < count; ++i) {
      if constexpr (std::is_integral<T>::value)
        to[i] += from[i];
      else
        narrow(widen(to[i]) + widen(from[i]), to + i);
    }
  });
}

using PoolGradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// A head's bias is the same for all keys: a softmax passes no gradient on to it.
PoolGradients pool_backward(const Tensor& weights, MaybeTensor projected, MaybeTensor gate_sums,
                            MaybeTensor grad_pooled, MaybeTensor grad_weights, int64_t needs,
                            const Tensor& keys, const Tensor& w_v, const Tensor& values,
                            MaybeTensor b_v, MaybeTensor gate, MaybeTensor w, MaybeTensor b,
                            MaybeTensor w_gate, MaybeTensor b_gate, MaybeTensor valid_lens,
                            MaybeTensor mask, MaybeTensor seed, double dropout_p) {
  // Compiled code saves nothing but inputs and weights: it projects again.
  const Layers layers(keys, w_v, gate, w, b, w_gate, b_gate);
  const Tensor inner = layers.inner ? layers.inner->forward_unless(projected, "keys") : keys;
  if (layers.of_gate) gate = layers.of_gate->forward_unless(gate_sums, "keys");
  const Inputs in(
      PoolingArguments{inner, w_v, values, b_v, gate, valid_lens, mask, seed, dropout_p});
  const Problem& p = in.problem;
  const bool needs_keys = needs & need_pooled_keys;
  const bool needs_inner =
      needs_keys || (layers.inner && (needs & (need_layer_w | need_layer_b)) != 0);
  const bool needs_gate = layers.of_gate ? needs_keys || (needs & (need_w_gate | need_b_gate)) != 0
                                         : gate.has_value() && (needs & need_gate) != 0;
  const auto none = [&] { return new_tensor({0}, in.storage); };
  Tensor grad_inner = gradient(inner, needs_inner), grad_w_v = gradient(w_v, needs & need_w_v);
  Tensor grad_gate = needs_gate ? gradient(*gate, true) : none();
  Tensor grad_values = gradient(values, needs & need_pooled_values);
  Tensor grad_b_v = b_v.has_value() ? gradient(*b_v, needs & need_b_v) : none();
  torch::stable::zero_(grad_b_v);
  if (p.empty()) {
    for (Tensor* t : {&grad_inner, &grad_w_v, &grad_values, &grad_gate}) torch::stable::zero_(*t);
  } else {
    std::vector<Tensor> owned;
    Backward g = received(in, weights, grad_pooled, grad_weights, owned);
    g.grad_keys = data_or_null(grad_inner, needs_inner);
    g.grad_gate = data_or_null(grad_gate, needs_gate);
    g.grad_values = data_or_null(grad_values, needs & need_pooled_values);
    const int64_t bytes = grad_w_v.element_size();
    const Buffer wide(needs & need_w_v ? p.Tq * p.width * bytes : 0);
    run_backward(in, g, {wide.get()});
    for (int64_t i = 0; wide.get() != nullptr && i < p.Tq; ++i)
      std::memcpy(static_cast<char*>(grad_w_v.mutable_data_ptr()) + i * p.H * bytes,
                  static_cast<const char*>(wide.get()) + i * p.width * bytes, p.H * bytes);
  }
  Tensor grad_keys = grad_inner, grad_w = none(), grad_b = none();
  Tensor grad_w_gate = none(), grad_b_gate = none();
  if (layers.inner && needs_inner)
    std::tie(grad_keys, grad_w, grad_b) =
        layers.inner->backward(grad_inner, needs_keys, needs & need_layer_w, needs & need_layer_b);
  if (layers.of_gate && needs_gate) {
    Tensor more;
    std::tie(more, grad_w_gate, grad_b_gate) =
        layers.of_gate->backward(grad_gate, needs_keys, needs & need_w_gate, needs & need_b_gate);
    if (needs_keys) add(more, &grad_keys);
    grad_gate = none();
  }
  return {grad_keys, grad_w_v, grad_values, grad_b_v,   grad_gate,
          grad_w,    grad_b,   grad_w_gate, grad_b_gate};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("pool", TORCH_BOX(&pool));
  m.impl("pool.recorded", TORCH_BOX(&pool_recorded));
  m.impl("pool_backward", TORCH_BOX(&pool_backward));
}

}  // namespace
}  // namespace bahdanau_fast

// The operators of bahdanau_fast/ops/inside/general.py for CPU tensors.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "run.h"

namespace bahdanau_fast {
namespace {

// All elements of a contiguous tensor, in the sum type.
Buffer in_sum_type(const Tensor& tensor, Kind kind, const char* name) {
  const std::vector<double> from = to_doubles(tensor, name);
  Buffer out(from.size() * size_of(kind));
  if (size_of(kind) == 8)
    std::copy(from.begin(), from.end(), static_cast<double*>(out.get()));
  else
    std::copy(from.begin(), from.end(), static_cast<float*>(out.get()));
  return out;
}

// Gradients of features (B,Tk,C), in memory (B,C,Tk), and of W_f (H,C).
class InsideGradients {
 public:
  InsideGradients(const Inside& inside, int64_t needs)
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
    const int64_t bytes = w_f.element_size(), C = p.general.C;
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
  static Tensor new_features(const Inside& inside, bool wanted) {
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

std::tuple<Tensor, Tensor> general_attend(const Tensor& queries, const Tensor& keys,
                                          const Tensor& values, const Tensor& w_v,
                                          MaybeTensor valid_lens, MaybeTensor features,
                                          MaybeTensor w_f, int64_t activation,
                                          double negative_slope, MaybeTensor seed,
                                          double dropout_p) {
  const Inside inside{features, w_f, activation, negative_slope};
  const Inputs in(queries, keys, std::nullopt, std::nullopt, values, w_v, valid_lens, seed,
                  dropout_p, exponentials_for(queries), inside);
  const Problem& p = in.problem;
  Tensor context = new_tensor({p.B, p.Tq, p.Dv}, in.storage);
  Tensor weights = new_tensor({p.B, p.Tq, p.Tk}, weights_dtype(in.kind));
  if (p.B == 0 || p.Tq == 0) return {context, weights};
  if (p.Tk == 0) return {torch::stable::zero_(context), weights};
  run_forward(in, context.mutable_data_ptr(), weights.mutable_data_ptr());
  return {context, weights};
}

// The convolution of a location (B,inputs,Tk), and all the memory it points to.
struct Located {
  Located(const Tensor& location, const Tensor& w, const MaybeTensor& bias)
      : kind(storage_kind(location, "location")),
        weights(in_sum_type(packed(w), kind, "w_conv")),
        biases(bias.has_value() ? in_sum_type(packed(*bias), kind, "b_conv") : Buffer(0)) {
    STD_TORCH_CHECK(location.dim() == 3, "location must have 3 dimensions");
    STD_TORCH_CHECK(
        storage_kind(w, "w_conv") == kind && w.dim() == 3 && w.size(1) == location.size(1) &&
            w.size(2) % 2 == 1,
        "w_conv must have shape (C, inputs, taps), an odd number of taps, and the dtype "
        "of location");
    p.B = location.size(0), p.inputs = location.size(1), p.Tk = location.size(2);
    p.C = w.size(0), p.taps = w.size(2);
    STD_TORCH_CHECK(!bias.has_value() || (storage_kind(*bias, "b_conv") == kind &&
                                          bias->dim() == 1 && bias->size(0) == p.C),
                    "b_conv must have shape (C,) and the dtype of location");
    p.location = view_of(location, owned);
    p.w = weights.get();
    if (bias.has_value()) p.bias = biases.get();
  }

  Kind kind;
  Convolution p;
  std::vector<Tensor> owned;
  Buffer weights, biases;
};

// Features (B,Tk,C), in memory (B,C,Tk).
Tensor convolve(const Tensor& location, const Tensor& w, const MaybeTensor& bias) {
  Located in(location, w, bias);
  Convolution& p = in.p;
  Tensor out = new_tensor({p.B, p.Tk, p.C}, {p.C * p.Tk, 1, p.Tk}, location.scalar_type(),
                          aoti_torch_device_type_cpu(), 0);
  p.out = out.mutable_data_ptr();
  constexpr int64_t kChannels = 8;  // of a task
  const int64_t parts = (p.C + kChannels - 1) / kChannels;
  const Kernels& k = kernels(in.kind);
  parallel(
      p.B * parts, p.Tk * p.inputs * p.taps,
      [&] { return Buffer(k.convolve_workspace(p, kChannels) * size_of(in.kind)); },
      [&](int64_t task, const Buffer& work) {
        const int64_t c = task % parts * kChannels;
        k.convolve(p, task / parts, c, std::min(c + kChannels, p.C), work.get());
      });
  return out;
}

// Gradients of location and w_conv; `needs` has a bit for each.
std::tuple<Tensor, Tensor> convolve_backward(const Tensor& grad_features, const Tensor& location,
                                             const Tensor& w_conv, int64_t needs) {
  Located in(location, w_conv, std::nullopt);
  const Convolution& p = in.p;
  STD_TORCH_CHECK(storage_kind(grad_features, "grad_features") == in.kind &&
                      grad_features.dim() == 3 && grad_features.size(0) == p.B &&
                      grad_features.size(1) == p.Tk && grad_features.size(2) == p.C,
                  "grad_features must have shape (B, Tk, C) and the dtype of location");
  Tensor grad_location = gradient(location, needs & 1), grad_w = gradient(w_conv, needs & 2);
  if (p.B == 0 || p.Tk == 0)
    return {torch::stable::zero_(grad_location), torch::stable::zero_(grad_w)};
  const int64_t size = p.C * p.inputs * p.taps, bytes = size_of(in.kind), line = 64;
  ConvolutionGrads g;
  g.features = view_of(torch::stable::transpose(grad_features, 1, 2), in.owned);
  g.location = data_or_null(grad_location, needs & 1);
  g.w_stride = (size + line - 1) / line * line;  // for whole vectors
  const Buffer parts(needs & 2 ? p.B * g.w_stride * bytes : 0);
  if (needs & 2) g.w = parts.get();
  const Kernels& k = kernels(in.kind);
  parallel(
      p.B, p.Tk * size, [&] { return Buffer(k.convolve_backward_workspace(p) * bytes); },
      [&](int64_t b, const Buffer& work) { k.convolve_backward(p, g, b, work.get()); });
  if (needs & 2) k.sum_rows(g.w, p.B, g.w_stride, size, grad_w.mutable_data_ptr());
  return {grad_location, grad_w};
}

// general_attend() with features from a convolution of the location; gives these too.
std::tuple<Tensor, Tensor, Tensor> location_attend(const Tensor& queries, const Tensor& keys,
                                                   const Tensor& values, const Tensor& w_v,
                                                   MaybeTensor valid_lens, const Tensor& location,
                                                   const Tensor& w_conv, MaybeTensor b_conv,
                                                   const Tensor& w_f, int64_t activation,
                                                   double negative_slope, MaybeTensor seed,
                                                   double dropout_p) {
  const Tensor features = convolve(location, w_conv, b_conv);
  const auto [context, weights] = general_attend(queries, keys, values, w_v, valid_lens, features,
                                                 w_f, activation, negative_slope, seed, dropout_p);
  return {context, weights, features};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> general_attend_backward_onto(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
    MaybeTensor valid_lens, MaybeTensor features, MaybeTensor w_f, int64_t activation,
    double negative_slope, MaybeTensor seed, double dropout_p, const Tensor& weights,
    MaybeTensor grad_context, MaybeTensor grad_weights, int64_t needs, MaybeTensor onto) {
  const Inside inside{features, w_f, activation, negative_slope};
  Inputs in(queries, keys, std::nullopt, std::nullopt, values, w_v, valid_lens, seed, dropout_p,
            Exponentials::as_read, inside);
  in.problem.general.used |= onto.has_value();  // only that kernel adds to a sum
  Tensor grad_queries = gradient(queries, needs & need_queries);
  Tensor grad_keys = gradient(keys, needs & need_keys);
  Tensor grad_values = gradient(values, needs & need_values);
  Tensor grad_w = gradient(w_v, needs & need_w);
  InsideGradients grads(inside, needs);
  if (in.problem.empty()) {
    for (Tensor* t : {&grad_queries, &grad_keys, &grad_values, &grad_w}) torch::stable::zero_(*t);
    grads.zero();
  } else {
    std::vector<Tensor> owned;
    Backward g = received(in, weights, grad_context, grad_weights, owned);
    g.grad_queries = data_or_null(grad_queries, needs & need_queries);
    g.grad_keys = data_or_null(grad_keys, needs & need_keys);
    g.grad_values = data_or_null(grad_values, needs & need_values);
    if (onto.has_value()) {
      STD_TORCH_CHECK(onto->is_contiguous() && onto->scalar_type() == in.storage &&
                          onto->numel() == keys.numel() && !(needs & need_keys),
                      "grad_keys must be contiguous, and have the size and dtype of keys");
      g.grad_keys = onto->mutable_data_ptr();
      g.adds_to_keys = true;
    }
    grads.run(in, g, data_or_null(grad_w, needs & need_w));
  }
  return {grad_queries, grad_keys, grad_values, grad_w, grads.features, grads.w_f};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> general_attend_backward(
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
    MaybeTensor valid_lens, MaybeTensor features, MaybeTensor w_f, int64_t activation,
    double negative_slope, MaybeTensor seed, double dropout_p, const Tensor& weights,
    MaybeTensor grad_context, MaybeTensor grad_weights, int64_t needs) {
  return general_attend_backward_onto(queries, keys, values, w_v, valid_lens, features, w_f,
                                      activation, negative_slope, seed, dropout_p, weights,
                                      grad_context, grad_weights, needs, std::nullopt);
}

// Inputs of a call whose result are the scores: without values.
Inputs scores_inputs(const Tensor& queries, const Tensor& keys, const Tensor& w_v,
                     const Inside& inside, Exponentials exponentials) {
  Inputs in(queries, keys, std::nullopt, std::nullopt, keys, w_v, std::nullopt, std::nullopt, 0.0,
            exponentials, inside);
  in.problem.Dv = 0;
  return in;
}

Tensor general_scores(const Tensor& queries, const Tensor& keys, const Tensor& w_v,
                      MaybeTensor features, MaybeTensor w_f, int64_t activation,
                      double negative_slope) {
  const Inputs in = scores_inputs(queries, keys, w_v, {features, w_f, activation, negative_slope},
                                  exponentials_for(queries));
  const Problem& p = in.problem;
  Tensor scores = new_tensor({p.B, p.Tq, p.Tk}, weights_dtype(in.kind));
  if (!p.empty()) run_scores(in, scores.mutable_data_ptr());
  return scores;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> general_scores_backward(
    const Tensor& queries, const Tensor& keys, const Tensor& w_v, MaybeTensor features,
    MaybeTensor w_f, int64_t activation, double negative_slope, const Tensor& grad_scores,
    int64_t needs) {
  const Inside inside{features, w_f, activation, negative_slope};
  const Inputs in = scores_inputs(queries, keys, w_v, inside, Exponentials::as_read);
  Tensor grad_queries = gradient(queries, needs & need_queries);
  Tensor grad_keys = gradient(keys, needs & need_keys);
  Tensor grad_w = gradient(w_v, needs & need_w);
  InsideGradients grads(inside, needs);
  if (in.problem.empty()) {
    for (Tensor* t : {&grad_queries, &grad_keys, &grad_w}) torch::stable::zero_(*t);
    grads.zero();
  } else {
    std::vector<Tensor> owned;
    Backward g;
    g.grad_scores_in =
        rows_like(grad_scores, weights_dtype(in.kind), "grad_scores", in.problem, owned);
    g.grad_queries = data_or_null(grad_queries, needs & need_queries);
    g.grad_keys = data_or_null(grad_keys, needs & need_keys);
    grads.run(in, g, data_or_null(grad_w, needs & need_w));
  }
  return {grad_queries, grad_keys, grad_w, grads.features, grads.w_f};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("general_attend", TORCH_BOX(&general_attend));
  m.impl("general_attend_backward", TORCH_BOX(&general_attend_backward));
  m.impl("general_attend_backward_onto", TORCH_BOX(&general_attend_backward_onto));
  m.impl("location_attend", TORCH_BOX(&location_attend));
  m.impl("location_convolution_backward", TORCH_BOX(&convolve_backward));
  m.impl("general_scores", TORCH_BOX(&general_scores));
  m.impl("general_scores_backward", TORCH_BOX(&general_scores_backward));
}

}  // namespace
}  // namespace bahdanau_fast

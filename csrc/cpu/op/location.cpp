// The operators of bahdanau_fast/ops/location.py for CPU tensors.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "attend.h"

namespace bahdanau_fast {
namespace {

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
std::tuple<Tensor, Tensor> convolution_backward(const Tensor& grad_features, const Tensor& location,
                                                const Tensor& w_conv, int64_t needs) {
  Located in(location, w_conv, std::nullopt);
  const Convolution& p = in.p;
  STD_TORCH_CHECK(storage_kind(grad_features, "grad_features") == in.kind &&
                      grad_features.dim() == 3 && grad_features.size(0) == p.B &&
                      grad_features.size(1) == p.Tk && grad_features.size(2) == p.C,
                  "grad_features must have shape (B, Tk, C) and the dtype of location");
  Tensor grad_location = gradient(location, needs & 1), grad_w = gradient(w_conv, needs & 2);
  if (p.B == 0 || p.Tk == 0 || p.C == 0)
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

// Attention with features from a convolution of the location; gives these too.
std::tuple<Tensor, Tensor, Tensor> attend_location(const Tensor& queries, const Tensor& keys,
                                                   const Tensor& values, const Tensor& w_v,
                                                   const Tensor& location, const Tensor& w_conv,
                                                   MaybeTensor b_conv, const Tensor& w_f,
                                                   MaybeTensor valid_lens, MaybeTensor mask,
                                                   MaybeTensor seed, double dropout_p,
                                                   int64_t activation, double negative_slope) {
  const MaybeTensor features = convolve(location, w_conv, b_conv), weight = w_f;
  const AttentionArguments args{queries, keys,       values,     w_v,           features,
                                weight,  valid_lens, mask,       kNone,         kNone,
                                seed,    dropout_p,  activation, negative_slope};
  const auto [context, weights] =
      attend_to(Inputs(queries, keys, args, exponentials_for(queries)), true);
  return {context, weights, *features};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("attend_location", TORCH_BOX(&attend_location));
  m.impl("convolution_backward", TORCH_BOX(&convolution_backward));
}

}  // namespace
}  // namespace bahdanau_fast

// The operators of a whole decoder (bahdanau_fast/ops/decode.py) for CUDA tensors of 16 bits.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "inputs.h"
#include "products.h"

namespace bahdanau_fast::gpu {
namespace {

// Bytes that tokens may take for what a loop makes bit by bit.
constexpr int64_t kMostWritten = 1 << 28;

// The queries, which the launch makes itself, have the shape of the first key.
Inputs inputs_of(const DecoderArguments& args) {
  const Tensor keys = in_vectors(args.keys), values = in_vectors(args.values);
  STD_TORCH_CHECK(keys.dim() == 3 && keys.size(1) > 0, "keys must have 3 dimensions, and rows");
  Tensor queries = keys;
  queries = torch::stable::narrow(queries, 1, 0, 1);
  return Inputs({queries, keys, values, args.w_v, kNone, kNone, args.valid_lens, args.mask,
                 args.table, args.keys_max, args.seed, args.dropout_p},
                Use::decoder);
}

struct DecoderInputs {
  DecoderInputs(const DecoderArguments& args, int64_t steps) : in(inputs_of(args)) {
    STD_TORCH_CHECK(in.kernels->decode != nullptr, "hidden must have 16 bits for CUDA kernels");
    d.p = in.problem;
    STD_TORCH_CHECK(args.hidden.dim() == 3 && args.hidden.size(0) == 1 &&
                        args.w_input.size(0) == 0 && !args.masks.has_value(),
                    "hidden must be of one layer for CUDA kernels");
    d.lstm = args.cell.has_value();
    d.T = steps;
    d.H = args.hidden.size(2);
    const int64_t G = d.gates() * d.H, B = d.p.B;
    d.hidden = data(args.hidden, {1, B, d.H}, "hidden");
    d.cell = data_or_zero(args.cell, {1, B, d.H}, "cell");
    d.w_query = data(args.w_query, {d.p.H, d.H}, "w_query");
    d.w_context = in.rows_of(args.w_context, G, d.p.Dv, "w_context");
    d.w_hidden = data(args.w_hidden, {1, G, d.H}, "w_hidden");
    d.bias = static_cast<const char*>(data(args.bias, {1, 4 * d.H}, "bias")) + 2 * 3 * d.H;
  }

  // Of a tensor that must have this shape.
  const void* data(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* name,
                   bool wide = false) {
    return in.data_of(tensor, wide ? ScalarType::Float : in.dtype, shape, name);
  }
  const void* data_or_zero(const MaybeTensor& tensor, std::initializer_list<int64_t> shape,
                           const char* name, bool wide = false) {
    return tensor.has_value() ? data(*tensor, shape, name, wide) : nullptr;
  }
  // A result, and where its numbers are; null if its first size is 0.
  template <class X>
  Tensor make(const std::vector<int64_t>& shape, ScalarType type, X** numbers) const {
    Tensor out = in.new_tensor(shape, type);
    *numbers = static_cast<X*>(data_or_null(out, shape[0] > 0));
    return out;
  }
  Tensor make(const std::vector<int64_t>& shape, void** numbers) const {
    return make(shape, in.dtype, numbers);
  }

  Inputs in;
  Decoder d;
};

int64_t steps_of(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) > 0, name, " must be of at least one step");
  return tensor.size(0);
}

auto all_steps(const DecoderArguments& args, const Tensor& input_gates, bool keep) {
  DecoderInputs inputs(args, steps_of(input_gates, "input_gates"));
  DecoderForward f{inputs.d};
  const int64_t B = f.p.B, T = f.T, H = f.H, saved = keep ? T : 1;
  f.input_gates = inputs.data(input_gates, {T, B, f.gates() * H}, "input_gates");
  const Tensor states = inputs.make({1, T + 1, B, H}, &f.states);
  const Tensor cells = inputs.make({f.lstm ? 1 : 0, T + 1, B, H}, &f.cells);
  const Tensor contexts = inputs.make({saved, B, f.p.Dv}, &f.contexts);
  const Tensor queries = inputs.make({saved, B, f.p.H}, &f.queries);
  const Tensor weights = inputs.make({T, B, f.p.Tk}, ScalarType::Float, &f.weights);
  const Tensor gates = inputs.make({1, saved, B, 4 * H}, &f.saved_gates);
  if (!keep) f.saved_gates = nullptr;
  inputs.in.kernels->decode(f, inputs.in.device, inputs.in.memory());
  return std::tuple{states, cells, contexts, queries, weights, gates};
}

auto all_steps_backward(const DecoderArguments& args, const DecodedArguments& decoded) {
  DecoderInputs inputs(args, steps_of(decoded.queries, "queries"));
  DecoderBackward g{inputs.d};
  const int64_t B = g.p.B, T = g.T, H = g.H, Tk = g.p.Tk;
  g.states = inputs.data(decoded.states, {1, T + 1, B, H}, "states");
  if (g.lstm) g.cells = inputs.data(decoded.cells, {1, T + 1, B, H}, "cells");
  g.queries = inputs.data(decoded.queries, {T, B, g.p.H}, "queries");
  g.weights = inputs.data(decoded.weights, {T, B, Tk}, "weights", true);
  g.saved_gates = inputs.data(decoded.gates, {1, T, B, 4 * H}, "gates");
  g.grad_states = inputs.data_or_zero(decoded.grad_states, {T, B, H}, "grad_states");
  g.grad_hidden = inputs.data_or_zero(decoded.grad_hidden, {1, B, H}, "grad_hidden");
  g.grad_cell = inputs.data_or_zero(decoded.grad_cell, {1, B, H}, "grad_cell");
  g.grad_weights = inputs.data_or_zero(decoded.grad_weights, {T, B, Tk}, "grad_weights", true);
  const Tensor grad_gates = inputs.make({1, T, B, 4 * H}, &g.grad_gates);
  const Tensor grad_first = inputs.make({1, B, H}, &g.grad_first);
  const Tensor grad_first_cell = inputs.make({g.lstm ? 1 : 0, B, H}, &g.grad_first_cell);
  const Tensor grad_queries = inputs.make({T, B, g.p.H}, &g.grad_queries);
  const Tensor grad_contexts = inputs.make({T, B, g.p.Dv}, &g.grad_contexts);
  Tensor grad_scores = inputs.make({B, T, Tk}, ScalarType::Float, &g.grad_scores);
  const Tensor dropped = inputs.make({g.p.seed != nullptr ? T : 0, B, Tk}, &g.dropped);
  inputs.in.kernels->decode_backward(g, inputs.in.device, inputs.in.memory());
  return std::tuple{grad_gates,   grad_first,    grad_first_cell,
                    grad_queries, grad_contexts, torch::stable::transpose(grad_scores, 0, 1),
                    dropped};
}

// Whether what is queued goes into a CUDA graph, which knows no step to end at.
bool captures(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  STD_TORCH_CHECK(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess,
                  "the stream does not tell whether it captures");
  return status != cudaStreamCaptureStatusNone;
}

int64_t number_at(const void* address, void* stream) {
  int64_t number = 0;
  const auto on = static_cast<cudaStream_t>(stream);
  STD_TORCH_CHECK(
      cudaMemcpyAsync(&number, address, sizeof number, cudaMemcpyDeviceToHost, on) == cudaSuccess &&
          cudaStreamSynchronize(on) == cudaSuccess,
      "a number could not be read from the GPU");
  return number;
}

// left_out has no tokens: their biases are -inf. V is a multiple of 16.
auto greedy_steps(const DecoderArguments& args, const GreedyArguments& of_tokens) {
  const auto& [embedding, w_embedded, input_bias, w_dense, dense_bias, left_out, first, last, blank,
               max_steps] = of_tokens;
  STD_TORCH_CHECK(max_steps > 0, "max_steps must be at least 1");
  STD_TORCH_CHECK(left_out.numel() == 0, "left_out must be empty for CUDA kernels");
  STD_TORCH_CHECK(embedding.dim() == 2 && w_embedded.dim() == 2, "embedding must be a matrix");
  DecoderInputs inputs(args, max_steps);
  DecoderForward f{inputs.d};
  Greedy& greedy = f.greedy;
  const int64_t B = f.p.B, T = f.T, H = f.H, V = w_dense.size(0), E = embedding.size(1);
  STD_TORCH_CHECK(V % 16 == 0 && embedding.size(0) <= V, "w_dense must have a multiple of 16 rows");
  for (const int64_t token : {first, last, blank})
    STD_TORCH_CHECK(token >= 0 && token < embedding.size(0),
                    "first, last and blank must be tokens");
  f.V = V, greedy.first = first, greedy.last = last, greedy.blank = blank;
  inputs.data(embedding, {embedding.size(0), E}, "embedding");
  inputs.data(w_embedded, {f.gates() * H, E}, "w_embedded");
  inputs.data(input_bias, {f.gates() * H}, "input_bias");
  Tensor tokens_as_rows = embedding;
  const Tensor gates = linear(torch::stable::unsqueeze(tokens_as_rows, 0), w_embedded, input_bias);
  greedy.table = gates.const_data_ptr();
  greedy.w_dense = inputs.data(w_dense, {V, H}, "w_dense");
  greedy.bias = inputs.data(dense_bias, {V}, "dense_bias");
  const Tensor states = inputs.make({2, B, H}, &f.states);
  const Tensor contexts = inputs.make({B, f.p.Dv}, &f.contexts);
  const Tensor queries = inputs.make({B, f.p.H}, &f.queries);
  Tensor weights = inputs.make({T, B, f.p.Tk}, ScalarType::Float, &f.weights);
  Tensor tokens = inputs.make({B, T}, ScalarType::Long, &greedy.tokens);
  const Tensor steps = inputs.make({1}, ScalarType::Long, &greedy.steps);
  Tensor best = inputs.make({2 * B}, ScalarType::Long, &greedy.best);
  torch::stable::zero_(best);
  void* const stream = inputs.in.device.stream;
  greedy.whole = captures(stream);
  inputs.in.kernels->decode(f, inputs.in.device, inputs.in.memory());
  Tensor by_row = torch::stable::transpose(weights, 0, 1);
  if (greedy.whole) return std::tuple{tokens, by_row};
  const int64_t taken = number_at(greedy.steps, stream);
  return std::tuple{torch::stable::narrow(tokens, 1, 0, taken),
                    torch::stable::narrow(by_row, 1, 0, taken)};
}

// Weights and grad_scores (B,T,Tk), grad_context (B,T,Dv).
auto backward_keys(const AttentionArguments& args, const Tensor& weights,
                   const MaybeTensor& grad_context, const Tensor& grad_scores, int64_t needs) {
  Inputs in(args, Use::decoder);
  const Problem& p = in.problem;
  Tensor grad_keys = in.new_tensor({p.B, p.Tk, p.H}, in.dtype, needs & need_keys);
  Tensor grad_w = in.new_tensor(gradient_shape(args.w_v, needs & need_w), in.dtype);
  Tensor grad_values = in.new_tensor({p.B, p.Tk, p.Dv}, in.dtype, needs & need_values);
  if ((needs & need_values) != 0 && grad_context.has_value())
    grad_values = cast(torch::stable::matmul(
                           torch::stable::transpose(cast(weights, in.dtype), 1, 2), *grad_context),
                       in.dtype);
  else if ((needs & need_values) != 0)
    torch::stable::zero_(grad_values);
  if ((needs & (need_keys | need_w)) == 0) return std::tuple{grad_keys, grad_values, grad_w};
  Backward g;
  g.p = p;
  const Tensor scores = packed(grad_scores);
  g.grad_scores =
      const_cast<void*>(in.data_of(scores, ScalarType::Float, {p.B, p.Tq, p.Tk}, "grad_scores"));
  g.grad_keys = data_or_null(grad_keys, needs & need_keys);
  g.grad_w = data_or_null(grad_w, needs & need_w);
  in.kernels->grad_keys(g, in.device, in.memory());
  return std::tuple{grad_keys, grad_values, grad_w};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CUDA, m) {
  m.impl("decode", TORCH_BOX(&decode<all_steps>));
  m.impl("decode_greedy", TORCH_BOX(&decode_greedy<greedy_steps>));
  m.impl("decode_backward", TORCH_BOX(&decode_backward<all_steps_backward>));
  m.impl("attend_backward_keys", TORCH_BOX(&attend_backward_keys<backward_keys>));
}

}  // namespace

const char* why_not_decode(const Decoder& d) {
  if (d.V * d.gates() * d.H * 2 > kMostWritten)
    return "the gates of every token take too much memory";
  if (d.V > 0 && d.T > kMostWritten / 4 / (d.p.B * d.p.Tk))
    return "weights of so many steps take too much memory";
  int device = 0;
  STD_TORCH_CHECK(cudaGetDevice(&device) == cudaSuccess, "there is no current CUDA device");
  return kernels_bf16.why_not_decode(d, current_device(device, &kernels_bf16));
}

}  // namespace bahdanau_fast::gpu

// The operators of a whole decoder (bahdanau_fast/ops/decode.py) for CUDA tensors of 16 bits.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "decoder.h"
#include "inputs.h"
#include "products.h"

namespace bahdanau_fast::gpu {
namespace {

// Bytes that tokens may take for what a loop makes bit by bit.
constexpr int64_t kMostWritten = 1 << 28;

// What both directions are given beside the inputs of the attention.
struct Decoding {
  const Tensor &hidden, &w_query, &w_context, &w_input, &w_hidden, &bias;
  const MaybeTensor &cell, &masks;
};

Given attention_of(const Tensor& queries, const Tensor& keys, const Tensor& values,
                   const Tensor& w_v, const MaybeTensor& lens, const MaybeTensor& mask,
                   const MaybeTensor& table, const MaybeTensor& keys_max, const MaybeTensor& seed,
                   double dropout_p) {
  static const MaybeTensor none;
  return {queries, keys, values, w_v,      none, none,      none, none, none,
          lens,    mask, table,  keys_max, seed, dropout_p, 0,    0,    true};
}

// A place for queries, which such a call makes itself.
Tensor first_key(const Tensor& keys) {
  STD_TORCH_CHECK(keys.dim() == 3 && keys.size(1) > 0, "keys must have 3 dimensions, and rows");
  Tensor whole = keys;
  return torch::stable::narrow(whole, 1, 0, 1);
}

struct Arguments {
  Arguments(const Given& of, const Decoding& with, int64_t steps)
      : in(of, false, std::nullopt, std::nullopt) {
    STD_TORCH_CHECK(in.kernels->decode != nullptr, "hidden must have 16 bits for CUDA kernels");
    d.p = in.problem;
    STD_TORCH_CHECK(with.hidden.dim() == 3 && with.hidden.size(0) == 1 &&
                        with.w_input.size(0) == 0 && !with.masks.has_value(),
                    "hidden must be of one layer for CUDA kernels");
    d.lstm = with.cell.has_value();
    d.T = steps;
    d.H = with.hidden.size(2);
    const int64_t G = d.gates() * d.H, B = d.p.B;
    hidden = data(with.hidden, {1, B, d.H}, "hidden");
    if (d.lstm) cell = data(*with.cell, {1, B, d.H}, "cell");
    d.w_query = data(with.w_query, {d.p.H, d.H}, "w_query");
    d.w_context = in.rows_of(with.w_context, G, d.p.Dv, "w_context");
    d.w_hidden = data(with.w_hidden, {1, G, d.H}, "w_hidden");
    bias = static_cast<const char*>(data(with.bias, {1, 4 * d.H}, "bias")) + 2 * 3 * d.H;
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
  Tensor make(const std::vector<int64_t>& shape) const { return in.new_tensor(shape, in.dtype); }

  Inputs in;
  Decoder d;
  const void *hidden = nullptr, *cell = nullptr, *bias = nullptr;
};

int64_t steps_of(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) > 0, name, " must be of at least one step");
  return tensor.size(0);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decode(
    const Tensor& input_gates, const Tensor& hidden, MaybeTensor cell, const Tensor& keys,
    MaybeTensor table, MaybeTensor keys_max, const Tensor& values, MaybeTensor valid_lens,
    MaybeTensor mask, const Tensor& w_query, const Tensor& w_v, const Tensor& w_context,
    const Tensor& w_input, const Tensor& w_hidden, const Tensor& bias, MaybeTensor masks,
    MaybeTensor seed, double dropout_p, bool keep) {
  const Tensor rows = in_vectors(keys), of_values = in_vectors(values), queries = first_key(rows);
  Arguments of(attention_of(queries, rows, of_values, w_v, valid_lens, mask, table, keys_max, seed,
                            dropout_p),
               {hidden, w_query, w_context, w_input, w_hidden, bias, cell, masks},
               steps_of(input_gates, "input_gates"));
  DecoderForward f{of.d};
  const int64_t B = f.p.B, T = f.T, H = f.H, kept = keep ? T : 1;
  f.input_gates = of.data(input_gates, {T, B, f.gates() * H}, "input_gates");
  f.hidden = of.hidden, f.cell = of.cell, f.bias = of.bias;
  Tensor states = of.make({1, T + 1, B, H}), cells = of.make({f.lstm ? 1 : 0, T + 1, B, H});
  Tensor contexts = of.make({kept, B, f.p.Dv}), asked = of.make({kept, B, f.p.H});
  Tensor weights = of.in.new_tensor({T, B, f.p.Tk}, ScalarType::Float);
  Tensor gates = of.make({1, kept, B, 4 * H});
  f.states = states.mutable_data_ptr(), f.cells = data_or_null(cells, f.lstm);
  f.contexts = contexts.mutable_data_ptr(), f.queries = asked.mutable_data_ptr();
  f.weights = weights.mutable_data_ptr(), f.gates_kept = data_or_null(gates, keep);
  of.in.kernels->decode(f, of.in.device, of.in.memory());
  return {states, cells, contexts, asked, weights, gates};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decode_backward(
    const Tensor& hidden, MaybeTensor cell, const Tensor& keys, MaybeTensor table,
    MaybeTensor keys_max, const Tensor& values, MaybeTensor valid_lens, MaybeTensor mask,
    const Tensor& w_query, const Tensor& w_v, const Tensor& w_context, const Tensor& w_input,
    const Tensor& w_hidden, const Tensor& bias, MaybeTensor masks, MaybeTensor seed,
    double dropout_p, const Tensor& states, const Tensor& cells, const Tensor& queries,
    const Tensor& weights, const Tensor& gates, MaybeTensor grad_states, MaybeTensor grad_hidden,
    MaybeTensor grad_cell, MaybeTensor grad_weights) {
  const Tensor rows = in_vectors(keys), of_values = in_vectors(values), place = first_key(rows);
  Arguments of(
      attention_of(place, rows, of_values, w_v, valid_lens, mask, table, keys_max, seed, dropout_p),
      {hidden, w_query, w_context, w_input, w_hidden, bias, cell, masks},
      steps_of(queries, "queries"));
  DecoderBackward g{of.d};
  const int64_t B = g.p.B, T = g.T, H = g.H, Tk = g.p.Tk;
  g.states = of.data(states, {1, T + 1, B, H}, "states");
  if (g.lstm) g.cells = of.data(cells, {1, T + 1, B, H}, "cells");
  g.queries = of.data(queries, {T, B, g.p.H}, "queries");
  g.weights = of.data(weights, {T, B, Tk}, "weights", true);
  g.gates_kept = of.data(gates, {1, T, B, 4 * H}, "gates");
  g.grad_states = of.data_or_zero(grad_states, {T, B, H}, "grad_states");
  g.grad_hidden = of.data_or_zero(grad_hidden, {1, B, H}, "grad_hidden");
  g.grad_cell = of.data_or_zero(grad_cell, {1, B, H}, "grad_cell");
  g.grad_weights = of.data_or_zero(grad_weights, {T, B, Tk}, "grad_weights", true);
  Tensor grad_gates = of.make({1, T, B, 4 * H}), grad_first = of.make({1, B, H});
  Tensor grad_first_cell = of.make({g.lstm ? 1 : 0, B, H});
  Tensor grad_queries = of.make({T, B, g.p.H}), grad_contexts = of.make({T, B, g.p.Dv});
  Tensor grad_scores = of.in.new_tensor({B, T, Tk}, ScalarType::Float);
  const bool drops = g.p.seed != nullptr;
  Tensor dropped = of.make({drops ? T : 0, B, Tk});
  g.grad_gates = grad_gates.mutable_data_ptr(), g.grad_first = grad_first.mutable_data_ptr();
  g.grad_first_cell = data_or_null(grad_first_cell, g.lstm);
  g.grad_queries = grad_queries.mutable_data_ptr();
  g.grad_contexts = grad_contexts.mutable_data_ptr();
  g.grad_scores = grad_scores.mutable_data_ptr(), g.dropped = data_or_null(dropped, drops);
  of.in.kernels->decode_backward(g, of.in.device, of.in.memory());
  return {grad_gates,   grad_first,    grad_first_cell,
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

int64_t number_at(const void* place, void* stream) {
  int64_t number = 0;
  const auto on = static_cast<cudaStream_t>(stream);
  STD_TORCH_CHECK(
      cudaMemcpyAsync(&number, place, sizeof number, cudaMemcpyDeviceToHost, on) == cudaSuccess &&
          cudaStreamSynchronize(on) == cudaSuccess,
      "a number could not be read from the GPU");
  return number;
}

// left_out has no tokens: their biases are -inf. V is a multiple of 16.
std::tuple<Tensor, Tensor> decode_greedy(
    const Tensor& embedding, const Tensor& w_embedded, const Tensor& input_bias,
    const Tensor& hidden, MaybeTensor cell, const Tensor& keys, MaybeTensor table,
    MaybeTensor keys_max, const Tensor& values, MaybeTensor valid_lens, MaybeTensor mask,
    const Tensor& w_query, const Tensor& w_v, const Tensor& w_context, const Tensor& w_input,
    const Tensor& w_hidden, const Tensor& bias, const Tensor& w_dense, const Tensor& dense_bias,
    const Tensor& left_out, int64_t first, int64_t last, int64_t blank, int64_t max_steps) {
  STD_TORCH_CHECK(max_steps > 0, "max_steps must be at least 1");
  STD_TORCH_CHECK(left_out.numel() == 0, "left_out must be empty for CUDA kernels");
  STD_TORCH_CHECK(embedding.dim() == 2 && w_embedded.dim() == 2, "embedding must be a matrix");
  const Tensor rows = in_vectors(keys), of_values = in_vectors(values), queries = first_key(rows);
  Arguments of(attention_of(queries, rows, of_values, w_v, valid_lens, mask, table, keys_max,
                            std::nullopt, 0.0),
               {hidden, w_query, w_context, w_input, w_hidden, bias, cell, std::nullopt},
               max_steps);
  DecoderForward f{of.d};
  const int64_t B = f.p.B, T = f.T, H = f.H, V = w_dense.size(0), E = embedding.size(1);
  STD_TORCH_CHECK(V % 16 == 0 && embedding.size(0) <= V, "w_dense must have a multiple of 16 rows");
  for (const int64_t token : {first, last, blank})
    STD_TORCH_CHECK(token >= 0 && token < embedding.size(0),
                    "first, last and blank must be tokens");
  f.V = V, f.greedy.first = first, f.greedy.last = last, f.greedy.blank = blank;
  of.data(embedding, {embedding.size(0), E}, "embedding");
  of.data(w_embedded, {f.gates() * H, E}, "w_embedded");
  of.data(input_bias, {f.gates() * H}, "input_bias");
  Tensor tokens_as_rows = embedding;
  const Tensor gates = linear(torch::stable::unsqueeze(tokens_as_rows, 0), w_embedded, input_bias);
  f.greedy.table = gates.const_data_ptr();
  f.greedy.w_dense = of.data(w_dense, {V, H}, "w_dense");
  f.greedy.bias = of.data(dense_bias, {V}, "dense_bias");
  f.hidden = of.hidden, f.cell = of.cell, f.bias = of.bias;
  Tensor states = of.make({2, B, H}), contexts = of.make({B, f.p.Dv}), asked = of.make({B, f.p.H});
  Tensor weights = of.in.new_tensor({T, B, f.p.Tk}, ScalarType::Float);
  Tensor tokens = of.in.new_tensor({B, T}, ScalarType::Long);
  Tensor steps = of.in.new_tensor({1}, ScalarType::Long);
  Tensor best = of.in.new_tensor({2 * B}, ScalarType::Long);
  torch::stable::zero_(best);
  f.states = states.mutable_data_ptr(), f.contexts = contexts.mutable_data_ptr();
  f.queries = asked.mutable_data_ptr(), f.weights = weights.mutable_data_ptr();
  f.greedy.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  f.greedy.steps = static_cast<int64_t*>(steps.mutable_data_ptr());
  f.greedy.best = static_cast<unsigned long long*>(best.mutable_data_ptr());
  f.greedy.whole = captures(of.in.device.stream);
  of.in.kernels->decode(f, of.in.device, of.in.memory());
  Tensor by_row = torch::stable::transpose(weights, 0, 1);
  if (f.greedy.whole) return {tokens, by_row};
  const int64_t taken = number_at(f.greedy.steps, of.in.device.stream);
  return {torch::stable::narrow(tokens, 1, 0, taken), torch::stable::narrow(by_row, 1, 0, taken)};
}

// Of many steps at once: weights and grad_scores (B,T,Tk), grad_context (B,T,Dv).
std::tuple<Tensor, Tensor, Tensor> attend_backward_keys(
    const Tensor& weights, MaybeTensor grad_context, const Tensor& grad_scores, int64_t needs,
    const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
    MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor table, MaybeTensor keys_max) {
  Inputs in(attention_of(queries, keys, values, w_v, valid_lens, mask, table, keys_max,
                         std::nullopt, 0.0),
            false, std::nullopt, std::nullopt);
  const Problem& p = in.problem;
  Tensor grad_keys = in.new_tensor({p.B, p.Tk, p.H}, in.dtype, needs & need_keys);
  Tensor grad_w = in.new_tensor(gradient_shape(w_v, needs & need_w), in.dtype);
  Tensor grad_values = in.new_tensor({p.B, p.Tk, p.Dv}, in.dtype, needs & need_values);
  if ((needs & need_values) != 0 && grad_context.has_value())
    grad_values = cast(torch::stable::matmul(
                           torch::stable::transpose(cast(weights, in.dtype), 1, 2), *grad_context),
                       in.dtype);
  else if ((needs & need_values) != 0)
    torch::stable::zero_(grad_values);
  if ((needs & (need_keys | need_w)) == 0) return {grad_keys, grad_values, grad_w};
  Backward g;
  g.p = p;
  const Tensor scores = packed(grad_scores);
  g.grad_scores =
      const_cast<void*>(in.data_of(scores, ScalarType::Float, {p.B, p.Tq, p.Tk}, "grad_scores"));
  g.grad_keys = data_or_null(grad_keys, needs & need_keys);
  g.grad_w = data_or_null(grad_w, needs & need_w);
  in.kernels->grad_keys(g, in.device, in.memory());
  return {grad_keys, grad_values, grad_w};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CUDA, m) {
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("decode_greedy", TORCH_BOX(&decode_greedy));
  m.impl("decode_backward", TORCH_BOX(&decode_backward));
  m.impl("attend_backward_keys", TORCH_BOX(&attend_backward_keys));
}

}  // namespace

const char* why_not_decode(bool lstm, bool backward, int64_t B, int64_t Tk, int64_t F, int64_t Dv,
                           int64_t H, int64_t V, int64_t T) {
  Decoder d;
  d.lstm = lstm, d.H = H, d.V = V, d.T = T;
  d.p.B = B, d.p.Tq = 1, d.p.Tk = Tk, d.p.H = F, d.p.Dv = Dv;
  if (V * d.gates() * H * 2 > kMostWritten) return "the gates of every token take too much memory";
  if (V > 0 && T > kMostWritten / 4 / (B * Tk))
    return "weights of so many steps take too much memory";
  int device = 0;
  STD_TORCH_CHECK(cudaGetDevice(&device) == cudaSuccess, "there is no current CUDA device");
  return kernels_bf16.why_not_decode(d, backward, current_device(device, &kernels_bf16));
}

}  // namespace bahdanau_fast::gpu

// Backward through all steps of a decoder. Gradients that no earlier step depends on (of the
// weights, keys and values) are computed afterwards, by one product each over all steps
// (ops/decode.py).
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "decoder.h"

namespace bahdanau_fast {
namespace {

auto all_steps_backward(const DecoderArguments& args, const DecodedArguments& decoded) {
  const Tensor &states = decoded.states, &cells = decoded.cells, &queries = decoded.queries,
               &weights = decoded.weights, &gates = decoded.gates;
  const MaybeTensor &grad_states = decoded.grad_states, &grad_hidden = decoded.grad_hidden,
                    &grad_cell = decoded.grad_cell, &grad_weights = decoded.grad_weights;
  Inputs in = inputs_of_step(args);
  const Decoder d(length(queries, 3, "queries"), args, in);
  const int64_t T = d.T, B = d.B, H = d.H, L = d.L;
  d.check(states, {L, T + 1, B, H}, "states"), d.check(queries, {T, B, d.F}, "queries");
  d.check(gates, {L, T, B, 4 * H}, "gates");
  d.check(cells, {d.lstm ? L : 0, T + 1, B, H}, "cells");
  if (grad_states.has_value()) d.check(*grad_states, {T, B, H}, "grad_states");
  if (grad_hidden.has_value()) d.check(*grad_hidden, {L, B, H}, "grad_hidden");
  if (grad_cell.has_value()) d.check(*grad_cell, {L, B, H}, "grad_cell");
  d.check(weights, {T, B, d.Tk}, "weights");
  if (grad_weights.has_value()) d.check(*grad_weights, {T, B, d.Tk}, "grad_weights");
  Tensor grad_gates = new_tensor({L, T, B, 4 * H}, d.type);
  Tensor grad_first = new_tensor({L, B, H}, d.type);
  Tensor grad_first_cell = new_tensor({d.lstm ? L : 0, B, H}, d.type);
  Tensor grad_queries = new_tensor({T, B, d.F}, d.type);
  Tensor grad_contexts = new_tensor({T, B, d.Dv}, d.type);
  Tensor grad_scores = new_tensor({T, B, d.Tk}, d.weight_type);
  Tensor dropped_weights = new_tensor({in.problem.dropout ? T : 0, B, d.Tk}, d.weight_type);
  void* grad_h = grad_first.mutable_data_ptr();
  void* grad_c = grad_first_cell.mutable_data_ptr();
  const auto begin = [&](const MaybeTensor& from, Tensor& to, int64_t n) {
    if (from.has_value())
      copy(to.mutable_data_ptr(), from->const_data_ptr(), n * d.bytes);
    else
      clear(to.mutable_data_ptr(), n * d.bytes);
  };
  begin(grad_hidden, grad_first, L * B * H);
  begin(grad_cell, grad_first_cell, d.lstm ? L * B * H : 0);
  const Packed query_weight = d.pack(args.w_query, 0, H, false);
  const Packed context_weight = d.pack(args.w_context, 0, d.Dv, false);
  std::vector<Packed> hidden_weight, input_weight;
  for (int64_t l = 0; l < L; ++l) hidden_weight.push_back(d.pack(args.w_hidden, l, H, false));
  for (int64_t l = 1; l < L; ++l) input_weight.push_back(d.pack(args.w_input, l - 1, H, false));
  Buffer below(B * H * d.bytes);
  const uint64_t first_seed = in.problem.seed;
  const auto at_step = [&](const Tensor& tensor, int64_t t) {
    return d.at(tensor.mutable_data_ptr(), t * B * d.Tk);
  };

  for (int64_t t = T - 1; t >= 0; --t) {
    if (grad_states.has_value())
      d.each(B * H, [&](auto zero, int64_t i, int64_t end) {
        using A = decltype(zero);
        const A* from = static_cast<const A*>(grad_states->const_data_ptr()) + t * B * H;
        for (; i < end; ++i) static_cast<A*>(grad_h)[(L - 1) * B * H + i] += from[i];
      });
    void* grad_context = d.at(grad_contexts.mutable_data_ptr(), t * B * d.Dv);
    clear(grad_context, B * d.Dv * d.bytes);
    for (int64_t l = L - 1; l >= 0; --l) {
      void* grad_gate = d.at(grad_gates.mutable_data_ptr(), d.gates_of(l, t));
      d.rows([&](int64_t b) {
        CellStep step;
        step.H = H;
        // The backward of a cell only reads these.
        step.gates = const_cast<void*>(d.at(gates.const_data_ptr(), d.gates_of(l, t) + b * 4 * H));
        step.hidden_before = d.at(states.const_data_ptr(), d.state_of(l, t) + b * H);
        CellGrads grads;
        grads.gates = d.at(grad_gate, b * 4 * H);
        grads.hidden = d.at(grad_h, (l * B + b) * H);
        if (d.lstm) {
          step.cell_before = d.at(cells.const_data_ptr(), d.state_of(l, t) + b * H);
          step.cell = const_cast<void*>(d.at(cells.const_data_ptr(), d.state_of(l, t + 1) + b * H));
          grads.cell = d.at(grad_c, (l * B + b) * H);
        }
        (d.lstm ? d.k.lstm_row_back : d.k.gru_row_back)(step, grads);
      });
      hidden_weight[l].add(d.at(grad_gate, d.hidden_from), 4 * H, B, d.at(grad_h, l * B * H), H);
      if (l == 0) {
        context_weight.add(grad_gate, 4 * H, B, grad_context, d.Dv);
      } else if (d.masks == nullptr) {
        input_weight[l - 1].add(grad_gate, 4 * H, B, d.at(grad_h, (l - 1) * B * H), H);
      } else {
        clear(below.get(), B * H * d.bytes);
        input_weight[l - 1].add(grad_gate, 4 * H, B, below.get(), H);
        d.each(B * H, [&](auto zero, int64_t i, int64_t end) {
          using A = decltype(zero);
          const A* mask = static_cast<const A*>(d.masks) + d.mask_of(l, t);
          A* to = static_cast<A*>(grad_h) + (l - 1) * B * H;
          for (; i < end; ++i) to[i] += static_cast<const A*>(below.get())[i] * mask[i];
        });
      }
    }
    in.problem.queries = {d.at(queries.const_data_ptr(), t * B * d.F), d.F, d.F};
    in.problem.seed = seed_of_step(first_seed, t);
    Backward g;
    g.weights = at_step(weights, t);
    g.grad_context = {grad_context, d.Dv, d.Dv};
    if (grad_weights.has_value()) g.grad_weights = {at_step(*grad_weights, t), d.Tk, d.Tk};
    g.grad_queries = d.at(grad_queries.mutable_data_ptr(), t * B * d.F);
    g.grad_scores_out = at_step(grad_scores, t);
    if (in.problem.dropout) g.dropped_weights = at_step(dropped_weights, t);
    if (d.empty())
      clear(g.grad_queries, B * d.F * d.bytes);
    else
      run_backward(in, g, {});
    query_weight.add(g.grad_queries, d.F, B, d.at(grad_h, (L - 1) * B * H), H);
  }
  return std::tuple{grad_gates,    grad_first,  grad_first_cell, grad_queries,
                    grad_contexts, grad_scores, dropped_weights};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("decode_backward", TORCH_BOX(&decode_backward<all_steps_backward>));
}

}  // namespace
}  // namespace bahdanau_fast

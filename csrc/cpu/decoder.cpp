// A recurrent decoder that attends at every step, over a whole sequence in one call: the operators
// of bahdanau_fast/decoding.py for CPU tensors.
//
// Sizes: L layers, T steps, B rows, H hidden units of the cells, G = 3H (GRU) or 4H (LSTM) gates,
// F hidden units of the attention.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "run.h"

namespace bahdanau_fast {
namespace {

// A weight, packed for products from the left: (K,N), or the transpose of the (N,K) given.
class Packed {
 public:
  Packed(const Kernels& kernels, int64_t bytes, const void* weight, int64_t row_stride,
         int64_t rows, int64_t columns, bool transposed)
      : k_(kernels),
        K_(transposed ? columns : rows),
        N_(transposed ? rows : columns),
        panels_((N_ + k_.panel_columns() - 1) / k_.panel_columns()),
        data_(panels_ * k_.panel_columns() * K_ * bytes) {
    parallel(
        panels_, K_ * k_.panel_columns(), [] { return 0; },
        [&](int64_t index, int) {
          k_.pack_panel(weight, transposed ? 1 : row_stride, transposed ? row_stride : 1, K_, N_,
                        index, data_.get());
        });
  }

  // out += left times the matrix.
  void add(const void* left, int64_t left_stride, int64_t rows, void* out,
           int64_t out_stride) const {
    parallel(
        panels_, rows * K_ * k_.panel_columns() / 16, [] { return 0; },
        [&](int64_t index, int) {
          k_.multiply_panel(left, left_stride, rows, data_.get(), K_, N_, index, out, out_stride);
        });
  }

 private:
  const Kernels& k_;
  int64_t K_, N_, panels_;
  Buffer data_;
};

struct Weights {
  const Tensor &query, &context, &input, &hidden, &bias;
};

// Everything of a call but its results.
struct Decoder {
  Decoder(const Tensor& input_gates, const Tensor& first_hidden, const MaybeTensor& first_cell,
          const Inputs& in, const Weights& w, const MaybeTensor& drop_masks)
      : attention(in), k(kernels(storage_kind(input_gates, "input_gates"))) {
    STD_TORCH_CHECK(input_gates.dim() == 3 && first_hidden.dim() == 3 &&
                        input_gates.is_contiguous() && first_hidden.is_contiguous(),
                    "input_gates and hidden must be contiguous and have 3 dimensions");
    T = input_gates.size(0), B = input_gates.size(1), G = input_gates.size(2);
    L = first_hidden.size(0), H = first_hidden.size(2);
    F = in.problem.H, Dv = in.problem.Dv, Tk = in.problem.Tk;
    lstm = first_cell.has_value();
    type = input_gates.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                    "input_gates must be float32 or float64");
    bytes = type == ScalarType::Double ? 8 : 4;
    hidden_from = 4 * H - G;
    STD_TORCH_CHECK(L > 0 && G == (lstm ? 4 : 3) * H && first_hidden.size(1) == B &&
                        in.problem.B == B && in.problem.Tq == 1,
                    "input_gates, hidden and queries do not fit together");
    check(w.query, {F, H}, "w_query"), check(w.context, {G, Dv}, "w_context");
    check(w.input, {L - 1, G, H}, "w_input"), check(w.hidden, {L, G, H}, "w_hidden");
    check(w.bias, {L, 4 * H}, "bias"), check(first_hidden, {L, B, H}, "hidden");
    if (lstm) check(*first_cell, {L, B, H}, "cell");
    if (drop_masks.has_value()) {
      check(*drop_masks, {L - 1, T, B, H}, "masks");
      masks = drop_masks->const_data_ptr();
    }
  }

  void check(const Tensor& t, std::vector<int64_t> shape, const char* name) const {
    bool fits = t.is_cpu() && t.is_contiguous() && t.scalar_type() == type &&
                t.dim() == static_cast<int64_t>(shape.size());
    for (size_t i = 0; fits && i < shape.size(); ++i) fits = t.size(i) == shape[i];
    STD_TORCH_CHECK(fits, name, " must be contiguous and have the size and dtype of the others");
  }

  // Element i of something in the storage type.
  template <class P>
  P at(P data, int64_t i) const {
    using Byte = typename std::conditional<std::is_const<std::remove_pointer_t<P>>::value,
                                           const char*, char*>::type;
    return static_cast<Byte>(data) + i * bytes;
  }

  // out[i] = a[i] (+ out[i]) (times mask[i]), for n numbers.
  template <class F>
  void each(int64_t n, const F& f) const {
    const auto run = [&](auto zero) {
      parallel((n + 4095) / 4096, 4096, [] { return 0; },
               [&](int64_t block, int) {
                 const int64_t end = block * 4096 + 4096 < n ? block * 4096 + 4096 : n;
                 f(zero, block * 4096, end);
               });
    };
    bytes == 8 ? run(double{}) : run(float{});
  }

  // The rows of one layer at one step, by the kernel of the cell.
  template <class Step>
  void rows(const Step& step) const {
    const int64_t some = 8;
    parallel((B + some - 1) / some, some * H * 16, [] { return 0; },
             [&](int64_t block, int) {
               const int64_t end = block * some + some < B ? block * some + some : B;
               for (int64_t b = block * some; b < end; ++b) step(b);
             });
  }

  Packed pack(const Tensor& weight, int64_t layer, int64_t columns, bool transposed) const {
    const int64_t rows = weight.size(weight.dim() - 2);
    return Packed(k, bytes, at(weight.const_data_ptr(), layer * rows * columns), columns, rows,
                  columns, transposed);
  }

  const Inputs& attention;
  const Kernels& k;
  int64_t T, B, G, L, H, F, Dv, Tk, bytes, hidden_from;
  bool lstm;
  ScalarType type;
  const void* masks = nullptr;

  // Blocks of the tensors that hold all steps.
  int64_t state_of(int64_t l, int64_t t) const { return (l * (T + 1) + t) * B * H; }
  int64_t gates_of(int64_t l, int64_t t) const { return (l * T + t) * B * 4 * H; }
  int64_t mask_of(int64_t l, int64_t t) const { return ((l - 1) * T + t) * B * H; }
};

uint64_t seed_of_step(uint64_t seed, int64_t t) {
  return seed + static_cast<uint64_t>(t) * 0x9e3779b97f4a7c15u;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decode(
    const Tensor& input_gates, const Tensor& hidden, MaybeTensor cell, const Tensor& keys,
    MaybeTensor table, MaybeTensor keys_max, const Tensor& values, MaybeTensor valid_lens,
    const Tensor& w_query, const Tensor& w_v, const Tensor& w_context, const Tensor& w_input,
    const Tensor& w_hidden, const Tensor& bias, MaybeTensor masks, MaybeTensor seed,
    double dropout_p) {
  const int64_t steps = input_gates.size(0), rows = input_gates.size(1);
  Tensor queries = new_tensor({steps, rows, keys.size(2)}, input_gates.scalar_type());
  const Tensor of_step = new_tensor({rows, 1, keys.size(2)}, input_gates.scalar_type());
  Inputs in(of_step, keys, table, keys_max, values, w_v, valid_lens, seed, dropout_p, true);
  const Decoder d(input_gates, hidden, cell, in, {w_query, w_context, w_input, w_hidden, bias},
                  masks);
  const int64_t T = d.T, B = d.B, H = d.H, L = d.L;
  Tensor states = new_tensor({L, T + 1, B, H}, d.type);
  Tensor cells = new_tensor({d.lstm ? L : 0, T + 1, B, H}, d.type);
  Tensor contexts = new_tensor({T, B, d.Dv}, d.type), gates = new_tensor({L, T, B, 4 * H}, d.type);
  Tensor weights = new_tensor({T, B, d.Tk}, weights_dtype(storage_kind(keys, "keys")));
  void* h = states.mutable_data_ptr();
  void* c = cells.mutable_data_ptr();
  void* a = gates.mutable_data_ptr();
  void* q = queries.mutable_data_ptr();
  for (int64_t l = 0; l < L; ++l) {
    std::memcpy(d.at(h, d.state_of(l, 0)), d.at(hidden.const_data_ptr(), l * B * H),
                B * H * d.bytes);
    if (d.lstm)
      std::memcpy(d.at(c, d.state_of(l, 0)), d.at(cell->const_data_ptr(), l * B * H),
                  B * H * d.bytes);
  }
  const Packed of_query = d.pack(w_query, 0, H, true);
  const Packed of_context = d.pack(w_context, 0, d.Dv, true);
  std::vector<Packed> of_hidden, of_input;
  for (int64_t l = 0; l < L; ++l) of_hidden.push_back(d.pack(w_hidden, l, H, true));
  for (int64_t l = 1; l < L; ++l) of_input.push_back(d.pack(w_input, l - 1, H, true));
  Buffer dropped(d.masks != nullptr ? B * H * d.bytes : 0);
  const int64_t bytes_of_weight = size_of(storage_kind(keys, "keys"));
  const uint64_t first_seed = in.problem.seed;

  for (int64_t t = 0; t < T; ++t) {
    const void* top = d.at(h, d.state_of(L - 1, t));
    void* query = d.at(q, t * B * d.F);
    std::memset(query, 0, B * d.F * d.bytes);
    of_query.add(top, H, B, query, d.F);
    in.problem.queries = {query, d.F, d.F};
    in.problem.seed = seed_of_step(first_seed, t);
    void* context = d.at(contexts.mutable_data_ptr(), t * B * d.Dv);
    run_forward(in, context,
                static_cast<char*>(weights.mutable_data_ptr()) + t * B * d.Tk * bytes_of_weight);
    const void* input = context;
    for (int64_t l = 0; l < L; ++l) {
      void* gate = d.at(a, d.gates_of(l, t));
      const void* own = d.at(bias.const_data_ptr(), l * 4 * H);
      for (int64_t b = 0; b < B; ++b) {
        void* row = d.at(gate, b * 4 * H);
        std::memcpy(row, own, 4 * H * d.bytes);
        if (l == 0)
          std::memcpy(row, d.at(input_gates.const_data_ptr(), (t * B + b) * d.G), d.G * d.bytes);
      }
      of_hidden[l].add(d.at(h, d.state_of(l, t)), H, B, d.at(gate, d.hidden_from), 4 * H);
      if (l == 0)
        of_context.add(input, d.Dv, B, gate, 4 * H);
      else
        of_input[l - 1].add(input, H, B, gate, 4 * H);
      void* after = d.at(h, d.state_of(l, t + 1));
      d.rows([&](int64_t b) {
        CellStep step;
        step.H = H;
        step.gates = d.at(gate, b * 4 * H);
        step.hidden_before = d.at(h, d.state_of(l, t) + b * H);
        step.hidden = d.at(after, b * H);
        if (d.lstm) {
          step.cell_before = d.at(c, d.state_of(l, t) + b * H);
          step.cell = d.at(c, d.state_of(l, t + 1) + b * H);
        }
        (d.lstm ? d.k.lstm_row : d.k.gru_row)(step);
      });
      input = after;
      if (d.masks != nullptr && l + 1 < L) {
        d.each(B * H, [&](auto zero, int64_t i, int64_t end) {
          using A = decltype(zero);
          const A* mask = static_cast<const A*>(d.masks) + d.mask_of(l + 1, t);
          for (; i < end; ++i)
            static_cast<A*>(dropped.get())[i] = static_cast<const A*>(after)[i] * mask[i];
        });
        input = dropped.get();
      }
    }
  }
  return {states, cells, contexts, queries, weights, gates};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decode_backward(
    const Tensor& input_gates, const Tensor& hidden, MaybeTensor cell, const Tensor& keys,
    MaybeTensor table, MaybeTensor keys_max, const Tensor& values, MaybeTensor valid_lens,
    const Tensor& w_query, const Tensor& w_v, const Tensor& w_context, const Tensor& w_input,
    const Tensor& w_hidden, const Tensor& bias, MaybeTensor masks, MaybeTensor seed,
    double dropout_p, const Tensor& states, const Tensor& cells, const Tensor& queries,
    const Tensor& weights, const Tensor& gates, MaybeTensor grad_states, MaybeTensor grad_hidden,
    MaybeTensor grad_cell, MaybeTensor grad_weights) {
  const int64_t steps = input_gates.size(0), rows = input_gates.size(1);
  const Tensor of_step = new_tensor({rows, 1, keys.size(2)}, input_gates.scalar_type());
  Inputs in(of_step, keys, table, keys_max, values, w_v, valid_lens, seed, dropout_p, true);
  const Decoder d(input_gates, hidden, cell, in, {w_query, w_context, w_input, w_hidden, bias},
                  masks);
  const int64_t T = d.T, B = d.B, H = d.H, L = d.L;
  const ScalarType of_weights = weights_dtype(storage_kind(keys, "keys"));
  d.check(states, {L, T + 1, B, H}, "states"), d.check(queries, {T, B, d.F}, "queries");
  d.check(gates, {L, T, B, 4 * H}, "gates");
  d.check(cells, {d.lstm ? L : 0, T + 1, B, H}, "cells");
  if (grad_states.has_value()) d.check(*grad_states, {T, B, H}, "grad_states");
  if (grad_hidden.has_value()) d.check(*grad_hidden, {L, B, H}, "grad_hidden");
  if (grad_cell.has_value()) d.check(*grad_cell, {L, B, H}, "grad_cell");
  STD_TORCH_CHECK(weights.is_contiguous() && weights.scalar_type() == of_weights &&
                      (!grad_weights.has_value() || (grad_weights->is_contiguous() &&
                                                     grad_weights->scalar_type() == of_weights)),
                  "weights and grad_weights must be contiguous and have the dtype of weights");
  Tensor grad_gates = new_tensor({L, T, B, 4 * H}, d.type);
  Tensor grad_first = new_tensor({L, B, H}, d.type);
  Tensor grad_first_cell = new_tensor({d.lstm ? L : 0, B, H}, d.type);
  Tensor grad_queries = new_tensor({T, B, d.F}, d.type);
  Tensor grad_contexts = new_tensor({T, B, d.Dv}, d.type);
  Tensor grad_scores = new_tensor({T, B, d.Tk}, of_weights);
  Tensor seen = new_tensor({in.problem.dropout ? T : 0, B, d.Tk}, of_weights);
  void* grad_h = grad_first.mutable_data_ptr();
  void* grad_c = grad_first_cell.mutable_data_ptr();
  const auto begin = [&](const MaybeTensor& from, Tensor& to, int64_t n) {
    if (from.has_value())
      std::memcpy(to.mutable_data_ptr(), from->const_data_ptr(), n * d.bytes);
    else
      std::memset(to.mutable_data_ptr(), 0, n * d.bytes);
  };
  begin(grad_hidden, grad_first, L * B * H);
  begin(grad_cell, grad_first_cell, d.lstm ? L * B * H : 0);
  const Packed of_query = d.pack(w_query, 0, H, false);
  const Packed of_context = d.pack(w_context, 0, d.Dv, false);
  std::vector<Packed> of_hidden, of_input;
  for (int64_t l = 0; l < L; ++l) of_hidden.push_back(d.pack(w_hidden, l, H, false));
  for (int64_t l = 1; l < L; ++l) of_input.push_back(d.pack(w_input, l - 1, H, false));
  Buffer below(B * H * d.bytes);
  const int64_t weight_bytes = size_of(storage_kind(keys, "keys"));
  const uint64_t first_seed = in.problem.seed;
  const auto of_weight = [&](const Tensor& tensor, int64_t t) {
    return static_cast<char*>(tensor.mutable_data_ptr()) + t * B * d.Tk * weight_bytes;
  };

  for (int64_t t = T - 1; t >= 0; --t) {
    if (grad_states.has_value())
      d.each(B * H, [&](auto zero, int64_t i, int64_t end) {
        using A = decltype(zero);
        const A* from = static_cast<const A*>(grad_states->const_data_ptr()) + t * B * H;
        for (; i < end; ++i) static_cast<A*>(grad_h)[(L - 1) * B * H + i] += from[i];
      });
    void* grad_context = d.at(grad_contexts.mutable_data_ptr(), t * B * d.Dv);
    std::memset(grad_context, 0, B * d.Dv * d.bytes);
    for (int64_t l = L - 1; l >= 0; --l) {
      void* grad_gate = d.at(grad_gates.mutable_data_ptr(), d.gates_of(l, t));
      d.rows([&](int64_t b) {
        CellStep step;
        step.H = H;
        // Read only, in this direction.
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
      of_hidden[l].add(d.at(grad_gate, d.hidden_from), 4 * H, B, d.at(grad_h, l * B * H), H);
      if (l == 0) {
        of_context.add(grad_gate, 4 * H, B, grad_context, d.Dv);
      } else if (d.masks == nullptr) {
        of_input[l - 1].add(grad_gate, 4 * H, B, d.at(grad_h, (l - 1) * B * H), H);
      } else {
        std::memset(below.get(), 0, B * H * d.bytes);
        of_input[l - 1].add(grad_gate, 4 * H, B, below.get(), H);
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
    g.weights = of_weight(weights, t);
    g.grad_context = {grad_context, d.Dv, d.Dv};
    if (grad_weights.has_value()) g.grad_weights = {of_weight(*grad_weights, t), d.Tk, d.Tk};
    g.grad_queries = d.at(grad_queries.mutable_data_ptr(), t * B * d.F);
    g.kept_scores = of_weight(grad_scores, t);
    if (in.problem.dropout) g.dropped = of_weight(seen, t);
    run_backward(in, g, nullptr);
    of_query.add(g.grad_queries, d.F, B, d.at(grad_h, (L - 1) * B * H), H);
  }
  return {grad_gates, grad_first, grad_first_cell, grad_queries, grad_contexts, grad_scores, seen};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("decode_backward", TORCH_BOX(&decode_backward));
}

}  // namespace
}  // namespace bahdanau_fast

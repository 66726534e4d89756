// A recurrent decoder that attends at every step, over a whole sequence in one call: given inputs,
// or the likeliest token fed back. The operators of bahdanau_fast/ops/decode.py for CPU tensors.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "decoder.h"

namespace bahdanau_fast {
namespace {

// Takes the steps. The tensors have room for `kept` of them: all, for backward, or one.
class Forward {
 public:
  Forward(const Decoder& decoder, Inputs& attention, const DecoderArguments& args, int64_t kept)
      : d(decoder),
        in(attention),
        kept_(kept),
        first_seed_(attention.problem.seed),
        bias_(args.bias.const_data_ptr()),
        query_weight_(d.pack(args.w_query, 0, d.H, true)),
        context_weight_(d.pack(args.w_context, 0, d.Dv, true)),
        dropped_(d.masks != nullptr ? d.B * d.H * d.bytes : 0) {
    const int64_t L = d.L, B = d.B, H = d.H;
    states = new_tensor({L, d.T + 1, B, H}, d.type);
    cells = new_tensor({d.lstm ? L : 0, d.T + 1, B, H}, d.type);
    contexts = new_tensor({kept, B, d.Dv}, d.type);
    queries = new_tensor({kept, B, d.F}, d.type);
    gates = new_tensor({L, kept, B, 4 * H}, d.type);
    weights = new_tensor({d.T, B, d.Tk}, d.weight_type);
    for (int64_t l = 0; l < L; ++l) {
      hidden_weight_.push_back(d.pack(args.w_hidden, l, H, true));
      if (l > 0) input_weight_.push_back(d.pack(args.w_input, l - 1, H, true));
      const auto begin = [&](Tensor& to, const Tensor& from) {
        copy(d.at(to.mutable_data_ptr(), d.state_of(l, 0)), d.at(from.const_data_ptr(), l * B * H),
             B * H * d.bytes);
      };
      begin(states, args.hidden);
      if (d.lstm) begin(cells, *args.cell);
    }
  }

  // One step; input_gates (B,G).
  void step(int64_t t, const void* input_gates) {
    const int64_t at = t % kept_, B = d.B, H = d.H;
    void* query = d.at(queries.mutable_data_ptr(), at * B * d.F);
    clear(query, B * d.F * d.bytes);
    query_weight_.add(d.at(states.const_data_ptr(), d.state_of(d.L - 1, t)), H, B, query, d.F);
    in.problem.queries = {query, d.F, d.F};
    in.problem.seed = seed_of_step(first_seed_, t);
    void* context = d.at(contexts.mutable_data_ptr(), at * B * d.Dv);
    if (d.empty())
      clear(context, B * d.Dv * d.bytes);
    else
      run_forward(in, context, d.at(weights.mutable_data_ptr(), t * B * d.Tk));
    const void* input = context;
    for (int64_t l = 0; l < d.L; ++l) {
      void* gate = d.at(gates.mutable_data_ptr(), (l * kept_ + at) * B * 4 * H);
      for (int64_t b = 0; b < B; ++b) {
        void* row = d.at(gate, b * 4 * H);
        copy(row, d.at(bias_, l * 4 * H), 4 * H * d.bytes);
        if (l == 0) copy(row, d.at(input_gates, b * d.G), d.G * d.bytes);
      }
      hidden_weight_[l].add(d.at(states.const_data_ptr(), d.state_of(l, t)), H, B,
                            d.at(gate, d.hidden_from), 4 * H);
      if (l == 0)
        context_weight_.add(input, d.Dv, B, gate, 4 * H);
      else
        input_weight_[l - 1].add(input, H, B, gate, 4 * H);
      cells_of_layer(l, t, gate);
      input = d.at(states.const_data_ptr(), d.state_of(l, t + 1));
      if (d.masks != nullptr && l + 1 < d.L) input = masked(l + 1, t, input);
    }
  }

  // The states (B,H) of the top layer after a step.
  const void* features(int64_t t) const {
    return d.at(states.const_data_ptr(), d.state_of(d.L - 1, t + 1));
  }

  Tensor states, cells, contexts, queries, weights, gates;

 private:
  void cells_of_layer(int64_t l, int64_t t, void* gate) {
    const int64_t before = d.state_of(l, t), after = d.state_of(l, t + 1), H = d.H;
    void* h = states.mutable_data_ptr();
    void* c = cells.mutable_data_ptr();
    d.rows([&](int64_t b) {
      CellStep step;
      step.H = H;
      step.gates = d.at(gate, b * 4 * H);
      step.hidden_before = d.at(h, before + b * H);
      step.hidden = d.at(h, after + b * H);
      if (d.lstm) {
        step.cell_before = d.at(c, before + b * H);
        step.cell = d.at(c, after + b * H);
      }
      (d.lstm ? d.k.lstm_row : d.k.gru_row)(step);
    });
  }

  const void* masked(int64_t l, int64_t t, const void* input) {
    d.each(d.B * d.H, [&](auto zero, int64_t i, int64_t end) {
      using A = decltype(zero);
      const A* mask = static_cast<const A*>(d.masks) + d.mask_of(l, t);
      for (; i < end; ++i)
        static_cast<A*>(dropped_.get())[i] = static_cast<const A*>(input)[i] * mask[i];
    });
    return dropped_.get();
  }

  const Decoder& d;
  Inputs& in;
  int64_t kept_;
  uint64_t first_seed_;
  const void* bias_;
  Packed query_weight_, context_weight_;
  std::vector<Packed> hidden_weight_, input_weight_;
  Buffer dropped_;
};

auto all_steps(const DecoderArguments& args, const Tensor& input_gates, bool keep) {
  Inputs in = inputs_of_step(args);
  const Decoder d(length(input_gates, 3, "input_gates"), args, in);
  d.check(input_gates, {d.T, d.B, d.G}, "input_gates");
  Forward forward(d, in, args, keep ? d.T : 1);
  for (int64_t t = 0; t < d.T; ++t)
    forward.step(t, d.at(input_gates.const_data_ptr(), t * d.B * d.G));
  return std::tuple{forward.states,  forward.cells,   forward.contexts,
                    forward.queries, forward.weights, forward.gates};
}

constexpr int64_t kMostSteps = 1 << 30;  // more could overflow the sizes of results

// The index of the first largest of n logits, skipping those in left_out; NaN counts as largest.
template <class A>
int64_t likeliest(const A* logits, int64_t n, const std::vector<char>& left_out) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (left_out[i]) continue;
    if (best < 0 || logits[i] > logits[best] ||
        (logits[i] != logits[i] && logits[best] == logits[best]))
      best = i;
  }
  return best < 0 ? 0 : best;
}

auto greedy_steps(const DecoderArguments& args, const GreedyArguments& of_tokens) {
  const auto& [embedding, w_embedded, input_bias, w_dense, dense_bias, left_out, first, last, blank,
               max_steps] = of_tokens;
  Inputs in = inputs_of_step(args);
  STD_TORCH_CHECK(max_steps > 0 && max_steps <= kMostSteps, "max_steps must be between 1 and ",
                  kMostSteps);
  const Decoder d(max_steps, args, in);
  const int64_t B = d.B, V = length(embedding, 2, "embedding"), E = embedding.size(1);
  Buffer input_gates(B * d.G * d.bytes);
  d.check(embedding, {V, E}, "embedding"), d.check(w_embedded, {d.G, E}, "w_embedded");
  d.check(input_bias, {d.G}, "input_bias"), d.check(w_dense, {V, d.H}, "w_dense");
  d.check(dense_bias, {V}, "dense_bias");
  STD_TORCH_CHECK(first >= 0 && first < V && last >= 0 && last < V && blank >= 0 && blank < V,
                  "first, last and blank must be tokens");
  length(left_out, 1, "left_out");
  std::vector<char> never(V);
  for (const double token : to_doubles(left_out, "left_out")) {
    STD_TORCH_CHECK(token >= 0 && token < double(V), "left_out must hold tokens");
    never[static_cast<int64_t>(token)] = 1;
  }
  Forward forward(d, in, args, 1);
  const Packed embedded_weight = d.pack(w_embedded, 0, E, true),
               dense_weight = d.pack(w_dense, 0, d.H, true);
  Buffer embedded(B * E * d.bytes), logits(B * V * d.bytes);
  std::vector<int64_t> token(B, first), written;  // (steps,B)
  std::vector<char> ended(B);
  int64_t left = B, steps = 0;
  while (steps < max_steps && left > 0) {
    void* gates = input_gates.get();
    for (int64_t b = 0; b < B; ++b) {
      copy(d.at(gates, b * d.G), input_bias.const_data_ptr(), d.G * d.bytes);
      copy(d.at(embedded.get(), b * E), d.at(embedding.const_data_ptr(), token[b] * E),
           E * d.bytes);
      copy(d.at(logits.get(), b * V), dense_bias.const_data_ptr(), V * d.bytes);
    }
    embedded_weight.add(embedded.get(), E, B, gates, d.G);
    forward.step(steps, gates);
    dense_weight.add(forward.features(steps), d.H, B, logits.get(), V);
    for (int64_t b = 0; b < B; ++b) {
      const void* row = d.at(static_cast<const void*>(logits.get()), b * V);
      token[b] = ended[b]       ? blank
                 : d.bytes == 8 ? likeliest(static_cast<const double*>(row), V, never)
                                : likeliest(static_cast<const float*>(row), V, never);
      written.push_back(token[b]);
      if (!ended[b] && token[b] == last) {
        ended[b] = 1;
        --left;
      }
    }
    ++steps;
  }
  Tensor tokens = new_tensor({B, steps}, ScalarType::Long);
  Tensor weights = new_tensor({B, steps, d.Tk}, d.weight_type);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t t = 0; t < steps; ++t) {
      static_cast<int64_t*>(tokens.mutable_data_ptr())[b * steps + t] = written[t * B + b];
      copy(d.at(weights.mutable_data_ptr(), (b * steps + t) * d.Tk),
           d.at(forward.weights.const_data_ptr(), (t * B + b) * d.Tk), d.Tk * d.bytes);
    }
  return std::tuple{tokens, weights};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("decode", TORCH_BOX(&decode<all_steps>));
  m.impl("decode_greedy", TORCH_BOX(&decode_greedy<greedy_steps>));
}

}  // namespace
}  // namespace bahdanau_fast

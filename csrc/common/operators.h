// The operators that both backends have: their arguments, in the order of the schemas
// (bahdanau_fast/ops), are given names here, once. A backend registers each with a function of its
// own that takes the named ones.
#pragma once

#include "common/tensors.h"

namespace bahdanau_fast {

inline const MaybeTensor kNone;

struct AttentionArguments {
  const Tensor &queries, &keys, &values, &w_v;
  const MaybeTensor &features, &w_f;                    // (B,Tk,C), (H,C)
  const MaybeTensor& valid_lens;                        // (B) or (B,Tq)
  const MaybeTensor& mask;                              // bool (B,1,Tk) or (B,Tq,Tk)
  const MaybeTensor &table = kNone, &keys_max = kNone;  // of exp_keys
  const MaybeTensor& seed = kNone;                      // one int64, with dropout
  double dropout_p = 0.0;
  int64_t activation = 0;
  double negative_slope = 0.0;
  // Without w_q or w_k queries or keys are projected already.
  const MaybeTensor &w_q = kNone, &w_k = kNone, &bias = kNone;
};

// What a backward of attention takes beside the arguments of its forward.
struct BackwardArguments {
  const Tensor& weights;
  const MaybeTensor &projected_queries, &projected_keys, &grad_context, &grad_weights;
  int64_t needs;  // bits of Needs
};

inline void check_attention(const AttentionArguments& args, int64_t backend) {
  // The number of a backend that is written in Python may reach another one in exported code.
  STD_TORCH_CHECK(backend == 0, "backend must be loaded: call bahdanau_fast.backends.available()");
  STD_TORCH_CHECK(args.w_k.has_value() || !args.bias.has_value(), "bias must come with w_k");
}

// run(arguments, need_weights, precise, narrow).
template <auto run>
auto attention(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
               MaybeTensor w_q, MaybeTensor w_k, MaybeTensor bias, MaybeTensor features,
               MaybeTensor w_f, MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor table,
               MaybeTensor keys_max, MaybeTensor seed, double dropout_p, int64_t activation,
               double negative_slope, bool need_weights, bool precise, int64_t backend,
               bool narrow) {
  const AttentionArguments args{queries,    keys,           values, w_v,      features, w_f,
                                valid_lens, mask,           table,  keys_max, seed,     dropout_p,
                                activation, negative_slope, w_q,    w_k,      bias};
  check_attention(args, backend);
  return run(args, need_weights, precise, narrow);
}

// run(arguments, of_backward).
template <auto run>
auto attention_backward(const Tensor& weights, MaybeTensor projected_queries,
                        MaybeTensor projected_keys, MaybeTensor grad_context,
                        MaybeTensor grad_weights, int64_t needs, const Tensor& queries,
                        const Tensor& keys, const Tensor& values, const Tensor& w_v,
                        MaybeTensor w_q, MaybeTensor w_k, MaybeTensor bias, MaybeTensor features,
                        MaybeTensor w_f, MaybeTensor valid_lens, MaybeTensor mask,
                        MaybeTensor table, MaybeTensor keys_max, MaybeTensor seed, double dropout_p,
                        int64_t activation, double negative_slope, int64_t backend) {
  const AttentionArguments args{queries,    keys,           values, w_v,      features, w_f,
                                valid_lens, mask,           table,  keys_max, seed,     dropout_p,
                                activation, negative_slope, w_q,    w_k,      bias};
  check_attention(args, backend);
  return run(args, BackwardArguments{weights, projected_queries, projected_keys, grad_context,
                                     grad_weights, needs});
}

// Of many steps of a decoder at once: run(arguments, weights, grad_context, grad_scores, needs).
template <auto run>
auto attend_backward_keys(const Tensor& weights, MaybeTensor grad_context,
                          const Tensor& grad_scores, int64_t needs, const Tensor& queries,
                          const Tensor& keys, const Tensor& values, const Tensor& w_v,
                          MaybeTensor valid_lens, MaybeTensor mask, MaybeTensor table,
                          MaybeTensor keys_max) {
  const AttentionArguments args{queries, keys,       values, w_v,   kNone,
                                kNone,   valid_lens, mask,   table, keys_max};
  return run(args, weights, grad_context, grad_scores, needs);
}

// What the three operators of a whole decoder share.
struct DecoderArguments {
  const Tensor& hidden;
  const MaybeTensor& cell;
  const Tensor& keys;
  const MaybeTensor &table, &keys_max;
  const Tensor& values;
  const MaybeTensor &valid_lens, &mask;
  const Tensor &w_query, &w_v, &w_context, &w_input, &w_hidden, &bias;
  const MaybeTensor &masks = kNone, &seed = kNone;
  double dropout_p = 0.0;

  // Of a step; `queries` stand in for what it computes.
  AttentionArguments attention(const Tensor& queries) const {
    return {queries,    keys, values, w_v,      kNone, kNone,
            valid_lens, mask, table,  keys_max, seed,  dropout_p};
  }
};

// What a decoder's backward takes beside: results of forward, and the gradients of results.
struct DecodedArguments {
  const Tensor &states, &cells, &queries, &weights, &gates;
  const MaybeTensor &grad_states, &grad_hidden, &grad_cell, &grad_weights;
};

// What greedy decoding takes beside.
struct GreedyArguments {
  const Tensor &embedding, &w_embedded, &input_bias, &w_dense, &dense_bias, &left_out;
  int64_t first, last, blank, max_steps;
};

// run(arguments, input_gates, keep).
template <auto run>
auto decode(const Tensor& input_gates, const Tensor& hidden, MaybeTensor cell, const Tensor& keys,
            MaybeTensor table, MaybeTensor keys_max, const Tensor& values, MaybeTensor valid_lens,
            MaybeTensor mask, const Tensor& w_query, const Tensor& w_v, const Tensor& w_context,
            const Tensor& w_input, const Tensor& w_hidden, const Tensor& bias, MaybeTensor masks,
            MaybeTensor seed, double dropout_p, bool keep) {
  return run(
      DecoderArguments{hidden, cell, keys, table, keys_max, values, valid_lens, mask, w_query, w_v,
                       w_context, w_input, w_hidden, bias, masks, seed, dropout_p},
      input_gates, keep);
}

// run(arguments, decoded).
template <auto run>
auto decode_backward(const Tensor& hidden, MaybeTensor cell, const Tensor& keys, MaybeTensor table,
                     MaybeTensor keys_max, const Tensor& values, MaybeTensor valid_lens,
                     MaybeTensor mask, const Tensor& w_query, const Tensor& w_v,
                     const Tensor& w_context, const Tensor& w_input, const Tensor& w_hidden,
                     const Tensor& bias, MaybeTensor masks, MaybeTensor seed, double dropout_p,
                     const Tensor& states, const Tensor& cells, const Tensor& queries,
                     const Tensor& weights, const Tensor& gates, MaybeTensor grad_states,
                     MaybeTensor grad_hidden, MaybeTensor grad_cell, MaybeTensor grad_weights) {
  return run(
      DecoderArguments{hidden, cell, keys, table, keys_max, values, valid_lens, mask, w_query, w_v,
                       w_context, w_input, w_hidden, bias, masks, seed, dropout_p},
      DecodedArguments{states, cells, queries, weights, gates, grad_states, grad_hidden, grad_cell,
                       grad_weights});
}

// run(arguments, of_tokens).
template <auto run>
auto decode_greedy(const Tensor& embedding, const Tensor& w_embedded, const Tensor& input_bias,
                   const Tensor& hidden, MaybeTensor cell, const Tensor& keys, MaybeTensor table,
                   MaybeTensor keys_max, const Tensor& values, MaybeTensor valid_lens,
                   MaybeTensor mask, const Tensor& w_query, const Tensor& w_v,
                   const Tensor& w_context, const Tensor& w_input, const Tensor& w_hidden,
                   const Tensor& bias, const Tensor& w_dense, const Tensor& dense_bias,
                   const Tensor& left_out, int64_t first, int64_t last, int64_t blank,
                   int64_t max_steps) {
  return run(DecoderArguments{hidden, cell, keys, table, keys_max, values, valid_lens, mask,
                              w_query, w_v, w_context, w_input, w_hidden, bias},
             GreedyArguments{embedding, w_embedded, input_bias, w_dense, dense_bias, left_out,
                             first, last, blank, max_steps});
}

}  // namespace bahdanau_fast

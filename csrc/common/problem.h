// What an attention call consists of, for the kernels of both backends. No torch, no CUDA, no
// instruction set in here.
//
// Sizes: B batch, Tq queries, Tk keys, H hidden units, Dv value features.
#pragma once

#include "common/kinds.h"

namespace bahdanau_fast {

// A (B, rows, columns) tensor whose columns lie next to each other; strides in elements.
struct View {
  const void* data = nullptr;
  int64_t batch_stride = 0, row_stride = 0;
};

// The part of a Problem that is the same for both backends.
struct Operands {
  int64_t B = 0, Tq = 0, Tk = 0, H = 0, Dv = 0;
  View queries, keys, values;  // (B,Tq,H), (B,Tk,H), (B,Tk,Dv) in the storage type
  const void* w = nullptr;     // w_v; its type and length depend on the backend
  double dropout_p = 0.0;

  bool empty() const { return B == 0 || Tq == 0 || Tk == 0; }
};

// What a backward reads and writes. WeightOf (kinds.h) is the type of the attention weights.
struct Gradients {
  const void* weights = nullptr;  // (B,Tq,Tk), contiguous, WeightOf
  View grad_context;              // (B,Tq,Dv), storage type; data may be null
  View grad_weights;              // (B,Tq,Tk), WeightOf; data may be null
  // Results, contiguous, storage type; null: not wanted.
  void* grad_queries = nullptr;  // (B,Tq,H)
  void* grad_keys = nullptr;     // (B,Tk,H)
  void* grad_values = nullptr;   // (B,Tk,Dv)
  void* grad_w = nullptr;        // its type and length depend on the backend
};

// The bits of the operators' argument `needs`: which gradients are wanted.
enum Needs : int64_t {
  need_queries = 1,
  need_keys = 2,
  need_values = 4,
  need_w = 8,
  need_w_q = 16,
  need_w_k = 32,
  need_bias = 64,
  need_features = 128,
  need_w_f = 256
};

// How the CPU computes tanh(a + c) of a query's a and a key's c. With E = exp(2a) exp(2c) it is
// (E - 1) / (E + 1). All forms but the last two share one division among four fractions.
enum class Form {
  factored,     // from exp(2a) and exp(2c) as they are: neither is large
  scaled,       // numerator and denominator divided by max(1, exp(2a)), which cannot overflow
  scaled_each,  // scaled, one division per fraction: products of four would overflow
  direct,       // tanh of the sum a + c: exp(2a) or exp(2c) would overflow, or is NaN
};

}  // namespace bahdanau_fast

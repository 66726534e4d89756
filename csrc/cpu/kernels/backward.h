// Backward, in three steps, each of which can be cut into tasks without changing a sum:
//
//   grad_scores   keys [j0, j1) of a batch row: grad_weight = grad_context . value (+ the gradient
//                 of the returned weights), and grad_value = sum_i dropout(weight) grad_context
//   grad_softmax  grad_score = weight (grad_weight - sum_j weight grad_weight), masked rows zero
//   grad_tanh     hidden units [h0, h1): with s = grad_score, t = tanh, u = 1 - t^2
//                   grad_query[i] = w sum_j s u,  grad_key[j] = w sum_i s u,  grad_w = sum_ij s t
//
// A call can start from the grad_score of an earlier one (grad_scores_in): a decoder needs
// grad_query at each step, but the other three, which are sums over its steps, only once.
//
// Nothing of size Tq x Tk x H is stored: t and u are computed from the table again. Each needs its
// own reciprocal; four share one division (Montgomery): 1/x0 = x1 (x2 x3) / (x0 x1 x2 x3).
#pragma once

#include "forward.h"

namespace bahdanau_fast {
namespace {

template <class T>
const typename WeightOf<T>::type* weights_row(const Backward& g, int64_t offset) {
  return static_cast<const typename WeightOf<T>::type*>(g.weights) + offset;
}

// A row of the saved weights after dropout, as forward multiplied the values with.
template <class T, class A>
void load_weights(const Problem& p, const Backward& g, int64_t row, int64_t j0, int64_t j1,
                  A* out) {
  const auto* from = weights_row<T>(g, row * p.Tk);
  for (int64_t j = j0; j < j1; ++j) out[j - j0] = A(widen(from[j]));
  if (p.dropout) drop_weights<A>(p.seed, p.dropout_p, row, j0, j1, out);
}

constexpr int64_t kTile = 8;  // keys, and queries, that fit the first-level cache together

// grad_weight of a few keys: columns of a (Tq,Tk) matrix.
template <class T, class A>
void grad_weights_tile(const Problem& p, const Backward& g, int64_t b, int64_t first, int64_t keys,
                       A* out) {
  if (g.grad_context.data != nullptr) {
    const Rows<T, A> values(p.values, b), grads(g.grad_context, b);
    dot_rows<A>(grads[0], grads.stride, p.Tq, values[first], values.stride, keys, p.Dv, out, p.Tk);
  }
  for (int64_t i = 0; i < p.Tq; ++i) {
    A* row = out + i * p.Tk;
    if (g.grad_context.data == nullptr)
      for (int64_t j = 0; j < keys; ++j) row[j] = A(0);
    else if (p.dropout)
      drop_weights<A>(p.seed, p.dropout_p, b * p.Tq + i, first, first + keys, row);
    if (g.grad_weights.data != nullptr) {
      const auto* extra = Rows<typename WeightOf<T>::type, A>(g.grad_weights, b)[i] + first;
      for (int64_t j = 0; j < keys; ++j) row[j] += A(widen(extra[j]));
    }
  }
}

// grad_value of a few keys, some columns at a time. Summed in place if storage and sum type agree.
template <class T, class A>
void grad_values_tile(const Problem& p, const Backward& g, int64_t b, int64_t first, int64_t keys) {
  constexpr bool in_place = std::is_same<T, A>::value;
  constexpr int64_t columns = 1024;
  A buffer[in_place ? 1 : kTile * columns], weights[kTile * kTile];
  T* out = static_cast<T*>(g.grad_values) + (b * p.Tk + first) * p.Dv;
  const Rows<T, A> grads(g.grad_context, b);
  const int64_t queries = g.grad_context.data != nullptr ? p.Tq : 0;
  for (int64_t c = 0; c < p.Dv; c += columns) {
    const int64_t width = c + columns <= p.Dv ? columns : p.Dv - c;
    A* sums = buffer;
    int64_t stride = columns;
    if constexpr (in_place) {
      sums = out + c;
      stride = p.Dv;
    }
    for (int64_t i = 0; i < queries; i += kTile) {
      const int64_t block = i + kTile <= queries ? kTile : queries - i;
      for (int64_t k = 0; k < block; ++k)
        load_weights<T, A>(p, g, b * p.Tq + i + k, first, first + keys, weights + k * kTile);
      weighted_sums<A>(weights, 1, kTile, grads[i] + c, grads.stride, block, width, i > 0, sums,
                       stride, keys);
    }
    for (int64_t j = 0; j < keys; ++j) {
      if (queries == 0)
        for (int64_t k = 0; k < width; ++k) sums[j * stride + k] = A(0);
      if constexpr (!in_place) store_row(sums + j * stride, width, out + j * p.Dv + c);
    }
  }
}

// scores: (Tq,Tk) of this batch row; columns [j0, j1) become grad_weight.
template <class T, class A>
void grad_scores(const Problem& p, const Backward& g, int64_t b, int64_t j0, int64_t j1,
                 void* scores_out) {
  A* scores = static_cast<A*>(scores_out);
  const auto* given = static_cast<const typename WeightOf<T>::type*>(g.grad_scores_in);
  for (int64_t first = j0; first < j1; first += kTile) {
    const int64_t keys = first + kTile <= j1 ? kTile : j1 - first;
    if (g.grad_scores_in == nullptr)
      grad_weights_tile<T>(p, g, b, first, keys, scores + first);
    else
      for (int64_t i = 0; i < p.Tq; ++i)
        for (int64_t j = first; j < first + keys; ++j)
          scores[i * p.Tk + j] = A(widen(given[(b * p.Tq + i) * p.Tk + j]));
    if (g.grad_values != nullptr) grad_values_tile<T, A>(p, g, b, first, keys);
  }
}

// Stores a row of grad_score and, if wanted, of dropped-out weights, for a later call.
template <class T, class A>
void store_scores(const Problem& p, const Backward& g, int64_t row, const A* scores) {
  using W = typename WeightOf<T>::type;
  store_row(scores, p.Tk, static_cast<W*>(g.grad_scores_out) + row * p.Tk);
  if (g.dropped_weights == nullptr) return;
  constexpr int64_t columns = 64;
  A weights[columns];
  for (int64_t j = 0; j < p.Tk; j += columns) {
    const int64_t end = j + columns < p.Tk ? j + columns : p.Tk;
    load_weights<T, A>(p, g, row, j, end, weights);
    store_row(weights, end - j, static_cast<W*>(g.dropped_weights) + row * p.Tk + j);
  }
}

// The saved weights are rounded. Dividing them by their sum makes them add up to one again, and a
// row of score gradients to zero, which grad_query and grad_w rely on.
template <class T, class A>
void grad_softmax(const Problem& p, const Backward& g, int64_t b, void* scores_inout) {
  if (g.grad_scores_in != nullptr) return;
  for (int64_t i = 0; i < p.Tq; ++i) {
    const int64_t row = b * p.Tq + i, keys = p.key_counts[row];
    A* scores = static_cast<A*>(scores_inout) + i * p.Tk;
    const auto* weights = weights_row<T>(g, row * p.Tk);
    double total = 0, dot = 0;
    for (int64_t block = 0; block < keys; block += 64) {  // two levels: fewer roundings
      double block_total = 0, block_dot = 0;
      for (int64_t j = block; j < keys && j < block + 64; ++j) {
        block_total += double(widen(weights[j]));
        block_dot += double(widen(weights[j])) * double(scores[j]);
      }
      total += block_total;
      dot += block_dot;
    }
    const double mean = dot / total;
    if (p.halved) total *= 2;
    for (int64_t j = 0; j < keys; ++j)
      scores[j] = A(double(widen(weights[j])) / total * (double(scores[j]) - mean));
    for (int64_t j = keys; j < p.Tk; ++j) scores[j] = A(0);
    if (g.grad_scores_out != nullptr) store_scores<T>(p, g, row, scores);
  }
}

}  // namespace
}  // namespace bahdanau_fast

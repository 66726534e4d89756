// Scores with features or another activation inside:
//
//   score[i,j] = w . act(a[i] + c[j] + W_f f[j])
//
//   a    (Tq,H)      projected queries
//   c    (Tk,H)      projected keys
//   f    (Tk,C)      features, in the sum type, any strides
//   W_f  (C,width)   transposed, in the sum type, zero past H
//
// Keys are taken a few at a time: their rows c + W_f f are made in the first-level cache, where all
// queries of the task use them. Nothing of size Tk x H is written. Each key reads H numbers and C
// features; per (query, key, hidden) element tanh takes some twenty instructions of a vector.
#pragma once

#include "activation.h"
#include "cpu/kernels/linear.h"

namespace bahdanau_fast {
namespace {

constexpr int64_t kInnerRows = 8;  // keys at a time

// Rows of c + W_f f, hidden units [h0, h0 + columns) of them; `valid` of these are below H.
template <class T, class A>
void make_inner_rows(const Problem& p, int64_t b, const T* keys, int64_t key_stride, int64_t j,
                     int64_t count, int64_t h0, int64_t columns, A* out) {
  const int64_t valid = h0 + columns < p.H ? columns : p.H - h0;
  for (int64_t k = 0; k < count; ++k) {
    const T* key = keys + (j + k) * key_stride + h0;
    __builtin_prefetch(key + kInnerRows * key_stride);
    for (int64_t h = 0; h < columns; h += kLanes<A>)
      store(out + k * columns + h, load_row<A>(key, h, valid));
  }
  const General& g = p.general;
  if (g.C == 0) return;
  const A* features = static_cast<const A*>(g.features.data) + b * g.features.batch_stride;
  weighted_sums<A>(features + j * g.features.row_stride, g.features.row_stride, g.feature_step,
                   static_cast<const A*>(g.w_f) + h0, p.width, g.C, columns, true, out, columns,
                   count);
}

// w act(x) of `count` vectors, a multiple of four, added up; four share a division.
template <class A, Activation act, int count>
BF_INLINE Vec<A> weighted(const Vec<A>* x, const A* w, A negative) {
  Vec<A> total{};
  if constexpr (act == Activation::tanh) {
    Fraction<A> f[count];
    tanh_fractions<A, count>(x, f);
    for (int v = 0; v < count; ++v) f[v].n *= load(w + v * kLanes<A>);
    for (int v = 0; v < count; v += 4) {
      const Fraction<A> all = add(add(f[v], f[v + 1]), add(f[v + 2], f[v + 3]));
      total += quotient<A>(all.n, all.d);
    }
  } else {
    Vec<A> y[count];
    activated<A, act, count>(x, negative, y);
    for (int v = 0; v < count; ++v) total += load(w + v * kLanes<A>) * y[v];
  }
  return total;
}

// sum_h w act(a + c) over rows of `H` numbers; w has whole vectors, zero past H.
template <class A, Activation act>
BF_INLINE A inner_score(const A* query, const A* key, const A* w, int64_t H, A negative) {
  constexpr int L = kLanes<A>;
  Vec<A> total{}, x[kTogether];
  int64_t h = 0;
  for (; h + kTogether * L <= H; h += kTogether * L) {
    __builtin_prefetch(key + h + kAhead<A>);
    for (int v = 0; v < kTogether; ++v) x[v] = load(query + h + v * L) + load(key + h + v * L);
    total += weighted<A, act, kTogether>(x, w + h, negative);
  }
  for (; h < H; h += 4 * L) {
    A of_w[4 * L] = {};
    for (int v = 0; v < 4; ++v) {
      const int64_t at = h + v * L;
      x[v] = load_row<A>(query, at, H) + load_row<A>(key, at, H);
      if (at < H) store(of_w + v * L, load(w + at));
    }
    total += weighted<A, act, 4>(x, of_w, negative);
  }
  return sum<A>(total);
}

}  // namespace
}  // namespace bahdanau_fast

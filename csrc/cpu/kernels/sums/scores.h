// Scores with features or another activation inside, and those of a single query without a table;
// sigmoid of several queries is half a tanh (Inputs::halve):
//
//   score[i,j] = w . act(a[i] + c[j] + W_f f[j])
//
//   a    (Tq,H)      projected queries
//   c    (Tk,H)      projected keys
//   f    (Tk,C)      features, in the sum type, any strides
//   W_f  (C,width)   transposed, in the sum type, zero past H
//
// Keys are taken a few at a time. c + W_f f stays in registers for a single query; for several of
// them its rows are made in the first-level cache. Nothing of size Tk x H is written. Each key
// reads H numbers and C features; per (query, key, hidden) element tanh takes some twenty
// instructions of a vector.
#pragma once

#include "activation.h"
#include "cpu/kernels/linear.h"

namespace bahdanau_fast {
namespace {

constexpr int64_t kInnerRows = 8;  // keys at a time

// Rows of c + W_f f, hidden units [h0, h0 + columns) of them; `valid` of these are below H. w_f are
// those units of W_f, in rows `w_stride` apart.
template <class T, class A>
void make_inner_rows(const Problem& p, int64_t b, const T* keys, int64_t key_stride, int64_t j,
                     int64_t count, int64_t h0, int64_t columns, const A* w_f, int64_t w_stride,
                     A* out) {
  const int64_t valid = h0 + columns < p.H ? columns : p.H - h0;
  for (int64_t k = 0; k < count; ++k) {
    const T* key = keys + (j + k) * key_stride + h0;
    __builtin_prefetch(key + kInnerRows * key_stride);
    A* const row = out + k * columns;
    int64_t h = 0;
    for (; h + kLanes<A> <= valid; h += kLanes<A>) store(row + h, load_as<A>(key + h));
    for (; h < columns; h += kLanes<A>) store(row + h, load_row<A>(key, h, valid));
  }
  const Inside& g = p.inside;
  if (g.C == 0) return;
  const A* features = static_cast<const A*>(g.features.data) + b * g.features.batch_stride;
  weighted_sums<A>(features + j * g.features.row_stride, g.features.row_stride, g.feature_step, w_f,
                   w_stride, g.C, columns, true, out, columns, count);
}

// Vectors of a key that share a division, and keys that are taken together: eight chains of
// operations, also where 16 registers do not hold them. Waiting for fewer takes longer.
constexpr int kScoreVectors = 4, kScoreKeys = 2;

// total[k] += w act(x) of the vectors of key k, added up.
template <class A, Activation act>
BF_INLINE void add_weighted(const Vec<A>* x, const Vec<A>* w, A negative, Vec<A>* total) {
  constexpr int K = kScoreKeys, V = kScoreVectors;
  if constexpr (act == Activation::tanh || act == Activation::sigmoid) {
    Fraction<A> f[K * V];
    fractions<A, act, K * V>(x, f);
    for (int i = 0; i < K * V; ++i) f[i].n *= w[i % V];
    for (int k = 0; k < K; ++k) {
      const Fraction<A>* of = f + k * V;
      const Fraction<A> all = add(add(of[0], of[1]), add(of[2], of[3]));
      total[k] += quotient<A>(all.n, all.d);
    }
  } else {
    Vec<A> y[K * V];
    activated<A, act, K * V>(x, negative, y);
    for (int k = 0; k < K; ++k) {
      const Vec<A>* of = y + k * V;
      total[k] += (w[0] * of[0] + w[1] * of[1]) + (w[2] * of[2] + w[3] * of[3]);
    }
  }
}

// Features of keys: those of key k from f + k * key_step on, C of them `step` apart. W_f has C rows
// of `width`.
template <class A>
struct Features {
  const A *f = nullptr, *w_f = nullptr;
  int64_t key_step = 0, step = 0, width = 0, C = 0;
};

// out[k] = sum_h w act(a + c + W_f f) of `count` keys, rows of H numbers. The vectors of w are
// whole, and zero past H.
template <class A, Activation act, class T>
void inner_scores(const A* query, const T* keys, int64_t stride, const Features<A>& features,
                  const A* w, int64_t H, A negative, int64_t count, A* out) {
  constexpr int L = kLanes<A>, K = kScoreKeys, V = kScoreVectors;
  for (int64_t first = 0; first < count; first += K) {
    const T* key[K];
    const A* f[K];
    Vec<A> total[K] = {};
    for (int k = 0; k < K; ++k) {  // past the last one, that one again
      const int64_t j = first + k < count ? first + k : count - 1;
      key[k] = keys + j * stride;
      f[k] = features.f + j * features.key_step;
    }
    const auto add = [&](int64_t h, auto whole) BF_INLINED {
      Vec<A> x[K * V], of_w[V];
      const auto is_there = [&](int v) { return decltype(whole)::value || h + v * L < H; };
      for (int v = 0; v < V; ++v) {
        const int64_t at = h + v * L;
        of_w[v] = is_there(v) ? load(w + at) : Vec<A>{};
        const Vec<A> a = is_there(v) ? load(query + at) : Vec<A>{};
        for (int k = 0; k < K; ++k)
          x[k * V + v] =
              a + (decltype(whole)::value ? load_as<A>(key[k] + at) : load_row<A>(key[k], at, H));
      }
      for (int64_t c = 0; c < features.C; ++c) {
        const A* row = features.w_f + c * features.width + h;
        Vec<A> by[K];
        for (int k = 0; k < K; ++k) by[k] = splat<A>(f[k][c * features.step]);
        for (int v = 0; v < V; ++v) {
          if (!is_there(v)) continue;
          const Vec<A> of_f = load_once(row + v * L);
          for (int k = 0; k < K; ++k) x[k * V + v] += by[k] * of_f;
        }
      }
      add_weighted<A, act>(x, of_w, negative, total);
    };
    int64_t h = 0;
    for (; h + V * L <= H; h += V * L) add(h, std::true_type{});
    if (h < H) add(h, std::false_type{});
    for (int k = 0; k < K && first + k < count; ++k) out[first + k] = sum<A>(total[k]);
  }
}

}  // namespace
}  // namespace bahdanau_fast

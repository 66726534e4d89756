// Scores of queries against a table of keys, without a transcendental in the inner loop.
//
//   tanh(a + c) = (E - 1) / (E + 1),  E = exp(2a) exp(2c)
//
// With the table entry m = exp(2c) - s, where s is 0, or 1 in rows whose every |c| is small, both
// parts are one fma of per-query constants:
//
//   w (E - 1) = weighted * m + weighted_offset       weighted = w exp(2a)
//       E + 1 =   factor * m + factor_offset           factor = exp(2a)
//
//   s = 0: weighted_offset = -w,               factor_offset = 1
//   s = 1: weighted_offset = w expm1(2a),      factor_offset = 1 + exp(2a)
//
// s = 1 keeps the relative precision of small arguments, which 1 + tiny would lose. Four fractions
// share one division: n0/d0 + n1/d1 = (n0 d1 + n1 d0) / (d0 d1), twice.
#pragma once

#include "elementary.h"

namespace bahdanau_fast {
namespace {

// How one query meets the keys of one batch row.
//   shared   every product of four denominators fits: the fast path
//   clamped  E is cut off where tanh is 1 anyway
//   direct   exp(2a) or exp(2c) would not fit, or something is not finite: tanh of the sum
enum class Path { shared, clamped, direct };

template <class A>
BF_INLINE Path choose_path(A query_max, A keys_max) {
  if (query_max + keys_max <= Range<A>::shared) return Path::shared;
  if (query_max <= Range<A>::exponent && keys_max <= Range<A>::exponent) return Path::clamped;
  return Path::direct;
}

template <class A>
BF_INLINE A table_shift(A keys_max) {
  return keys_max <= A(kShiftLimit) ? A(1) : A(0);
}

// max |x| over a row; NaN when any element is.
template <class A, class T>
inline A max_abs(const T* row, int64_t n) {
  Vec<A> best{}, poison{};
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) {
    const Vec<A> x = load_as<A>(row + i);
    best = max<A>(abs<A>(x), best);
    poison += x * A(0);  // max() loses a NaN, this keeps it
  }
  if (i < n) {
    const Vec<A> x = load_as<A>(row + i, n - i);
    best = max<A>(abs<A>(x), best);
    poison += x * A(0);
  }
  return largest<A>(best) + sum<A>(poison);
}

template <class T, class A>
void fill_table(const T* row, int64_t H, int64_t width, A shift, A* out) {
  int64_t h = 0;
  const auto entry = [shift](Vec<A> c) {
    return shift == A(1) ? expm1_near_zero<A>(2 * c) : exp<A>(2 * c);
  };
  for (; h + kLanes<A> <= H; h += kLanes<A>) store(out + h, entry(load_as<A>(row + h)));
  for (; h < width; h += kLanes<A>) {
    const Vec<A> m = h < H ? entry(load_as<A>(row + h, H - h)) : Vec<A>{};
    for (int64_t i = 0; i < kLanes<A>; ++i) out[h + i] = h + i < H ? m[i] : A(0);
  }
}

// The constants of one query; four rows of `width`. Past H they make n = 0 and d = 1.
template <class A>
struct Query {
  A *weighted, *weighted_offset, *factor, *factor_offset;

  Query(A* work, int64_t width)
      : weighted(work),
        weighted_offset(work + width),
        factor(work + 2 * width),
        factor_offset(work + 3 * width) {}
  static constexpr int64_t size(int64_t width) { return 4 * width; }

  template <class T>
  void prepare(const T* row, const A* w, int64_t H, int64_t width, A shift) {
    for (int64_t h = 0; h < width; h += kLanes<A>) {
      const bool whole = h + kLanes<A> <= H;
      const Vec<A> a2 = 2 * (whole   ? load_as<A>(row + h)
                             : h < H ? load_as<A>(row + h, H - h)
                                     : Vec<A>{});
      const Vec<A> e = exp<A>(a2), wh = load(w + h);
      store(weighted + h, wh * e);
      store(factor + h, e);
      store(weighted_offset + h, shift == A(1) ? wh * expm1<A>(a2) : -wh);
      store(factor_offset + h, shift == A(1) ? 1 + e : splat<A>(A(1)));
    }
    for (int64_t h = H; h < width; ++h) factor[h] = A(0), factor_offset[h] = A(1);
  }
};

// One vector of E for the clamped path, from the table entry.
template <class A>
BF_INLINE Vec<A> clamped_product(Vec<A> factor, Vec<A> m, A shift, A limit) {
  return min<A>(factor * (m + shift), splat<A>(limit));
}

template <class A>
struct Fraction {
  Vec<A> n, d;
};

template <class A>
BF_INLINE Fraction<A> add(const Fraction<A>& x, const Fraction<A>& y) {
  return {x.n * y.d + y.n * x.d, x.d * y.d};
}

// w tanh(a + c) of one vector of hidden units, as a fraction, for `keys` neighbouring table rows.
template <class A, int keys, bool clamped>
BF_INLINE void fractions(const Query<A>& q, const A* w, const A* table, int64_t width, A shift,
                         int64_t h, Fraction<A>* out) {
  const Vec<A> factor = load(q.factor + h);
  if constexpr (clamped) {
    const Vec<A> wh = load(w + h);
    for (int k = 0; k < keys; ++k) {
      const Vec<A> m = load(table + k * width + h);
      const Vec<A> e = clamped_product<A>(factor, m, shift, Range<A>::clamp);
      out[k] = {wh * (e - 1), e + 1};
    }
  } else {
    const Vec<A> weighted = load(q.weighted + h), weighted_offset = load(q.weighted_offset + h);
    const Vec<A> factor_offset = load(q.factor_offset + h);
    for (int k = 0; k < keys; ++k) {
      const Vec<A> m = load(table + k * width + h);
      out[k] = {weighted * m + weighted_offset, factor * m + factor_offset};
    }
  }
}

// sum_h w tanh(a + c) for `keys` neighbouring table rows, not yet times w_scale. The constants of
// the query are loaded once for all of them.
template <class A, int keys, bool clamped>
BF_INLINE void score_rows(const Query<A>& q, const A* w, const A* table, int64_t width, A shift,
                          A* out) {
  constexpr int L = kLanes<A>;
  Vec<A> total[keys] = {};
  const auto at = [&](int64_t h, Fraction<A>* to) __attribute__((always_inline)) {
    fractions<A, keys, clamped>(q, w, table, width, shift, h, to);
  };
  int64_t h = 0;
  for (; h + 4 * L <= width; h += 4 * L) {
    Fraction<A> first[keys], second[keys], next[keys];
    at(h, first);
    at(h + L, next);
    for (int k = 0; k < keys; ++k) first[k] = add(first[k], next[k]);
    at(h + 2 * L, second);
    at(h + 3 * L, next);
    for (int k = 0; k < keys; ++k) {
      const Fraction<A> all = add(first[k], add(second[k], next[k]));
      total[k] += quotient<A>(all.n, all.d);
    }
  }
  for (; h < width; h += L) {
    Fraction<A> one[keys];
    at(h, one);
    for (int k = 0; k < keys; ++k) total[k] += quotient<A>(one[k].n, one[k].d);
  }
  for (int k = 0; k < keys; ++k) out[k] = sum<A>(total[k]);
}

template <class A, bool clamped>
void score_table(const Query<A>& q, const A* w, const A* table, int64_t width, int64_t keys,
                 A shift, A* out) {
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2)
    score_rows<A, 2, clamped>(q, w, table + j * width, width, shift, out + j);
  if (j < keys) score_rows<A, 1, clamped>(q, w, table + j * width, width, shift, out + j);
}

// The same from the projections themselves, for arguments the factored form has no room for.
template <class A, class T>
void score_direct(const T* query, const T* keys, int64_t key_stride, const A* w, int64_t H,
                  int64_t count, A* out) {
  for (int64_t j = 0; j < count; ++j) {
    const T* key = keys + j * key_stride;
    Vec<A> total{};
    int64_t h = 0;
    for (; h + kLanes<A> <= H; h += kLanes<A>)
      total += load(w + h) * tanh_and_slope<A>(load_as<A>(query + h) + load_as<A>(key + h)).tanh;
    if (h < H) {  // w is zero past H
      const Vec<A> x = load_as<A>(query + h, H - h) + load_as<A>(key + h, H - h);
      total += load(w + h) * tanh_and_slope<A>(x).tanh;
    }
    out[j] = sum<A>(total);
  }
}

}  // namespace
}  // namespace bahdanau_fast

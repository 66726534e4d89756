// Scores of queries against a table of keys, without exp or tanh in the inner loop. The forms are
// those of common/problem.h.
//
//   tanh(a + c) = (E - 1) / (E + 1),  E = exp(2a) exp(2c)
//
// Both parts are divided by exp(2a) where a is positive: with alpha = min(1, exp(2a)) and
// beta = min(1, exp(-2a)) they are alpha exp(2c) -+ beta, which no query can make overflow. With
// the table entry m = exp(2c) - s, where s is 0, or 1 in rows whose every |c| is small, each is one
// fma of constants of the query:
//
//   numerator   n = rise m + offset          s = 0: rise = alpha, offset = -beta
//                                            s = 1: rise = alpha, offset = alpha - beta
//   denominator d = alpha m + base           base = beta + s alpha
//   tanh(a + c) = n / d + sign               sign = 0
//
// s = 1 keeps the relative precision of small arguments, which 1 + m would lose. Where |a| is so
// large that tanh is near +-1 for every key (saturated), the difference to +-1 is computed instead,
// which is exact: sign = 1, n = -2 beta, or sign = -1, n = 2 alpha exp(2c).
//
// That is Form::scaled. Where neither a nor c is large, and c is not all small, both parts can be
// divided by exp(2a) itself, which turns the multiply-adds into additions, and many processors have
// separate units for those (Form::factored):
//
//   tanh(a + c) = (m - b) / (m + b),  b = exp(-2a), m = exp(2c)
//
// Four fractions share one division: n0/d0 + n1/d1 = (n0 d1 + n1 d0) / (d0 d1), twice.
#pragma once

#include "elementary.h"

namespace bahdanau_fast {
namespace {

// The form for the keys of one batch row, before the queries are known. A NaN makes it direct.
template <class A>
BF_INLINE Form choose_form(A keys_max) {
  if (keys_max <= Range<A>::shared) return Form::scaled;
  return keys_max <= Range<A>::exponent ? Form::scaled_each : Form::direct;
}

// A unit is saturated for every key if |a| exceeds the largest |c| by more than this.
constexpr double kSaturated = 1.5;

template <class A>
BF_INLINE A table_shift(A keys_max) {
  return keys_max <= A(kShiftLimit) ? A(1) : A(0);
}

// True if `factored` can take the place of `scaled` for queries with this max |a|: every product of
// four m + b is in range, and no unit is saturated. Not in fp64, where it would cost accuracy.
template <class A>
BF_INLINE bool is_factored(A queries_max, A keys_max) {
  return sizeof(A) == 4 && keys_max <= Range<A>::shared && table_shift(keys_max) == A(0) &&
         queries_max <= Range<A>::shared && queries_max <= keys_max + A(kSaturated);
}

// max |x| over rows of n numbers; NaN when any of them is: its bits are, as an integer, above those
// of every number. Four maxima are taken side by side, as each waits for the one before.
template <class A, class T>
inline A max_abs(const T* from, int64_t stride, int64_t rows, int64_t n) {
  constexpr int L = kLanes<A>, side = 4;
  const auto larger = [](Vec<A> x, Vec<A> y) {
    return bitcast<IntVec<A>>(x) > bitcast<IntVec<A>>(y) ? x : y;
  };
  Vec<A> best[side] = {};
  for (int64_t r = 0; r < rows; ++r, from += stride) {
    int64_t h = 0;
    for (; h + side * L <= n; h += side * L)
      each<side>([&](int k) { best[k] = larger(abs<A>(load_as<A>(from + h + k * L)), best[k]); });
    for (; h < n; h += L) best[0] = larger(abs<A>(load_as<A>(from + h, n - h)), best[0]);
  }
  return reduce<A>(larger(larger(best[0], best[1]), larger(best[2], best[3])), larger);
}

template <class A, class T>
BF_INLINE Vec<A> load_row(const T* row, int64_t h, int64_t H) {
  return h < H ? load_as<A>(row + h, H - h) : Vec<A>{};
}

// `count` vectors of a row from h on.
template <class A, int count, class T>
BF_INLINE void load_row(const T* row, int64_t h, int64_t H, Vec<A>* out) {
  if (h + count * kLanes<A> <= H)
    each<count>([&](int k) { out[k] = load_as<A>(row + h + k * kLanes<A>); });
  else
    each<count>([&](int k) { out[k] = load_row<A>(row, h + k * kLanes<A>, H); });
}

// The table of one key: exp(2c), a normal number unless the form is direct, which reads no table.
template <class T, class A>
void fill_table(const T* row, int64_t H, int64_t width, A shift, A* out) {
  together<A>(width, [&](int64_t h, auto count) BF_INLINED {
    Vec<A> m[count];
    load_row<A, count>(row, h, H, m);
    each<count>([&](int k) { m[k] += m[k]; });
    shift == A(1) ? expm1_near_zero<A, count>(m) : exp<A, count, true>(m);
    each<count>([&](int k) { store(out + h + k * kLanes<A>, m[k]); });
  });
}

// The constants of one vector of hidden units of a query.
template <class A>
struct Units {
  Vec<A> rise{}, offset{}, alpha{}, base, sign{};

  explicit Units(Vec<A> b) : base(b) {}

  // e is exp(-2 |a|); near_zero is expm1(-2 |a|) where that is at least -1, if there is a shift.
  Units(Vec<A> a, Vec<A> e, Vec<A> near_zero, A keys_max, A shift) {
    const Vec<A> one = splat<A>(A(1));
    const auto up = a > 0;
    alpha = up ? one : e;
    const Vec<A> beta = up ? e : one;
    base = beta + shift * alpha;
    rise = alpha;
    offset = -beta;
    if (shift == A(1)) {
      const Vec<A> part = 2 * abs<A>(a) <= A(1) ? near_zero : e - 1;
      offset = up ? -part : part;
    }
    const auto saturated = abs<A>(a) > keys_max + A(kSaturated);
    rise = saturated ? (up ? Vec<A>{} : 2 * alpha) : rise;
    offset = saturated ? (up ? -2 * beta : 2 * shift * alpha) : offset;
    sign = saturated ? (up ? one : -one) : Vec<A>{};
    base += a == a ? Vec<A>{} : a;  // a NaN fails every comparison above, and must reach the result
  }
};

// f(h, a, units) for the vectors a of hidden units of a query from h on; factored, only
// units.base, exp(-2a), is set.
template <class A, class T, class F>
BF_INLINE void each_units(const T* row, int64_t H, int64_t width, A keys_max, bool factored,
                          const F& f) {
  const A shift = table_shift(keys_max);
  together<A>(width, [&](int64_t h, auto count) BF_INLINED {
    Vec<A> a[count], e[count], near_zero[count];
    load_row<A, count>(row, h, H, a);
    if (factored) {
      each<count>([&](int k) { e[k] = -2 * a[k]; });
      exp<A, count, true>(e);
      return each<count>([&](int k) { f(h + k * kLanes<A>, a[k], Units<A>(e[k])); });
    }
    each<count>([&](int k) { e[k] = near_zero[k] = -2 * abs<A>(a[k]); });
    exp<A, count>(e);
    if (shift == A(1)) expm1_near_zero<A, count>(near_zero);
    each<count>([&](int k) {
      f(h + k * kLanes<A>, a[k], Units<A>(a[k], e[k], near_zero[k], keys_max, shift));
    });
  });
}

// The constants of one query, those of n already multiplied by w: four rows of `width`. Factored,
// rise is w, base is b, and alpha is not used.
template <class A>
struct Query {
  A *rise, *offset, *alpha, *base;

  Query(A* work, int64_t width)
      : rise(work), offset(work + width), alpha(work + 2 * width), base(work + 3 * width) {}
  static constexpr int64_t size(int64_t width) { return 4 * width; }

  // Returns the part of the score that is the same for all keys, sum_h w sign. Past H, w and n are
  // zero and d is not.
  template <class T>
  A prepare(const T* row, const A* w, int64_t H, int64_t width, A keys_max, bool factored) {
    Vec<A> constant{};
    each_units(row, H, width, keys_max, factored, [&](int64_t h, Vec<A>, const Units<A>& units) {
      const Vec<A> wh = load(w + h);
      store(rise + h, Vec<A>(factored ? wh : wh * units.rise));
      store(offset + h, Vec<A>(wh * (factored ? -units.base : units.offset)));
      store(alpha + h, units.alpha);
      store(base + h, units.base);
      constant += wh * units.sign;
    });
    return sum<A>(constant);
  }
};

template <class A>
struct Fraction {
  Vec<A> n, d;
};

template <class A>
BF_INLINE Fraction<A> add(const Fraction<A>& x, const Fraction<A>& y) {
  return {x.n * y.d + y.n * x.d, x.d * y.d};
}

// How many elements past the next rows to prefetch: with it, one core reads a table from memory 1.4
// times as fast, and a table in the caches no slower.
template <class A>
constexpr int64_t kAhead = 2048 / sizeof(A);

// w (tanh(a + c) - sign) of one vector of hidden units, for `keys` neighbouring table rows.
template <class A, int keys, Form form>
BF_INLINE void fractions(const Query<A>& q, const A* table, int64_t width, int64_t h,
                         Fraction<A>* out) {
  const Vec<A> rise = load_once(q.rise + h), offset = load_once(q.offset + h);
  const Vec<A> base = load_once(q.base + h);
  Vec<A> alpha{};
  if constexpr (form != Form::factored) alpha = load_once(q.alpha + h);
  for (int k = 0; k < keys; ++k) {
    const A* entries = table + k * width + h;
    __builtin_prefetch(entries + keys * width + kAhead<A>);
    const Vec<A> m = load_once(entries);
    out[k] = {rise * m + offset, form == Form::factored ? m + base : alpha * m + base};
  }
}

// The sum of fractions() over all hidden units, before w_scale. The constants of the query are
// loaded once for all rows.
template <class A, int keys, Form form>
BF_INLINE void score_rows(const Query<A>& q, const A* table, int64_t width, A* out) {
  constexpr int L = kLanes<A>;
  Vec<A> total[keys] = {};
  int64_t h = 0;
  for (; form != Form::scaled_each && h + 4 * L <= width; h += 4 * L) {
    Fraction<A> first[keys], second[keys], next[keys];
    fractions<A, keys, form>(q, table, width, h, first);
    fractions<A, keys, form>(q, table, width, h + L, next);
    for (int k = 0; k < keys; ++k) first[k] = add(first[k], next[k]);
    fractions<A, keys, form>(q, table, width, h + 2 * L, second);
    fractions<A, keys, form>(q, table, width, h + 3 * L, next);
    for (int k = 0; k < keys; ++k) {
      const Fraction<A> all = add(first[k], add(second[k], next[k]));
      total[k] += quotient<A>(all.n, all.d);
    }
  }
  for (; h < width; h += L) {
    Fraction<A> one[keys];
    fractions<A, keys, form>(q, table, width, h, one);
    for (int k = 0; k < keys; ++k) total[k] += quotient<A>(one[k].n, one[k].d);
  }
  for (int k = 0; k < keys; ++k) out[k] = sum<A>(total[k]);
}

template <class A, Form form>
void score_table(const Query<A>& q, A constant, const A* table, int64_t width, int64_t keys,
                 A* out) {
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) score_rows<A, 2, form>(q, table + j * width, width, out + j);
  if (j < keys) score_rows<A, 1, form>(q, table + j * width, width, out + j);
  for (j = 0; j < keys; ++j) out[j] += constant;
}

// Form::direct: scores from the projections themselves.
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

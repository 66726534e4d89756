// exp, expm1 and tanh on vectors. Taylor series with the coefficients 1/n!.
//
//   function  range                 maximum error (tests/cpu/test_accuracy.py)
//   exp       down to 0, up to e^88   1.5 ulp; stays there above (fp64: e^709)
//   expm1     |x| <= 1               2 ulp
//   tanh      any                    4 ulp
#pragma once

#include "simd.h"

namespace bahdanau_fast {
namespace {

template <class A>
struct Exp;
template <>
struct Exp<float> {
  static constexpr float log2e = 1.44269504088896341f;
  static constexpr float ln2_high = 0.693145751953125f;  // 15 bits: its multiples are exact
  static constexpr float ln2_low = 1.42860682030941723e-6f;
  static constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float lowest = -103.9f, highest = 88.0f;
  static constexpr int bias = 127, mantissa = 23;
  static constexpr int exp_terms = 7, expm1_terms = 11;
};
template <>
struct Exp<double> {
  static constexpr double log2e = 1.44269504088896340736;
  static constexpr double ln2_high = 0.693147180369123816490;
  static constexpr double ln2_low = 1.90821492927058770002e-10;
  static constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double lowest = -745.0, highest = 709.0;
  static constexpr int bias = 1023, mantissa = 52;
  static constexpr int exp_terms = 13, expm1_terms = 19;
};

constexpr double factorial(int n) { return n < 2 ? 1.0 : n * factorial(n - 1); }

// So many vectors are taken step by step together: their chains of operations overlap, where a
// processor that had to find them one behind the other would not look far enough.
constexpr int kTogether = kVectorBytes == 64 ? 8 : 4;

// f(0), f(1), ..., f(count - 1).
template <int count, class F>
BF_INLINE void each(const F& f) {
  for (int k = 0; k < count; ++k) f(k);
}

// f(h, count) for the `count` vectors from h on, and so on up to `end`, a multiple of a vector;
// count is a constant.
template <class A, class F>
BF_INLINE void together(int64_t end, const F& f) {
  constexpr int64_t some = kTogether * kLanes<A>;
  int64_t h = 0;
  for (; h + some <= end; h += some) f(h, std::integral_constant<int, kTogether>{});
  for (; h < end; h += kLanes<A>) f(h, std::integral_constant<int, 1>{});
}

// f of the constants n, n - 1, ..., 1.
template <int n, class F>
BF_INLINE void terms(const F& f) {
  f(std::integral_constant<int, n>{});
  if constexpr (n > 1) terms<n - 1>(f);
}

// (exp(x) - 1) / x: the sum of x^(n-1)/n! for n from 1 to `most`.
template <class A, int count, int most>
BF_INLINE void expm1_over_x(const Vec<A>* x, Vec<A>* out) {
  each<count>([&](int k) { out[k] = splat<A>(A(1.0 / factorial(most))); });
  terms<most - 1>([&](auto n) {
    constexpr A coefficient = A(1.0 / factorial(decltype(n)::value));
    each<count>([&](int k) { out[k] = out[k] * x[k] + coefficient; });
  });
}

// exp of `count` vectors, in place. `normal`: where every result is a normal number, which takes
// fewer operations to the same bits.
template <class A, int count, bool normal = false>
BF_INLINE void exp(Vec<A>* x) {
  using E = Exp<A>;
  // Adding it rounds to an integer, and leaves that plus the bias of exponents in the lowest bits.
  constexpr A round = E::round + A(E::bias);
  IntVec<A> below[count];
  Vec<A> shifted[count], n[count], series[count];
  if constexpr (!normal)
    each<count>([&](int k) {
      below[k] = x[k] < E::lowest;
      x[k] = below[k] ? splat<A>(E::lowest) : x[k];
      x[k] = x[k] > E::highest ? splat<A>(E::highest) : x[k];
    });
  each<count>([&](int k) { shifted[k] = x[k] * E::log2e + round; });
  each<count>([&](int k) { n[k] = shifted[k] - round; });
  each<count>([&](int k) { x[k] = x[k] - n[k] * E::ln2_high; });
  each<count>([&](int k) { x[k] = x[k] - n[k] * E::ln2_low; });
  expm1_over_x<A, count, E::exp_terms>(x, series);
  each<count>([&](int k) { series[k] = 1 + x[k] * series[k]; });
  const auto bits = [](Vec<A> number) { return bitcast<IntVec<A>>(number); };
  const auto two_to = [](IntVec<A> biased) { return bitcast<Vec<A>>(biased << E::mantissa); };
  each<count>([&](int k) {
    if constexpr (normal) {
      x[k] = series[k] * two_to(bits(shifted[k]));
    } else {  // 2^n in two halves: n reaches below the smallest normal number
      using Int = typename VecOf<A>::Int;
      const IntVec<A> power = bits(shifted[k]) - bitcast<Int>(round), half = power >> 1;
      const Vec<A> e = series[k] * two_to(half + E::bias) * two_to(power - half + E::bias);
      x[k] = below[k] ? Vec<A>{} : e;
    }
  });
}

template <class A>
BF_INLINE Vec<A> exp(Vec<A> x) {
  exp<A, 1>(&x);
  return x;
}

// expm1 of `count` vectors, in place; only for |x| <= 1.
template <class A, int count>
BF_INLINE void expm1_near_zero(Vec<A>* x) {
  Vec<A> series[count];
  expm1_over_x<A, count, Exp<A>::expm1_terms>(x, series);
  each<count>([&](int k) { x[k] *= series[k]; });
}

template <class A>
struct TanhAndSlope {
  // slope = 1 - tanh^2, to full relative precision, and 0 where that of fp64 would be 0.
  Vec<A> tanh, slope;
};

template <class A>
BF_INLINE TanhAndSlope<A> tanh_and_slope(Vec<A> x) {
  const Vec<A> y = 2 * abs<A>(x);
  const Vec<A> e = exp<A>(-y);
  Vec<A> small = y;
  expm1_near_zero<A, 1>(&small);
  const Vec<A> magnitude = y <= A(1) ? small / (small + 2) : (1 - e) / (1 + e);
  // 1 - tanh^2 is the better form until it cancels.
  const Vec<A> slope =
      magnitude < A(0.875) ? 1 - magnitude * magnitude : 4 * e / ((1 + e) * (1 + e));
  return {x < 0 ? -magnitude : magnitude, slope < A(2.2e-16) ? Vec<A>{} : slope};
}

// 1 - tanh^2 of a saturated unit is a rounding error: with tanh a few steps from 1 it is as many
// times 2^-52 in fp64, or 2^-23, where the true value may be totals smaller, and where eager
// PyTorch gives 0. So below a few steps it is set to 0, below more of them if the result has fewer
// digits. Where the result is fp32 as well as the sum, eager's error is as large.
template <class T, class A>
BF_INLINE Vec<A> visible(Vec<A> slope) {
  if constexpr (sizeof(T) == 4 && sizeof(A) == 4) return slope;
  constexpr A least = sizeof(A) == 4 ? A(1e-6) : sizeof(T) == 8 ? A(7e-16) : A(1e-13);
  return slope < least ? Vec<A>{} : slope;
}

}  // namespace
}  // namespace bahdanau_fast

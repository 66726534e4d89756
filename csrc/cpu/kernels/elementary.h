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

// sum of x^(n-1)/n! for n from `first` to `terms`, times x^(1-first): (exp(x) - 1) / x for first 1.
template <class A, int terms, int first = 1>
BF_INLINE Vec<A> expm1_over_x(Vec<A> x) {
  constexpr A coefficient = A(1.0 / factorial(first));
  if constexpr (first == terms) {
    return splat<A>(coefficient);
  } else {
    return expm1_over_x<A, terms, first + 1>(x) * x + coefficient;
  }
}

template <class A>
BF_INLINE Vec<A> exp(Vec<A> x) {
  using E = Exp<A>;
  const IntVec<A> below = x < E::lowest;
  x = below ? splat<A>(E::lowest) : x;
  x = x > E::highest ? splat<A>(E::highest) : x;
  const Vec<A> shifted = x * E::log2e + E::round;
  const Vec<A> n = shifted - E::round;
  const Vec<A> r = (x - n * E::ln2_high) - n * E::ln2_low;
  const Vec<A> series = 1 + r * expm1_over_x<A, E::exp_terms>(r);
  using Int = typename VecOf<A>::Int;
  const Int round_bits = bitcast<Int>(E::round);
  // 2^n in two halves: n reaches below the smallest normal number.
  const IntVec<A> power = bitcast<IntVec<A>>(shifted) - round_bits, half = power >> 1;
  const auto two_to = [](IntVec<A> k) { return bitcast<Vec<A>>((k + E::bias) << E::mantissa); };
  return below ? Vec<A>{} : series * two_to(half) * two_to(power - half);
}

// Only for |x| <= 1.
template <class A>
BF_INLINE Vec<A> expm1_near_zero(Vec<A> x) {
  return x * expm1_over_x<A, Exp<A>::expm1_terms>(x);
}

template <class A>
BF_INLINE Vec<A> expm1(Vec<A> x) {
  return abs<A>(x) <= A(1) ? expm1_near_zero<A>(x) : exp<A>(x) - 1;
}

template <class A>
struct TanhAndSlope {
  Vec<A> tanh, slope;  // slope = 1 - tanh^2, to full relative precision
};

template <class A>
BF_INLINE TanhAndSlope<A> tanh_and_slope(Vec<A> x) {
  const Vec<A> y = 2 * abs<A>(x);
  const Vec<A> e = exp<A>(-y);
  const Vec<A> small = expm1_near_zero<A>(y);
  const Vec<A> magnitude = y <= A(1) ? small / (small + 2) : (1 - e) / (1 + e);
  // 1 - tanh^2 is the better form until it cancels.
  const Vec<A> slope =
      magnitude < A(0.875) ? 1 - magnitude * magnitude : 4 * e / ((1 + e) * (1 + e));
  return {x < 0 ? -magnitude : magnitude, slope};
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

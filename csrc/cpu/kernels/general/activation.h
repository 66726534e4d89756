// The activations of a score, as vectors.
//
//   tanh(x) = expm1(2x) / (expm1(2x) + 2)
//
// With 2x = n ln 2 + r, expm1(2x) is 2^n expm1(r) + (2^n - 1): near zero n is 0, and nothing
// cancels. x is cut off where tanh no longer changes, so products of four denominators stay in
// range, and four fractions can share a division. Maximum error 4 ulp
// (tests/cpu/test_accuracy.py).
#pragma once

#include "cpu/kernels/score.h"

namespace bahdanau_fast {
namespace {

// 1 - tanh is below half a rounding of 1 from half of this on.
template <class A>
constexpr A kSaturates = sizeof(A) == 4 ? A(18.1) : A(38.2);

template <class A>
BF_INLINE Fraction<A> tanh_fraction(Vec<A> x) {
  using E = Exp<A>;
  using Int = typename VecOf<A>::Int;
  Vec<A> y = x + x;
  y = y < -kSaturates<A> ? splat<A>(-kSaturates<A>) : y;  // a NaN stays
  y = y > kSaturates<A> ? splat<A>(kSaturates<A>) : y;
  const Vec<A> shifted = y * E::log2e + E::round;
  const Vec<A> n = shifted - E::round;
  const Vec<A> r = (y - n * E::ln2_high) - n * E::ln2_low;
  const IntVec<A> power = bitcast<IntVec<A>>(shifted) - bitcast<Int>(E::round);
  const Vec<A> two_to_n = bitcast<Vec<A>>((power + E::bias) << E::mantissa);
  const Vec<A> expm1 = two_to_n * (r * expm1_over_x<A, E::exp_terms>(r)) + (two_to_n - 1);
  return {expm1, expm1 + 2};
}

// act(x), and its slope if it is asked for. `negative` is the slope of leaky_relu below zero.
template <class A, Activation act>
BF_INLINE Vec<A> activated(Vec<A> x, A negative) {
  if constexpr (act == Activation::tanh) {
    const Fraction<A> f = tanh_fraction<A>(x);
    return quotient<A>(f.n, f.d);
  } else if constexpr (act == Activation::relu) {
    return x < 0 ? Vec<A>{} : x;
  } else {
    return x > 0 ? x : negative * x;
  }
}

// The slope at x, where act(x) is y.
template <class T, class A, Activation act>
BF_INLINE Vec<A> slope_of(Vec<A> x, Vec<A> y, A negative) {
  if constexpr (act == Activation::tanh) return visible<T, A>(1 - y * y);
  if constexpr (act == Activation::relu) return x <= 0 ? Vec<A>{} : splat<A>(A(1));
  return x > 0 ? splat<A>(A(1)) : splat<A>(negative);
}

// f(act) with the activation as a constant of the type std::integral_constant.
template <class F>
auto with_activation(Activation activation, const F& f) {
  if (activation == Activation::relu)
    return f(std::integral_constant<Activation, Activation::relu>{});
  if (activation == Activation::leaky_relu)
    return f(std::integral_constant<Activation, Activation::leaky_relu>{});
  return f(std::integral_constant<Activation, Activation::tanh>{});
}

}  // namespace
}  // namespace bahdanau_fast

// The activations of a score, as vectors.
//
//   tanh(x) = expm1(2x) / (expm1(2x) + 2)
//
// With 2x = (n + r) ln 2, expm1(2x) is 2^n (2^r - 1) + (2^n - 1): near zero n is 0, and nothing
// cancels. x is cut off where tanh no longer changes, so products of four denominators stay in
// range, and four fractions can share a division. Maximum error 4 ulp
// (tests/cpu/test_accuracy.py).
#pragma once

#include "cpu/kernels/score.h"

namespace bahdanau_fast {
namespace {

// 1 - tanh is below half a rounding of 1 from here on.
template <class A>
constexpr A kSaturates = sizeof(A) == 4 ? A(9.05) : A(19.1);

constexpr double ln2_to_the(int n) {
  return n == 0 ? 1.0 : 0.693147180559945309417 * ln2_to_the(n - 1);
}

// (2^r - 1) / r, its Taylor series: sum of (ln 2)^n r^(n-1) / n! for n from `first` to `terms`.
template <class A, int terms, int first = 1>
BF_INLINE Vec<A> exp2m1_over_x(Vec<A> r) {
  constexpr A coefficient = A(ln2_to_the(first) / factorial(first));
  if constexpr (first == terms) {
    return splat<A>(coefficient);
  } else {
    return exp2m1_over_x<A, terms, first + 1>(r) * r + coefficient;
  }
}

template <class A>
BF_INLINE Fraction<A> tanh_fraction(Vec<A> x) {
  using E = Exp<A>;
  constexpr A scale = A(2 * 1.44269504088896340736);
  // Adding it rounds to an integer, and leaves that plus the bias of exponents in the lowest bits.
  constexpr A round = E::round + A(E::bias);
  x = x < -kSaturates<A> ? splat<A>(-kSaturates<A>) : x;  // a NaN stays
  x = x > kSaturates<A> ? splat<A>(kSaturates<A>) : x;
  const Vec<A> shifted = x * scale + round;
  const Vec<A> r = x * scale - (shifted - round);
  const Vec<A> two_to_n = bitcast<Vec<A>>(bitcast<IntVec<A>>(shifted) << E::mantissa);
  const Vec<A> expm1 = two_to_n * (r * exp2m1_over_x<A, E::exp_terms>(r)) + (two_to_n - 1);
  return {expm1, expm1 + 2};
}

// The quotients of four fractions, by one division.
template <class A>
BF_INLINE void quotients(const Fraction<A>* f, Vec<A>* out) {
  const Vec<A> d01 = f[0].d * f[1].d, d23 = f[2].d * f[3].d;
  const Vec<A> inverse = reciprocal<A>(d01 * d23);
  const Vec<A> inverse01 = inverse * d23, inverse23 = inverse * d01;
  out[0] = f[0].n * (inverse01 * f[1].d);
  out[1] = f[1].n * (inverse01 * f[0].d);
  out[2] = f[2].n * (inverse23 * f[3].d);
  out[3] = f[3].n * (inverse23 * f[2].d);
}

// act(x). `negative` is the slope of leaky_relu below zero.
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

// The same of four x, which share one division.
template <class A, Activation act>
BF_INLINE void four_activated(const Vec<A>* x, A negative, Vec<A>* out) {
  if constexpr (act == Activation::tanh) {
    Fraction<A> f[4];
    for (int k = 0; k < 4; ++k) f[k] = tanh_fraction<A>(x[k]);
    quotients<A>(f, out);
  } else {
    for (int k = 0; k < 4; ++k) out[k] = activated<A, act>(x[k], negative);
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

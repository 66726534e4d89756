// The activations of a score, as vectors.
//
//   tanh(x) = expm1(2x) / (expm1(2x) + 2),  sigmoid(x) = exp(x) / (exp(x) + 1)
//
// With 2x = (n + r) ln 2, expm1(2x) is 2^n (2^r - 1) + (2^n - 1): near zero n is 0, and nothing
// cancels; exp(x) likewise. x is cut off where tanh no longer changes, so products of four
// denominators stay in range, and four fractions can share a division. Maximum error 4 ulp
// (tests/cpu/test_accuracy.py).
#pragma once

#include "cpu/kernels/score.h"

namespace bahdanau_fast {
namespace {

// 1 - tanh is below half a rounding of 1 from here on.
template <class A>
constexpr A kSaturates = sizeof(A) == 4 ? A(9.05) : A(19.1);
// The least x whose exponential is a normal number.
template <class A>
constexpr A kLeastExponent = sizeof(A) == 4 ? A(-87) : A(-708);

constexpr double ln2_to_the(int n) {
  return n == 0 ? 1.0 : 0.693147180559945309417 * ln2_to_the(n - 1);
}

// (2^r - 1) / r is the sum over n from 1 of this times r^(n-1), its Taylor series.
template <class A>
constexpr A exp2m1_term(int n) {
  return A(ln2_to_the(n) / factorial(n));
}

// The larger, and the smaller, of x and a number; a NaN stays.
template <class A>
BF_INLINE Vec<A> at_least(Vec<A> x, A number) {
  return max<A>(splat<A>(number), x);
}

template <class A>
BF_INLINE Vec<A> at_most(Vec<A> x, A number) {
  return min<A>(splat<A>(number), x);
}

// Of tanh or sigmoid.
template <class A, Activation act, int count>
BF_INLINE void fractions(const Vec<A>* given, Fraction<A>* out) {
  using E = Exp<A>;
  constexpr bool tanh = act == Activation::tanh;
  constexpr A scale = A((tanh ? 2 : 1) * 1.44269504088896340736);
  constexpr A least = tanh ? -kSaturates<A> : kLeastExponent<A>;
  constexpr A most = (tanh ? 1 : 2) * kSaturates<A>;
  // Adding it rounds to an integer, and leaves that plus the bias of exponents in the lowest bits.
  constexpr A round = E::round + A(E::bias);
  Vec<A> x[count], shifted[count], r[count], series[count];
  each<count>([&](int k) { x[k] = at_least<A>(given[k], least); });
  each<count>([&](int k) { x[k] = at_most<A>(x[k], most); });
  each<count>([&](int k) { shifted[k] = x[k] * scale + round; });
  each<count>([&](int k) { r[k] = x[k] * scale - (shifted[k] - round); });
  each<count>([&](int k) { series[k] = splat<A>(exp2m1_term<A>(E::exp_terms)); });
  terms<E::exp_terms - 1>([&](auto n) {
    constexpr A coefficient = exp2m1_term<A>(decltype(n)::value);
    each<count>([&](int k) { series[k] = series[k] * r[k] + coefficient; });
  });
  each<count>([&](int k) { series[k] *= r[k]; });
  each<count>([&](int k) {
    shifted[k] = bitcast<Vec<A>>(bitcast<IntVec<A>>(shifted[k]) << E::mantissa);  // 2^n
    out[k].n = shifted[k] * series[k] + (tanh ? shifted[k] - 1 : shifted[k]);
  });
  each<count>([&](int k) { out[k].d = out[k].n + (tanh ? 2 : 1); });
}

// The quotients of four fractions, by one division.
template <class A>
BF_INLINE void quotients(const Fraction<A>* f, Vec<A>* out) {
  const Vec<A> d01 = f[0].d * f[1].d, d23 = f[2].d * f[3].d;
  const Vec<A> inverse = reciprocal<A>(d01 * d23);
  const Vec<A> inverse01 = inverse * d23, inverse23 = inverse * d01;
  out[0] = rounded_once<A>(f[0].n, f[0].d, inverse01 * f[1].d);
  out[1] = rounded_once<A>(f[1].n, f[1].d, inverse01 * f[0].d);
  out[2] = rounded_once<A>(f[2].n, f[2].d, inverse23 * f[3].d);
  out[3] = rounded_once<A>(f[3].n, f[3].d, inverse23 * f[2].d);
}

// act(x) of a multiple of four x. `negative` is the slope of leaky_relu below zero.
template <class A, Activation act, int count>
BF_INLINE void activated(const Vec<A>* x, A negative, Vec<A>* out) {
  if constexpr (act == Activation::tanh || act == Activation::sigmoid) {
    Fraction<A> f[count];
    fractions<A, act, count>(x, f);
    for (int k = 0; k < count; k += 4) quotients<A>(f + k, out + k);
  } else {
    for (int k = 0; k < count; ++k)
      if constexpr (act == Activation::relu)
        out[k] = x[k] < 0 ? Vec<A>{} : x[k];
      else
        out[k] = x[k] > 0 ? x[k] : negative * x[k];
  }
}

// The slope at x, where act(x) is y.
template <class T, class A, Activation act>
BF_INLINE Vec<A> slope_of(Vec<A> x, Vec<A> y, A negative) {
  // In a result of fp64 1 - y^2 of a saturated unit would be a rounding error.
  if constexpr (act == Activation::tanh && sizeof(T) == 8) return tanh_and_slope<A>(x).slope;
  if constexpr (act == Activation::tanh) return visible<T, A>(1 - y * y);
  if constexpr (act == Activation::sigmoid && sizeof(T) == 8)
    return tanh_and_slope<A>(x * A(0.5)).slope * A(0.25);
  if constexpr (act == Activation::sigmoid && sizeof(A) == 8)
    return x > 0 ? visible<T, A>(y * (1 - y)) : y * (1 - y);
  if constexpr (act == Activation::sigmoid) return y * (1 - y);
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
  if (activation == Activation::sigmoid)
    return f(std::integral_constant<Activation, Activation::sigmoid>{});
  return f(std::integral_constant<Activation, Activation::tanh>{});
}

}  // namespace
}  // namespace bahdanau_fast

// Hyperbolic tangents of sums a + c: from one exponential each, or, for several queries at a time
// in 16 bits, from exponentials of both sides.
//
//   tanh(a + c) = 1 - 2 / d,   d = 1 + E,   E = exp(2a) exp(2c)
//
// Four fractions share a reciprocal: n0/d0 + n1/d1 = (n0 d1 + n1 d0) / (d0 d1), twice: 3.5
// multiply-adds and a quarter of a special-function operation per element. Where |a| <= kClamped, c
// is cut at kKeyLimit and d at 2^31, which changes tanh by 2^-30; with a larger |a|, or NaN, tanh
// is that of the sum.
#pragma once

#include "problem.h"

namespace bahdanau_fast::gpu {

constexpr float kClamped = 15.0f, kKeyLimit = 25.0f;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kShrunk = 1.0f / (1 << 20), kSmallW = 1.0f / (1 << 24);

// Largest |w|: above, w times three d could overflow.
constexpr float kLargestW = 1e8f;

__device__ __forceinline__ float exp_of_key(float c) {
  return exp2_approx(2.0f * kLog2e * clamp(c, kKeyLimit));
}

// exp(x) of x up to 0. In 16 bits with a relative error of 2^-22 and, at the most, that of x.
template <class T>
__device__ __forceinline__ float exp_of(float x) {
  return sizeof(T) == 2 ? exp2_approx(kLog2e * x) : expf(x);
}
template <class T>
__device__ __forceinline__ float over(float x, float sum) {
  return sizeof(T) == 2 ? x * reciprocal(sum) : x / sum;
}
// The largest score of none: the lowest finite one.
constexpr float kLowest = -3.40282347e38f;

// fp32 range, absolute error 1.2e-7, relative 4e-7; relative 2e-7 below 0.6.
__device__ __forceinline__ float tanh_of(float x) {
  const float size = fabsf(x), s = x * x;
  float p = -0.00589389727f;
  p = p * s + 0.0207945798f;
  p = p * s - 0.0537832826f;
  p = p * s + 0.133319154f;
  p = p * s - 0.333332986f;
  const float large = 1.0f - 2.0f * reciprocal(1.0f + exp2_approx(2.0f * kLog2e * size));
  return size <= 0.6f ? x + x * s * p : x < 0.0f ? -large : large;
}

// tanh and its slope of four sums. For 16 bits from one exponential each and a shared reciprocal:
// with x clamped to 10.75, products of four d stay below e^86. tanh has an absolute error
// of 1.2e-7, below 0.03 a relative one of 2e-7; the slope a relative one of 1e-6, or it is 0 where
// tanh is 1 in fp32, as 1 - tanh^2 would be.
template <class T>
__device__ __forceinline__ void four_tanh_of(const float* x, float* t, float* slope) {
  if constexpr (sizeof(T) == 2) {
    float e[4], d[4];
    unrolled<4>([&](int k) {
      e[k] = exp2_approx(2.0f * kLog2e * clamp(x[k], 10.75f));
      d[k] = e[k] + 1.0f;
    });
    const float d01 = d[0] * d[1], d23 = d[2] * d[3], inverse = reciprocal(d01 * d23);
    const float inverse01 = inverse * d23, inverse23 = inverse * d01;
    const float r[4] = {inverse01 * d[1], inverse01 * d[0], inverse23 * d[3], inverse23 * d[2]};
    unrolled<4>([&](int k) {
      const float cube = x[k] * x[k] * x[k], u = 4.0f * r[k] * (e[k] * r[k]);
      t[k] = fabsf(x[k]) < 0.03f ? x[k] - cube * (1.0f / 3.0f) : 1.0f - 2.0f * r[k];
      slope[k] = u < 2e-9f ? 0.0f : u;
    });
  } else {
    unrolled<4>([&](int k) {
      t[k] = tanh_of(x[k]);
      slope[k] = 1.0f - t[k] * t[k];
    });
  }
}

// The sum of w / d over four.
__device__ __forceinline__ float sum_of_fractions(const float* d, const float* w) {
  const float d01 = d[0] * d[1], d23 = d[2] * d[3];
  const float n01 = w[0] * d[1] + w[1] * d[0], n23 = w[2] * d[3] + w[3] * d[2];
  return (n01 * d23 + n23 * d01) * reciprocal(d01 * d23);
}

// What four hidden units of a key add to a score. fp32: w tanh(query + key). 16 bits: w / d, for
// w tanh = w - 2 w / d, of w times kSmallW; from 2 log2(e) query, where d times kShrunk is at most
// 176, or, with `exponentials`, from those of both sides. Numerators and denominators then stay in
// the range of fp32, whatever w is, or up to kLargestW.
template <class T, bool exponentials>
__device__ __forceinline__ void add_four(const float* query, const float* key, const float* w,
                                         float* sum) {
  if constexpr (sizeof(T) != 2) {
    unrolled<4>([&](int k) { *sum += w[k] * tanh_of(query[k] + key[k]); });
  } else {
    float d[4];
    unrolled<4>([&](int k) {
      if constexpr (exponentials) {
        d[k] = at_most(query[k] * key[k] + 1.0f, 2147483648.0f);
      } else {
        const float x = at_most(2.0f * kLog2e * key[k] + query[k], 19.0f * kLog2e);
        d[k] = kShrunk * exp2_approx(x) + kShrunk;
      }
    });
    *sum += sum_of_fractions(d, w);
  }
}

}  // namespace bahdanau_fast::gpu

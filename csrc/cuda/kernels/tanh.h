// Hyperbolic tangents of sums: directly, or from exponentials of both sides. The forms are those of
// common/problem.h.
//
//   tanh(a + c) = 1 - 2 / d,   d = 1 + E,   E = exp(2a) exp(2c)
//
// Four fractions share a reciprocal: n0/d0 + n1/d1 = (n0 d1 + n1 d0) / (d0 d1), twice: 3.5
// multiply-adds and a quarter of a special-function operation per element. For fp32 the numerator
// is w (E - 1), one multiply-add more, because 1 - 2 / d would cancel and round twice.
//
// The form is chosen for a tile of queries and keys by its largest |a| and |c|:
//
//   factored  their sum is at most kFactored: products of four d stay below e^76, and at least
//             kSmallest<T>, below which rounding 1 + E would show in tanh
//   clamped   |a| <= kClamped: c is cut at 25 and d at 2^31, which changes tanh by 2^-30
//             (not for fp32)
//   direct    anything else, and NaN: tanh of the sum
#pragma once

#include "problem.h"

namespace bahdanau_fast::gpu {

constexpr float kFactored = 9.5f, kClamped = 15.0f, kKeyLimit = 25.0f;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kShrunk = 1.0f / (1 << 29);

// Largest |w|: above, four numerators, w (E - 1) in fp32 and w, times three d could overflow.
template <class T>
constexpr float kLargestW = sizeof(T) == 4 ? 4e4f : 1e8f;

// Least largest |a| + |c| for the factored form.
template <class T>
constexpr float kSmallest = sizeof(T) == 4 ? 0.5f : 0.03f;

template <class T>
__device__ __forceinline__ Form choose_form(float queries_max, float keys_max, float w_max) {
  if (!(w_max <= kLargestW<T>)) return Form::direct;
  const float sum = queries_max + keys_max;
  if (sum <= kFactored && sum >= kSmallest<T>) return Form::factored;
  if (sizeof(T) == 2 && queries_max <= kClamped && sum > kFactored) return Form::clamped;
  return Form::direct;
}

// exp(2x) for |x| <= 40 to 0.9 ulp, as 2^n exp(2r) with |r| at most log(2) / 4. ex2 may be off by
// four times that much, which all scores of the query or the key would have in them.
__device__ __forceinline__ float exp_of_two_within_an_ulp(float x) {
  const float shifted = 2.0f * kLog2e * x + 12582912.0f;  // 1.5 * 2^23: its last bits are n
  const float n = shifted - 12582912.0f, r = (x - 0.346572876f * n) - 7.143034e-7f * n;
  float p = 0.0884116516f;
  p = p * r + 0.267803222f;
  p = p * r + 0.666694403f;
  p = p * r + 1.33332157f;
  p = p * r + 1.99999976f;
  p = (p * r + 2.0f) * r + 1.0f;
  return from_bits(to_bits(p) + (to_bits(shifted) << 23));
}
// exp(2x) for the factored and clamped forms.
template <class T>
__device__ __forceinline__ float exp_of_two(float x) {
  if constexpr (sizeof(T) == 4) return exp_of_two_within_an_ulp(x);
  return exp2_approx(2.0f * kLog2e * x);
}
template <class T>
__device__ __forceinline__ float exp_of_key(float c, Form form) {
  return exp_of_two<T>(form == Form::clamped ? clamp(c, kKeyLimit) : c);
}

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

// The sum of w tanh(x) over four x. For 16 bits d = 2^-29 (1 + E), which is at most 1/3: numerators
// then stay below the largest |w|, however large, and products of four d above 2^-117.
template <class T>
__device__ __forceinline__ float sum_of_four_tanh(const float* x, const float* w) {
  if constexpr (sizeof(T) == 2) {
    float d[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      d[k] = kShrunk * exp2_approx(2.0f * kLog2e * clamp(x[k], 9.5f)) + kShrunk;
    const float d01 = d[0] * d[1], d23 = d[2] * d[3];
    const float n01 = w[0] * d[1] + w[1] * d[0], n23 = w[2] * d[3] + w[3] * d[2];
    const float inverse = 2.0f * kShrunk * reciprocal(d01 * d23);
    return ((w[0] + w[1]) + (w[2] + w[3])) - (n01 * d23 + n23 * d01) * inverse;
  } else {
    return (w[0] * tanh_of(x[0]) + w[1] * tanh_of(x[1])) +
           (w[2] * tanh_of(x[2]) + w[3] * tanh_of(x[3]));
  }
}

// tanh and its slope of four sums. For 16 bits from one exponential each and a shared reciprocal:
// with x clamped to 10.75, products of four d stay below e^86. tanh has an absolute error
// of 1.2e-7, below 0.03 a relative one of 2e-7; the slope a relative one of 1e-6, or it is 0 where
// tanh is 1 in fp32 (see four_tanh).
template <class T>
__device__ __forceinline__ void four_tanh_of(const float* x, float* t, float* slope) {
  if constexpr (sizeof(T) == 2) {
    float e[4], d[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      e[k] = exp2_approx(2.0f * kLog2e * clamp(x[k], 10.75f));
      d[k] = e[k] + 1.0f;
    }
    const float d01 = d[0] * d[1], d23 = d[2] * d[3], inverse = reciprocal(d01 * d23);
    const float inverse01 = inverse * d23, inverse23 = inverse * d01;
    const float r[4] = {inverse01 * d[1], inverse01 * d[0], inverse23 * d[3], inverse23 * d[2]};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float cube = x[k] * x[k] * x[k], u = 4.0f * r[k] * (e[k] * r[k]);
      t[k] = fabsf(x[k]) < 0.03f ? x[k] - cube * (1.0f / 3.0f) : 1.0f - 2.0f * r[k];
      slope[k] = u < 2e-9f ? 0.0f : u;
    }
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      t[k] = tanh_of(x[k]);
      slope[k] = 1.0f - t[k] * t[k];
    }
  }
}

// The sum of n / d over four hidden units, factored or clamped.
template <class T, Form form>
__device__ __forceinline__ float sum_of_four_fractions(const float* query, const float* key,
                                                       const float* w) {
  float d[4], n[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    d[k] = query[k] * key[k] + 1.0f;
    if (form == Form::clamped) d[k] = at_most(d[k], 2147483648.0f);
    n[k] = sizeof(T) == 4 ? (w[k] * query[k]) * key[k] - w[k] : w[k];
  }
  const float d01 = d[0] * d[1], d23 = d[2] * d[3];
  const float n01 = n[0] * d[1] + n[1] * d[0], n23 = n[2] * d[3] + n[3] * d[2];
  return (n01 * d23 + n23 * d01) * reciprocal(d01 * d23);
}
// The score from the sum of all fractions and the sum of w.
template <class T>
__device__ __forceinline__ float score_of_fractions(float fractions, float sum_w) {
  return sizeof(T) == 4 ? fractions : sum_w - 2.0f * fractions;
}

// tanh and its slope of one query and four keys. The slope 4 E / (1 + E)^2 is accurate where
// 1 - tanh^2 cancels; below 2e-9, where tanh is 1 in fp32, it is set to 0, as 1 - tanh^2 would be.
template <class T>
__device__ __forceinline__ void four_tanh(float query, const float* key, Form form, float* t,
                                          float* slope) {
  if (form != Form::direct) {
    float e[4], d[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      e[k] = query * key[k];
      if (sizeof(T) == 2) e[k] = at_most(e[k], 2147483648.0f);
      d[k] = e[k] + 1.0f;
    }
    const float d01 = d[0] * d[1], d23 = d[2] * d[3], inverse = reciprocal(d01 * d23);
    const float inverse01 = inverse * d23, inverse23 = inverse * d01;
    const float r[4] = {inverse01 * d[1], inverse01 * d[0], inverse23 * d[3], inverse23 * d[2]};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      t[k] = sizeof(T) == 4 ? (e[k] - 1.0f) * r[k] : 1.0f - 2.0f * r[k];
      const float u = 4.0f * r[k] * (e[k] * r[k]);
      slope[k] = u < 2e-9f ? 0.0f : u;
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    t[k] = tanh_of(query + key[k]);
    slope[k] = 1.0f - t[k] * t[k];
  }
}

}  // namespace bahdanau_fast::gpu

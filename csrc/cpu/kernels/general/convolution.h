// Features of keys from where earlier steps looked: a convolution along the keys,
//
//   f[c,j] = bias[c] + sum_it w[c,i,t] x[i, j + t - (taps - 1) / 2],  x zero outside of [0, Tk)
//
//   x  (inputs,Tk)       storage type, of a batch row
//   w  (C,inputs,taps)   sum type
//   f  (C,Tk)            storage type
//
// A task is a few channels of a batch row. With x between zeros, the taps are the rows of a matrix
// that overlap: row t starts at x + t, and f is a product of small matrices (linear.h).
#pragma once

#include "cpu/kernels/forward.h"

namespace bahdanau_fast {
namespace {

inline int64_t padded_keys(const Convolution& p) { return p.Tk + p.taps - 1; }

template <class T, class A>
int64_t convolve_workspace(const Convolution& p, int64_t channels) {
  return p.inputs * padded_keys(p) + channels * p.Tk;
}

template <class T, class A>
void convolve(const Convolution& p, int64_t b, int64_t c0, int64_t c1, void* work) {
  const int64_t width = padded_keys(p), before = (p.taps - 1) / 2;
  A* padded = static_cast<A*>(work);
  A* sums = padded + p.inputs * width;
  const Rows<T, A> inputs(p.location, b);
  for (int64_t i = 0; i < p.inputs; ++i)
    for (int64_t j = 0; j < width; ++j) {
      const int64_t at = j - before;
      padded[i * width + j] = at >= 0 && at < p.Tk ? A(widen(inputs[i][at])) : A(0);
    }
  const A* bias = static_cast<const A*>(p.bias);
  for (int64_t c = c0; c < c1; ++c)
    for (int64_t j = 0; j < p.Tk; ++j) sums[(c - c0) * p.Tk + j] = bias != nullptr ? bias[c] : A(0);
  const A* w = static_cast<const A*>(p.w) + c0 * p.inputs * p.taps;
  for (int64_t i = 0; i < p.inputs; ++i)
    weighted_sums<A>(w + i * p.taps, p.inputs * p.taps, 1, padded + i * width, 1, p.taps, p.Tk,
                     true, sums, p.Tk, c1 - c0);
  for (int64_t c = c0; c < c1; ++c)
    store_row(sums + (c - c0) * p.Tk, p.Tk, static_cast<T*>(p.out) + (b * p.C + c) * p.Tk);
}

}  // namespace
}  // namespace bahdanau_fast

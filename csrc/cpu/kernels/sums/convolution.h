// Features of keys from where earlier steps looked: a convolution along the keys,
//
//   f[c,j] = bias[c] + sum_it w[c,i,t] x[i, j + t - (taps - 1) / 2],  x zero outside of [0, Tk)
//
//   x  (inputs,Tk)       storage type, of a batch row
//   w  (C,inputs,taps)   sum type
//   f  (C,Tk)            storage type
//
// A task is a few channels of a batch row. With x between zeros, the taps are the rows of a matrix
// that overlap: row t starts at x + t, and f is a product of small matrices (linear.h). So are the
// gradients, with g = grad_f between zeros:
//
//   grad_w[c,i,t] = sum_j g[c,j] x[i, j + t - (taps - 1) / 2]
//   grad_x[i,j]   = sum_ct w[c,i,t] g[c, j - t + (taps - 1) / 2]
//
// Columns are computed in whole vectors; those past the last one are not stored.
#pragma once

#include "cpu/kernels/forward.h"

namespace bahdanau_fast {
namespace {

template <class A>
int64_t whole_vectors(int64_t n) {
  return (n + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

// Of a row between zeros.
template <class A>
int64_t padded_keys(const Convolution& p) {
  return whole_vectors<A>(p.Tk) + whole_vectors<A>(p.taps);
}

// `count` rows of Tk numbers between zeros.
template <class T, class A>
void pad_rows(const Convolution& p, const Rows<T, A>& rows, int64_t count, A* out) {
  const int64_t width = padded_keys<A>(p), before = (p.taps - 1) / 2;
  for (int64_t i = 0; i < count; ++i, out += width) {
    for (int64_t j = 0; j < before; ++j) out[j] = A(0);
    for (int64_t j = 0; j < p.Tk; ++j) out[before + j] = A(widen(rows[i][j]));
    for (int64_t j = before + p.Tk; j < width; ++j) out[j] = A(0);
  }
}

template <class T, class A>
int64_t convolve_workspace(const Convolution& p, int64_t channels) {
  return p.inputs * padded_keys<A>(p) + channels * whole_vectors<A>(p.Tk);
}

template <class T, class A>
void convolve(const Convolution& p, int64_t b, int64_t c0, int64_t c1, void* work) {
  const int64_t width = padded_keys<A>(p), columns = whole_vectors<A>(p.Tk);
  A* padded = static_cast<A*>(work);
  A* sums = padded + p.inputs * width;
  pad_rows(p, Rows<T, A>(p.location, b), p.inputs, padded);
  const A* bias = static_cast<const A*>(p.bias);
  for (int64_t c = c0; c < c1; ++c)
    for (int64_t j = 0; j < columns; ++j)
      sums[(c - c0) * columns + j] = bias != nullptr ? bias[c] : A(0);
  const A* w = static_cast<const A*>(p.w) + c0 * p.inputs * p.taps;
  for (int64_t i = 0; i < p.inputs; ++i)
    weighted_sums<A>(w + i * p.taps, p.inputs * p.taps, 1, padded + i * width, 1, p.taps, columns,
                     true, sums, columns, c1 - c0);
  for (int64_t c = c0; c < c1; ++c)
    store_row(sums + (c - c0) * columns, p.Tk, static_cast<T*>(p.out) + (b * p.C + c) * p.Tk);
}

template <class T, class A>
int64_t convolve_backward_workspace(const Convolution& p) {
  return (p.inputs + p.C) * padded_keys<A>(p) + p.inputs * whole_vectors<A>(p.Tk) +
         3 * p.C * whole_vectors<A>(p.taps);
}

// The gradients of a batch row; that of w is a part of a sum over the rows.
template <class T, class A>
void convolve_backward(const Convolution& p, const ConvolutionGrads& g, int64_t b, void* work) {
  const int64_t width = padded_keys<A>(p), keys = whole_vectors<A>(p.Tk);
  const int64_t taps = whole_vectors<A>(p.taps), before = (p.taps - 1) / 2;
  A* grads = static_cast<A*>(work);
  A* padded = grads + p.C * width;
  A* to_location = padded + p.inputs * width;
  A* to_w = to_location + p.inputs * keys;
  pad_rows(p, Rows<T, A>(g.features, b), p.C, grads);
  if (g.w != nullptr) {
    pad_rows(p, Rows<T, A>(p.location, b), p.inputs, padded);
    A* part = static_cast<A*>(g.w) + b * g.w_stride;
    A* const totals = to_w + p.C * taps;
    for (int64_t i = 0; i < p.inputs; ++i) {
      std::memset(totals, 0, 2 * p.C * taps * sizeof(A));
      for (int64_t j = 0; j < p.Tk; j += kProducts) {
        const int64_t count = j + kProducts < p.Tk ? kProducts : p.Tk - j;
        weighted_sums<A>(grads + before + j, width, 1, padded + i * width + j, 1, count, taps,
                         false, to_w, taps, p.C);
        settle(to_w, totals, p.C * taps);
      }
      for (int64_t c = 0; c < p.C; ++c)
        std::memcpy(part + (c * p.inputs + i) * p.taps, totals + c * taps, p.taps * sizeof(A));
    }
  }
  if (g.location == nullptr) return;
  const A* last = static_cast<const A*>(p.w) + p.taps - 1;
  for (int64_t c = 0; c < p.C; ++c)
    weighted_sums<A>(last + c * p.inputs * p.taps, p.taps, -1, grads + c * width, 1, p.taps, keys,
                     c > 0, to_location, keys, p.inputs);
  for (int64_t i = 0; i < p.inputs; ++i)
    store_row(to_location + i * keys, p.Tk,
              static_cast<T*>(g.location) + (b * p.inputs + i) * p.Tk);
}

}  // namespace
}  // namespace bahdanau_fast

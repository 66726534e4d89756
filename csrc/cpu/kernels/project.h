// Projection of a few rows, out[r] = W x[r] + bias, and its gradients: for calls so small that a
// BLAS call costs more than the arithmetic, and for so few rows that MKL is slower (limits.py).
#pragma once

#include "forward.h"

namespace bahdanau_fast {
namespace {

// Rows of out are `stride` apart. Workspace: R * kProjectUnits numbers of the sum type.
template <class T, class A>
void project(const Projection& p, void* out, int64_t stride, void* work) {
  const T* w = static_cast<const T*>(p.w);
  const T* bias = static_cast<const T*>(p.bias);
  A* sums = static_cast<A*>(work);
  for (int64_t b = 0; b < p.B; ++b) {
    const Rows<T, A> rows(p.rows, b);
    T* to = static_cast<T*>(out) + b * p.R * stride;
    for (int64_t h = 0; h < p.H; h += kProjectUnits) {
      const int64_t units = p.H - h < kProjectUnits ? p.H - h : kProjectUnits;
      dot_rows<A>(rows[0], rows.stride, p.R, w + h * p.D, p.D, units, p.D, sums, kProjectUnits);
      for (int64_t r = 0; r < p.R; ++r) {
        for (int64_t k = 0; k < units; ++k) {
          const A dot = sums[r * kProjectUnits + k];
          narrow(bias == nullptr ? dot : dot + A(widen(bias[h + k])), to + r * stride + h + k);
        }
      }
    }
  }
}

// `rows` rows of n numbers, `stride` apart, in the sum type.
template <class T, class A>
void widen_rows(const void* from, int64_t stride, int64_t rows, int64_t n, A* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = static_cast<const T*>(from) + r * stride;
    for (int64_t k = 0; k < n; ++k) out[r * n + k] = A(widen(row[k]));
  }
}

// Columns [d0,d1) of grad_rows (B,R,D) = grad W, with grad (B,R,H), all contiguous.
// Workspace: B*R * (H + d1-d0) numbers of the sum type.
template <class T, class A>
void project_grad_rows(const Projection& p, const void* grad, int64_t d0, int64_t d1,
                       void* grad_rows, void* work) {
  constexpr int64_t kUnits = 32;  // rows of W that stay in the first-level cache for all rows
  const int64_t count = p.B * p.R, n = d1 - d0;
  const T* w = static_cast<const T*>(p.w) + d0;
  A* grads = static_cast<A*>(work);
  A* sums = grads + count * p.H;
  widen_rows<T>(grad, p.H, count, p.H, grads);
  for (int64_t h = 0; h < p.H; h += kUnits) {
    const int64_t units = p.H - h < kUnits ? p.H - h : kUnits;
    weighted_sums<A>(grads + h, p.H, 1, w + h * p.D, p.D, units, n, h > 0, sums, n, count);
  }
  for (int64_t r = 0; r < count; ++r)
    store_row(sums + r * n, n, static_cast<T*>(grad_rows) + r * p.D + d0);
}

// Hidden units [h0,h1) of grad_w (H,D) = grad^T rows and grad_bias (H), which may be null.
// Workspace: B*R * (h1-h0) + kProjectUnits * D numbers of the sum type.
template <class T, class A>
void project_grad_weight(const Projection& p, const void* grad, int64_t h0, int64_t h1,
                         void* grad_w, void* grad_bias, void* work) {
  const int64_t count = p.B * p.R, n = h1 - h0;
  A* grads = static_cast<A*>(work);
  widen_rows<T>(static_cast<const T*>(grad) + h0, p.H, count, n, grads);
  for (int64_t h = 0; grad_w != nullptr && h < n; h += kProjectUnits) {
    const int64_t units = n - h < kProjectUnits ? n - h : kProjectUnits;
    T* const to = static_cast<T*>(grad_w) + (h0 + h) * p.D;
    A* sums = grads + count * n;
    if constexpr (std::is_same_v<T, A>) sums = to;
    for (int64_t b = 0; b < p.B; ++b) {
      const Rows<T, A> rows(p.rows, b);
      weighted_sums<A>(grads + b * p.R * n + h, 1, n, rows[0], rows.stride, p.R, p.D, b > 0, sums,
                       p.D, units);
    }
    if constexpr (!std::is_same_v<T, A>) store_row(sums, units * p.D, to);
  }
  for (int64_t h = 0; grad_bias != nullptr && h < n; ++h) {
    double total = 0;  // of any number of rows
    for (int64_t r = 0; r < count; ++r) total += grads[r * n + h];
    narrow(A(total), static_cast<T*>(grad_bias) + h0 + h);
  }
}

}  // namespace
}  // namespace bahdanau_fast

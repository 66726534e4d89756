// Projection of a few rows, out[r] = W x[r] + bias, and its gradients: for calls so small that a
// BLAS call costs more than the arithmetic.
#pragma once

#include "forward.h"

namespace bahdanau_fast {
namespace {

// Rows of out are `stride` apart. Workspace: H numbers of the sum type.
template <class T, class A>
void project(const Projection& p, void* out, int64_t stride, void* work) {
  const T* w = static_cast<const T*>(p.w);
  const T* bias = static_cast<const T*>(p.bias);
  A* sums = static_cast<A*>(work);
  for (int64_t b = 0; b < p.B; ++b) {
    const Rows<T, A> rows(p.rows, b);
    for (int64_t r = 0; r < p.R; ++r) {
      dot_rows<A>(rows[r], 0, 1, w, p.D, p.H, p.D, sums, p.H);
      for (int64_t h = 0; bias != nullptr && h < p.H; ++h) sums[h] += A(widen(bias[h]));
      store_row(sums, p.H, static_cast<T*>(out) + (b * p.R + r) * stride);
    }
  }
}

// grad (B,R,H), grad_rows (B,R,D), grad_w (H,D), grad_bias (H) or null, all contiguous.
// Workspace: B*R*H + max(H,D) numbers of the sum type.
template <class T, class A>
void project_backward(const Projection& p, const void* grad, void* grad_rows, void* grad_w,
                      void* grad_bias, void* work) {
  const int64_t count = p.B * p.R;
  A* grads = static_cast<A*>(work);
  A* sums = grads + count * p.H;
  for (int64_t k = 0; k < count * p.H; ++k) grads[k] = A(widen(static_cast<const T*>(grad)[k]));
  for (int64_t r = 0; r < count; ++r) {
    weighted_sum<A>(grads + r * p.H, 1, static_cast<const T*>(p.w), p.D, p.H, p.D, false, sums);
    store_row(sums, p.D, static_cast<T*>(grad_rows) + r * p.D);
  }
  for (int64_t h = 0; h < p.H; ++h) {
    for (int64_t b = 0; b < p.B; ++b) {
      const Rows<T, A> rows(p.rows, b);
      weighted_sum<A>(grads + b * p.R * p.H + h, p.H, rows[0], rows.stride, p.R, p.D, b > 0, sums);
    }
    store_row(sums, p.D, static_cast<T*>(grad_w) + h * p.D);
  }
  if (grad_bias == nullptr) return;
  for (int64_t h = 0; h < p.H; ++h) {
    A total = 0;
    for (int64_t r = 0; r < count; ++r) total += grads[r * p.H + h];
    narrow(total, static_cast<T*>(grad_bias) + h);
  }
}

}  // namespace
}  // namespace bahdanau_fast

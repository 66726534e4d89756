// The third step of backward (backward.h) for pooling without a query (heads.h): with s =
// grad_score,
//
//   g[j] = sum_i s[i,j] w[i],  grad_x[j] = g[j] sigmoid(y[j]) tanh'(x[j]),
//   grad_y[j] = g[j] tanh(x[j]) sigmoid'(y[j]),  grad_w[i] = sum_j s[i,j] hidden[j]
//
// A task is a batch row and a slice of hidden units.
#pragma once

#include "cpu/kernels/forward.h"

namespace bahdanau_fast {
namespace {

template <class T, class A>
struct GradOfHeads {
  static constexpr int kKeys = kInnerRows;
  static constexpr int64_t kSettle = 64;  // keys in a partial sum

  const Problem& p;
  const Backward& g;
  int64_t b, h0, n, valid;
  Rows<T, A> inner, gate;
  const A* scores;
  A *w, *partial, *totals;  // (Tq,n): weights, and sums of their gradients for settle()
  A* shares;                // (Tq,kKeys): gradients of the scores of some keys

  static int64_t workspace(const Problem& p, int64_t hidden) { return p.Tq * (4 * hidden + kKeys); }

  GradOfHeads(const Problem& problem, const Backward& backward, int64_t row, int64_t begin,
              int64_t end, const void* scores_in, void* work)
      : p(problem),
        g(backward),
        b(row),
        h0(begin),
        n(end - begin),
        inner(p.keys, b),
        gate(p.gate, b) {
    valid = (end < p.H ? end : p.H) - h0;
    scores = static_cast<const A*>(scores_in);
    w = static_cast<A*>(work);
    partial = w + p.Tq * n;
    totals = partial + p.Tq * n;
    shares = totals + 2 * p.Tq * n;
    const Rows<T, A> weights(p.queries, 0);
    for (int64_t i = 0; i < p.Tq; ++i)
      for (int64_t h = 0; h < n; h += kLanes<A>)
        store(w + i * n + h, load_row<A>(weights[i] + h0, h, valid));
    for (A* sum = partial; sum < shares; ++sum) *sum = A(0);
  }

  void store_grad(void* grads, int64_t j, int64_t h, Vec<A> grad) const {
    if (grads != nullptr)
      store_as<A>(static_cast<T*>(grads) + (b * p.Tk + j) * p.H + h0 + h, grad, valid - h);
  }

  // Keys [j, j + count) of up to kKeys; in the place of others the last one is read again.
  template <bool gated>
  BF_INLINE void group(int64_t j, int64_t count) {
    for (int64_t i = 0; i < p.Tq; ++i)
      for (int64_t l = 0; l < kKeys; ++l)
        shares[i * kKeys + l] = l < count ? scores[i * p.Tk + j + l] : A(0);
    for (int64_t h = 0; h < n; h += kLanes<A>) {
      const Hidden<A, gated> units(inner, gate, j, count, h0 + h, p.H);
      Vec<A> sums[kKeys] = {};
      for (int64_t i = 0; i < p.Tq; ++i) {
        const Vec<A> weight = load_once(w + i * n + h);
        Vec<A> sum = load(partial + i * n + h);
        for (int l = 0; l < kKeys; ++l) {
          sums[l] += shares[i * kKeys + l] * weight;
          sum += shares[i * kKeys + l] * units.product(l);
        }
        store(partial + i * n + h, sum);
      }
      for (int l = 0; l < count; ++l) {
        const Vec<A> of_tanh = slope_of<T, A, Activation::tanh>(units.x[l], units.tanh[l], A(0));
        if constexpr (gated) {
          const Vec<A> of_gate =
              slope_of<T, A, Activation::sigmoid>(units.y[l], units.sigmoid[l], A(0));
          store_grad(g.grad_keys, j + l, h, sums[l] * units.sigmoid[l] * of_tanh);
          store_grad(g.grad_gate, j + l, h, sums[l] * units.tanh[l] * of_gate);
        } else {
          store_grad(g.grad_keys, j + l, h, sums[l] * of_tanh);
        }
      }
    }
  }

  void run() {
    const int64_t used = keys_used(p, b);
    for (int64_t j = 0; j < used; j += kKeys) {
      const int64_t count = used - j < kKeys ? used - j : kKeys;
      p.gate.data != nullptr ? group<true>(j, count) : group<false>(j, count);
      if ((j + kKeys) % kSettle == 0 || j + kKeys >= used) settle(partial, totals, p.Tq * n);
    }
    for (int64_t j = used; j < p.Tk; ++j)
      for (int64_t h = 0; h < n; h += kLanes<A>) {
        store_grad(g.grad_keys, j, h, Vec<A>{});
        store_grad(g.grad_gate, j, h, Vec<A>{});
      }
    for (int64_t i = 0; g.grad_w != nullptr && i < p.Tq; ++i)
      std::memcpy(static_cast<A*>(g.grad_w) + (b * p.Tq + i) * p.width + h0, totals + i * n,
                  n * sizeof(A));
  }
};

template <class T, class A>
void grad_of_heads(const Problem& p, const Backward& g, int64_t b, int64_t h0, int64_t h1,
                   const void* scores, void* work) {
  GradOfHeads<T, A>(p, g, b, h0, h1, scores, work).run();
}

}  // namespace
}  // namespace bahdanau_fast

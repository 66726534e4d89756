// The third step of backward (backward.h) from sums: with s = grad_score, x = a + c + W_f f,
// y = act(x) and u its slope at x,
//
//   grad_query[i] = w sum_j s u,  g[j] = grad_key[j] = w sum_i s u,  grad_w = sum_ij s y,
//   grad_f[j] = W_f^T g[j],       grad_W_f = sum_j g[j] f[j]^T
//
// A task is a batch row and a slice of hidden units. It takes a few keys at a time, whose rows
// c + W_f f and g stay in the first-level cache: nothing of size Tk x H is kept but grad_key, where
// that is wanted. grad_f is a part for each slice, grad_W_f one for each batch row.
#pragma once

#include "cpu/kernels/forward.h"

namespace bahdanau_fast {
namespace {

template <class T, class A>
struct GradOfSums {
  static constexpr int kKeys = kInnerRows;
  static constexpr int64_t kSettle = 64;  // keys, and queries, in a partial sum

  const Problem& p;
  const Backward& g;
  int64_t b, h0, n, valid;
  Rows<T, A> key_rows;
  const A *scores, *w;
  // Rows of n numbers: queries; sums over the keys of grad_query and grad_w, for settle(); what
  // gradients of inner rows have lost; inner rows, and their gradients.
  A *queries, *totals, *partial, *lost, *rows, *grads;
  // (C,n): these units of W_f and their gradient. What is used for each key is in one piece: pieces
  // of memory can drive each other out of the first-level cache, whatever their sizes.
  A *w_f, *grad_w_f, *total_w_f;
  A* shares;  // (Tq,kKeys): the scores' gradients of a group of keys, zero past the last one
  A* by_key;  // (kKeys,C): gradients of the features of some keys

  static int64_t workspace(const Problem& p, int64_t hidden) {
    const int64_t C = p.inside.C;
    return (4 * p.Tq + 3 + 3 * kKeys + 4 * C) * hidden + (p.Tq + C) * kKeys;
  }

  GradOfSums(const Problem& problem, const Backward& backward, int64_t row, int64_t begin,
             int64_t end, const void* scores_in, void* work)
      : p(problem), g(backward), b(row), h0(begin), n(end - begin), key_rows(p.keys, b) {
    valid = (end < p.H ? end : p.H) - h0;
    scores = static_cast<const A*>(scores_in);
    w = static_cast<const A*>(p.w) + h0;
    queries = static_cast<A*>(work);
    total_w_f = queries + p.Tq * n;
    totals = partial = total_w_f + (p.Tk > kProducts ? 2 * p.inside.C * n : 0);
    if (p.Tk > kSettle) partial += 2 * (p.Tq + 1) * n;  // else there is one partial sum
    lost = partial + (p.Tq + 1) * n;
    rows = lost + kKeys * n;
    grads = rows + kKeys * n;
    w_f = grads + kKeys * n;
    grad_w_f = w_f + p.inside.C * n;
    shares = grad_w_f + p.inside.C * n;
    by_key = shares + p.Tq * kKeys;
    for (int64_t c = 0; c < p.inside.C; ++c)
      std::memcpy(w_f + c * n, static_cast<const A*>(p.inside.w_f) + c * p.width + h0,
                  n * sizeof(A));
    const Rows<T, A> query_rows(p.queries, b);
    for (int64_t i = 0; i < p.Tq; ++i)
      for (int64_t h = 0; h < n; h += kLanes<A>)
        store(queries + i * n + h, load_row<A>(query_rows[i] + h0, h, valid));
    for (A* sum = total_w_f; sum < lost; ++sum) *sum = A(0);
    if (p.Tk <= kProducts || g.grad_w_f == nullptr) total_w_f = grad_w_f;
  }

  // Adds the sums of keys [j, j + kKeys), `count` of which are there, and queries [first, last).
  template <Activation act>
  BF_INLINE void group(int64_t j, int64_t count, int64_t first, int64_t last) {
    const A negative = A(p.inside.negative_slope), scale = A(p.w_scale);
    A* const partial_w = partial + p.Tq * n;
    for (int64_t i = first; i < last; ++i)
      for (int64_t l = 0; l < kKeys; ++l)
        shares[i * kKeys + l] = l < count ? scores[i * p.Tk + j + l] : A(0);
    // Read next: by use_grads(), and by make_inner_rows().
    const T* onto = g.adds_to_keys ? grad_key(j) : nullptr;
    const T* next = key_rows[j + kKeys] + h0;
    for (int64_t h = 0; h < n; h += kLanes<A>) {
      Vec<A> sums[kKeys] = {}, sum_w{};
      for (int64_t l = 0; onto != nullptr && l < kKeys; ++l) __builtin_prefetch(onto + l * p.H + h);
      for (int64_t l = 0; l < kKeys; ++l) __builtin_prefetch(next + l * key_rows.stride + h);
      for (int64_t i = first; i < last; ++i) {
        const Vec<A> a = load_once(queries + i * n + h);
        Vec<A> x[kKeys], y[kKeys], sum_query{};
        for (int l = 0; l < kKeys; ++l) x[l] = a + load(rows + l * n + h);
        activated<A, act, kKeys>(x, negative, y);
        for (int l = 0; l < kKeys; ++l) {
          const A share = shares[i * kKeys + l];
          const Vec<A> su = share * slope_of<T, A, act>(x[l], y[l], negative);
          sum_w += share * y[l];
          sums[l] += su;
          sum_query += su;
        }
        A* to = partial + i * n + h;
        store(to, Vec<A>(load(to) + sum_query));
      }
      const Vec<A> weight = load(w + h) * scale;
      for (int l = 0; l < kKeys; ++l) {
        A *const grad = grads + l * n + h, *const lost_grad = lost + l * n + h;
        Vec<A> total = first > 0 ? load(grad) : sums[l] * weight;
        Vec<A> error = first > 0 ? load(lost_grad) : Vec<A>{};
        if (first > 0) add_exactly<A>(sums[l] * weight, total, error);
        store(grad, total);
        if (last < p.Tq) store(lost_grad, error);
      }
      store(partial_w + h, Vec<A>(load(partial_w + h) + sum_w));
    }
  }

  T* grad_key(int64_t j) const { return static_cast<T*>(g.grad_keys) + (b * p.Tk + j) * p.H + h0; }
  A* feature_grads() const { return static_cast<A*>(g.grad_features) + b * p.inside.C * p.Tk; }

  // What the gradients of the inner rows of keys [j, j + count) are wanted for.
  void use_grads(int64_t j, int64_t count) {
    const Inside& inside = p.inside;
    if (g.grad_features != nullptr && inside.C % kLanes<A> == 0) {
      weighted_sums<A>(grads, n, 1, static_cast<const A*>(g.w_f) + h0 * inside.C, inside.C, valid,
                       inside.C, false, by_key, inside.C, count);
      for (int64_t c = 0; c < inside.C; ++c)
        for (int64_t k = 0; k < count; ++k)
          feature_grads()[c * p.Tk + j + k] = by_key[k * inside.C + c];
    } else if (g.grad_features != nullptr) {
      dot_rows<A>(w_f, n, inside.C, grads, n, count, n, feature_grads() + j, p.Tk);
    }
    if (g.grad_w_f != nullptr) {
      const A* f = static_cast<const A*>(inside.features.data) + b * inside.features.batch_stride;
      weighted_sums<A>(f + j * inside.features.row_stride, inside.feature_step,
                       inside.features.row_stride, grads, n, count, n, j > 0, grad_w_f, n,
                       inside.C);
    }
    for (int64_t k = 0; g.grad_keys != nullptr && k < count; ++k) {
      if (g.adds_to_keys)
        add_row(grads + k * n, valid, grad_key(j + k));
      else
        store_row(grads + k * n, valid, grad_key(j + k));
    }
  }

  void zero_from(int64_t used) {
    for (int64_t j = used; g.grad_keys != nullptr && !g.adds_to_keys && j < p.Tk; ++j)
      for (int64_t h = 0; h < valid; ++h)
        narrow(A(0), static_cast<T*>(g.grad_keys) + (b * p.Tk + j) * p.H + h0 + h);
    for (int64_t c = 0; g.grad_features != nullptr && c < p.inside.C; ++c)
      for (int64_t j = used; j < p.Tk; ++j) feature_grads()[c * p.Tk + j] = A(0);
    for (int64_t h = 0; used == 0 && h < p.inside.C * n; ++h) grad_w_f[h] = A(0);
  }

  // Whether a query looks at one of keys [j, j + count).
  bool is_seen(int64_t j, int64_t count) const {
    const auto* row = static_cast<const uint8_t*>(p.mask.data);
    if (row == nullptr) return true;
    row += b * p.mask.batch_stride + j;
    for (int64_t i = 0; i < p.Tq; ++i, row += p.mask.row_stride)
      if (any(row, count)) return true;
    return false;
  }

  template <Activation act>
  void run() {
    const int64_t used = keys_used(p, b);
    for (int64_t j = 0; j < used; j += kKeys) {
      const int64_t count = used - j < kKeys ? used - j : kKeys;
      if (is_seen(j, count)) {
        make_inner_rows(p, b, key_rows.base, key_rows.stride, j, count, h0, n, w_f, n, rows);
        for (A* row = rows + count * n; row < grads; ++row) *row = A(0);
        for (int64_t i = 0; i < p.Tq; i += kSettle)
          group<act>(j, count, i, i + kSettle < p.Tq ? i + kSettle : p.Tq);
      } else {
        for (A* grad = grads; grad < grads + count * n; ++grad) *grad = A(0);
      }
      use_grads(j, count);
      if (totals != partial && ((j + kKeys) % kSettle == 0 || j + kKeys >= used))
        settle(partial, totals, (p.Tq + 1) * n);
      if (total_w_f != grad_w_f && ((j + kKeys) % kProducts == 0 || j + kKeys >= used))
        settle(grad_w_f, total_w_f, p.inside.C * n);
    }
    zero_from(used);
    for (int64_t i = 0; g.grad_queries != nullptr && i < p.Tq; ++i) {
      T* out = static_cast<T*>(g.grad_queries) + (b * p.Tq + i) * p.H + h0;
      for (int64_t h = 0; h < n; h += kLanes<A>)
        store_as<A>(out + h, Vec<A>(load(totals + i * n + h) * (load(w + h) * A(p.w_scale))),
                    valid - h);
    }
    for (int64_t c = 0; g.grad_w_f != nullptr && c < p.inside.C; ++c)
      std::memcpy(static_cast<A*>(g.grad_w_f) + (b * p.inside.C + c) * p.width + h0,
                  total_w_f + c * n, n * sizeof(A));
    for (int64_t h = 0; g.grad_w != nullptr && h < n; ++h)
      static_cast<A*>(g.grad_w)[b * p.width + h0 + h] = totals[p.Tq * n + h];
  }
};

template <class T, class A>
void grad_of_sums(const Problem& p, const Backward& g, int64_t b, int64_t h0, int64_t h1,
                  const void* scores, void* work) {
  GradOfSums<T, A> task(p, g, b, h0, h1, scores, work);
  with_activation(p.inside.activation,
                  [&](auto act) { task.template run<decltype(act)::value>(); });
}

}  // namespace
}  // namespace bahdanau_fast

// Backward, in three steps, each of which can be cut over threads without changing a sum:
//
//   grad_scores   keys [j0, j1) of a batch row: grad_weight = grad_context . value (+ what came
//                 through the returned weights), and grad_value = sum_i dropout(weight)
//                 grad_context
//   grad_softmax  grad_score = weight (grad_weight - sum_j weight grad_weight), masked rows zero
//   grad_tanh     hidden units [h0, h1): with s = grad_score, t = tanh, u = 1 - t^2
//                   grad_query[i] = w sum_j s u,  grad_key[j] = w sum_i s u,  grad_w = sum_ij s t
//
// Nothing of size Tq x Tk x H is kept: t and u come from the table again. Each needs a reciprocal
// of its own; four share one division (Montgomery): 1/x0 = x1 (x2 x3) / (x0 x1 x2 x3).
#pragma once

#include "forward.h"

namespace bahdanau_fast {
namespace {

template <class T>
const typename WeightOf<T>::type* weights_row(const Backward& g, int64_t offset) {
  return static_cast<const typename WeightOf<T>::type*>(g.weights) + offset;
}

// The weights as the context saw them: row i of the saved ones, dropped out again.
template <class T, class A>
void load_weights(const Problem& p, const Backward& g, int64_t row, int64_t j0, int64_t j1,
                  A* out) {
  const auto* from = weights_row<T>(g, row * p.Tk);
  for (int64_t j = j0; j < j1; ++j) out[j - j0] = A(widen(from[j]));
  if (p.dropout) drop_weights<A>(p.seed, p.dropout_p, row, j0, j1, out);
}

constexpr int64_t kTile = 8;  // keys, and queries, that stay in the first-level cache together

// grad_weight of a few keys: columns of a (Tq,Tk) matrix.
template <class T, class A>
void grad_weights_tile(const Problem& p, const Backward& g, int64_t b, int64_t first, int64_t keys,
                       A* out) {
  if (g.grad_context.data != nullptr) {
    const Rows<T, A> values(p.values, b), grads(g.grad_context, b);
    dot_rows<A>(grads[0], grads.stride, p.Tq, values[first], values.stride, keys, p.Dv, out, p.Tk);
  }
  for (int64_t i = 0; i < p.Tq; ++i) {
    A* row = out + i * p.Tk;
    if (g.grad_context.data == nullptr)
      for (int64_t j = 0; j < keys; ++j) row[j] = A(0);
    else if (p.dropout)
      drop_weights<A>(p.seed, p.dropout_p, b * p.Tq + i, first, first + keys, row);
    if (g.grad_weights.data != nullptr) {
      const auto* extra = Rows<typename WeightOf<T>::type, A>(g.grad_weights, b)[i] + first;
      for (int64_t j = 0; j < keys; ++j) row[j] += A(widen(extra[j]));
    }
  }
}

// grad_value of a few keys, some columns at a time; summed in place where the types allow.
template <class T, class A>
void grad_values_tile(const Problem& p, const Backward& g, int64_t b, int64_t first, int64_t keys) {
  constexpr bool in_place = std::is_same<T, A>::value;
  constexpr int64_t columns = 1024;
  A buffer[in_place ? 1 : kTile * columns], weights[kTile * kTile];
  T* out = static_cast<T*>(g.grad_values) + (b * p.Tk + first) * p.Dv;
  const Rows<T, A> grads(g.grad_context, b);
  const int64_t queries = g.grad_context.data != nullptr ? p.Tq : 0;
  for (int64_t c = 0; c < p.Dv; c += columns) {
    const int64_t width = c + columns <= p.Dv ? columns : p.Dv - c;
    A* sums = buffer;
    int64_t stride = columns;
    if constexpr (in_place) {
      sums = out + c;
      stride = p.Dv;
    }
    for (int64_t i = 0; i < queries; i += kTile) {
      const int64_t block = i + kTile <= queries ? kTile : queries - i;
      for (int64_t k = 0; k < block; ++k)
        load_weights<T, A>(p, g, b * p.Tq + i + k, first, first + keys, weights + k * kTile);
      for (int64_t j = 0; j < keys; ++j)
        weighted_sum<A>(weights + j, kTile, grads[i] + c, grads.stride, block, width, i > 0,
                        sums + j * stride);
    }
    for (int64_t j = 0; j < keys; ++j) {
      if (queries == 0)
        for (int64_t k = 0; k < width; ++k) sums[j * stride + k] = A(0);
      if constexpr (!in_place) store_row(sums + j * stride, width, out + j * p.Dv + c);
    }
  }
}

// scores: (Tq,Tk) of this batch row; columns [j0, j1) become grad_weight.
template <class T, class A>
void grad_scores(const Problem& p, const Backward& g, int64_t b, int64_t j0, int64_t j1,
                 void* scores_out) {
  A* scores = static_cast<A*>(scores_out);
  for (int64_t first = j0; first < j1; first += kTile) {
    const int64_t keys = first + kTile <= j1 ? kTile : j1 - first;
    grad_weights_tile<T>(p, g, b, first, keys, scores + first);
    if (g.grad_values != nullptr) grad_values_tile<T, A>(p, g, b, first, keys);
  }
}

// The saved weights were rounded: divided by their sum they add up to one again, so that a row of
// score gradients adds up to zero, on which grad_query and grad_w rely.
template <class T, class A>
void grad_softmax(const Problem& p, const Backward& g, int64_t b, void* scores_inout) {
  for (int64_t i = 0; i < p.Tq; ++i) {
    const int64_t row = b * p.Tq + i, kept = p.kept[row];
    A* scores = static_cast<A*>(scores_inout) + i * p.Tk;
    const auto* weights = weights_row<T>(g, row * p.Tk);
    double total = 0, dot = 0;
    for (int64_t block = 0; block < kept; block += 64) {  // in two levels, for long rows of fp64
      double block_total = 0, block_dot = 0;
      for (int64_t j = block; j < kept && j < block + 64; ++j) {
        block_total += double(widen(weights[j]));
        block_dot += double(widen(weights[j])) * double(scores[j]);
      }
      total += block_total;
      dot += block_dot;
    }
    const double mean = dot / total;
    for (int64_t j = 0; j < kept; ++j)
      scores[j] = A(double(widen(weights[j])) / total * (double(scores[j]) - mean));
    for (int64_t j = kept; j < p.Tk; ++j) scores[j] = A(0);
  }
}

// One query's slice of hidden units in the inner loops of grad_tanh; constants as in score.h.
template <class A>
struct Slice {
  const A *rise, *offset, *alpha, *base, *sign;  // on the direct path, rise is the query
  A *grad_query, *grad_w;                        // sum_j s u and sum_j s t over the last few keys
  A* far;                                        // the same two rows over all keys before
};

// far += near, near = 0. Sums in two levels: a long one-by-one sum would round too often.
template <class A>
void settle(A* near, A* far, int64_t n) {
  for (int64_t h = 0; h < n; h += kLanes<A>) {
    store(far + h, Vec<A>(load(far + h) + load(near + h)));
    store(near + h, Vec<A>{});
  }
}

// s u added to both sides and s t to the query's, for four neighbouring keys sharing one division.
template <class A, bool first>
BF_INLINE void tanh_gradient_shared(const Slice<A>& q, const A* s, const A* table, int64_t width,
                                    int64_t n, A* grad_keys) {
  for (int64_t h = 0; h < n; h += kLanes<A>) {
    const Vec<A> rise = load(q.rise + h), offset = load(q.offset + h);
    const Vec<A> alpha = load(q.alpha + h), base = load(q.base + h), sign = load(q.sign + h);
    const Vec<A> m0 = load(table + h), m1 = load(table + width + h);
    const Vec<A> m2 = load(table + 2 * width + h), m3 = load(table + 3 * width + h);
    const Vec<A> d0 = alpha * m0 + base, d1 = alpha * m1 + base;
    const Vec<A> d2 = alpha * m2 + base, d3 = alpha * m3 + base;
    const Vec<A> d01 = d0 * d1, d23 = d2 * d3;
    const Vec<A> inverse = reciprocal<A>(d01 * d23);
    const Vec<A> inverse01 = inverse * d23, inverse23 = inverse * d01;
    const Vec<A> t0 = (rise * m0 + offset) * (inverse01 * d1) + sign;
    const Vec<A> t1 = (rise * m1 + offset) * (inverse01 * d0) + sign;
    const Vec<A> t2 = (rise * m2 + offset) * (inverse23 * d3) + sign;
    const Vec<A> t3 = (rise * m3 + offset) * (inverse23 * d2) + sign;
    const Vec<A> g0 = s[0] * (1 - t0 * t0), g1 = s[1] * (1 - t1 * t1);
    const Vec<A> g2 = s[2] * (1 - t2 * t2), g3 = s[3] * (1 - t3 * t3);
    store(q.grad_query + h, Vec<A>(load(q.grad_query + h) + ((g0 + g1) + (g2 + g3))));
    store(q.grad_w + h,
          Vec<A>(load(q.grad_w + h) + (s[0] * t0 + s[1] * t1 + (s[2] * t2 + s[3] * t3))));
    const Vec<A> grads[4] = {g0, g1, g2, g3};
    for (int k = 0; k < 4; ++k) {
      A* to = grad_keys + k * n + h;
      store(to, first ? grads[k] : Vec<A>(load(to) + grads[k]));
    }
  }
}

// A slope below this is zero in 1 - tanh^2, even in fp64: so it is here.
template <class A>
BF_INLINE Vec<A> visible(Vec<A> slope) {
  return slope < A(2.2e-16) ? Vec<A>{} : slope;
}

// The same for one key, where a product of four denominators would not fit.
template <class A>
BF_INLINE void tanh_gradient_single(const Slice<A>& q, A s, const A* table, int64_t n,
                                    A* grad_key) {
  for (int64_t h = 0; h < n; h += kLanes<A>) {
    const Vec<A> m = load(table + h), d = load(q.alpha + h) * m + load(q.base + h);
    const Vec<A> t = (load(q.rise + h) * m + load(q.offset + h)) / d + load(q.sign + h);
    const Vec<A> g = s * (1 - t * t);
    store(q.grad_query + h, Vec<A>(load(q.grad_query + h) + g));
    store(q.grad_w + h, Vec<A>(load(q.grad_w + h) + s * t));
    store(grad_key + h, Vec<A>(load(grad_key + h) + g));
  }
}

// The same from the projections themselves.
template <class A, class T>
BF_INLINE void tanh_gradient_direct(const Slice<A>& q, A s, const T* key, int64_t valid, int64_t n,
                                    A* grad_key) {
  for (int64_t h = 0; h < n; h += kLanes<A>) {
    const Vec<A> c = load_row<A>(key, h, valid);
    const TanhAndSlope<A> f = tanh_and_slope<A>(load(q.rise + h) + c);
    const Vec<A> g = s * visible<A>(f.slope);
    store(q.grad_query + h, Vec<A>(load(q.grad_query + h) + g));
    store(q.grad_w + h, Vec<A>(load(q.grad_w + h) + s * f.tanh));
    store(grad_key + h, Vec<A>(load(grad_key + h) + g));
  }
}

// grad_tanh of one batch row and slice of hidden units.
template <class T, class A>
struct GradTanh {
  static constexpr int64_t kKeys = 4;     // that share one division
  static constexpr int64_t kSettle = 32;  // terms summed one by one, in each of two levels
  static constexpr int64_t kRows = 9;     // of a Slice

  const Problem& p;
  int64_t b, h0, n, valid, stride;
  A keys_max, shift;
  Rows<T, A> queries, keys;
  const A *scores, *table;
  A *slices, *keys_near, *keys_far, *padded;
  Path path;

  static int64_t workspace(const Problem& p, int64_t hidden) {
    return (p.Tq * kRows + 3 * kKeys + (p.table == nullptr ? p.Tk : 0)) * hidden;
  }

  GradTanh(const Problem& problem, int64_t row, int64_t begin, int64_t end, const void* scores_in,
           void* work)
      : p(problem), b(row), h0(begin), n(end - begin), queries(p.queries, b), keys(p.keys, b) {
    valid = (end < p.H ? end : p.H) - h0;
    keys_max = static_cast<const A*>(p.keys_max)[b];
    shift = table_shift(keys_max);
    scores = static_cast<const A*>(scores_in);
    slices = static_cast<A*>(work);
    keys_near = slices + p.Tq * kRows * n;
    keys_far = keys_near + kKeys * n;
    padded = keys_far + kKeys * n;
    path = choose_path(keys_max);
    set_table(padded + kKeys * n);
    for (int64_t i = 0; i < p.Tq; ++i) prepare(i);
  }

  // The slice of the table; made here when the call came without one.
  void set_table(A* own) {
    if (p.table != nullptr) {
      table = static_cast<const A*>(p.table) + b * p.Tk * p.width + h0;
      stride = p.width;
      return;
    }
    for (int64_t j = 0; path != Path::direct && j < p.Tk; ++j)
      fill_table(keys[j] + h0, valid, n, shift, own + j * n);
    table = own;
    stride = n;
  }

  Slice<A> slice(int64_t i) const {
    A* at = slices + i * kRows * n;
    return {at, at + n, at + 2 * n, at + 3 * n, at + 4 * n, at + 5 * n, at + 6 * n, at + 7 * n};
  }

  void prepare(int64_t i) {
    A* at = slices + i * kRows * n;
    const T* row = queries[i] + h0;
    for (int64_t h = 0; h < n; h += kLanes<A>) {
      const Vec<A> a = load_row<A>(row, h, valid);
      const Units<A> units(a, keys_max, shift);
      store(at + h, path == Path::direct ? a : units.rise);
      store(at + n + h, units.offset);
      store(at + 2 * n + h, units.alpha);
      store(at + 3 * n + h, units.base);
      store(at + 4 * n + h, units.sign);
      for (int64_t sums = 5; sums < kRows; ++sums) store(at + sums * n + h, Vec<A>{});
    }
  }

  // Table rows of `count` keys; fewer than kKeys are filled up (with c = 0, or some such).
  const A* entries(int64_t j, int64_t count, int64_t* row_stride) {
    const A* rows = table + j * stride;
    *row_stride = stride;
    if (count == kKeys) return rows;
    for (int64_t k = 0; k < kKeys; ++k)
      for (int64_t h = 0; h < n; ++h) padded[k * n + h] = k < count ? rows[k * stride + h] : A(1);
    *row_stride = n;
    return padded;
  }

  void one_query(int64_t i, int64_t j, int64_t count, const A* rows, int64_t row_stride) {
    A s[kKeys] = {};
    for (int64_t k = 0; k < count; ++k) s[k] = scores[i * p.Tk + j + k];
    const Slice<A> q = slice(i);
    if (path == Path::shared && i == 0)
      return tanh_gradient_shared<A, true>(q, s, rows, row_stride, n, keys_near);
    if (path == Path::shared)
      return tanh_gradient_shared<A, false>(q, s, rows, row_stride, n, keys_near);
    for (int64_t k = 0; k < count; ++k) {
      if (path == Path::direct)
        tanh_gradient_direct<A>(q, s[k], keys[j + k] + h0, valid, n, keys_near + k * n);
      else
        tanh_gradient_single<A>(q, s[k], rows + k * row_stride, n, keys_near + k * n);
    }
  }

  // grad_keys of up to kKeys keys, over all queries.
  const A* some_keys(int64_t j, int64_t count) {
    int64_t row_stride;
    const A* rows = entries(j, count, &row_stride);
    const bool two_levels = p.Tq > kSettle;
    for (int64_t h = 0; path != Path::shared && h < kKeys * n; ++h) keys_near[h] = A(0);
    for (int64_t h = 0; two_levels && h < kKeys * n; ++h) keys_far[h] = A(0);
    for (int64_t i = 0; i < p.Tq; ++i) {
      one_query(i, j, count, rows, row_stride);
      if (two_levels && (i + 1) % kSettle == 0) settle(keys_near, keys_far, kKeys * n);
    }
    if (!two_levels) return keys_near;
    settle(keys_near, keys_far, kKeys * n);
    return keys_far;
  }

  void run(const Backward& g) {
    int64_t look = 0;
    for (int64_t i = 0; i < p.Tq; ++i)
      look = p.kept[b * p.Tq + i] > look ? p.kept[b * p.Tq + i] : look;
    const A* w = static_cast<const A*>(p.w) + h0;
    T* out = static_cast<T*>(g.grad_keys);
    if (out != nullptr) out += b * p.Tk * p.H + h0;
    for (int64_t j = 0; j < look; j += kKeys) {
      const int64_t count = j + kKeys <= look ? kKeys : look - j;
      const A* sums = some_keys(j, count);
      for (int64_t k = 0; out != nullptr && k < count; ++k)
        store_scaled(sums + k * n, w, out + (j + k) * p.H);
      if ((j / kKeys + 1) % kSettle == 0) settle_queries();
    }
    for (int64_t j = look; out != nullptr && j < p.Tk; ++j)
      for (int64_t h = 0; h < valid; ++h) narrow(A(0), out + j * p.H + h);
    settle_queries();
    for (int64_t i = 0; g.grad_queries != nullptr && i < p.Tq; ++i)
      store_scaled(slice(i).far, w, static_cast<T*>(g.grad_queries) + (b * p.Tq + i) * p.H + h0);
    if (g.grad_w == nullptr) return;
    A* grad_w = static_cast<A*>(g.grad_w) + b * p.width + h0;
    for (int64_t i = 0; i < p.Tq; ++i)
      for (int64_t h = 0; h < n; ++h)
        grad_w[h] = i == 0 ? slice(i).far[n + h] : grad_w[h] + slice(i).far[n + h];
  }

  void settle_queries() {
    for (int64_t i = 0; i < p.Tq; ++i) settle(slice(i).grad_query, slice(i).far, 2 * n);
  }

  // Rows of sums become gradients: times w_v, in the storage type.
  void store_scaled(const A* row, const A* w, T* out) const {
    const A scale = A(p.w_scale);
    for (int64_t h = 0; h < valid; h += kLanes<A>)
      store_as<A>(out + h, Vec<A>(load(row + h) * (load(w + h) * scale)), valid - h);
  }
};

template <class T, class A>
void grad_tanh(const Problem& p, const Backward& g, int64_t b, int64_t h0, int64_t h1,
               const void* scores, void* work) {
  GradTanh<T, A>(p, b, h0, h1, scores, work).run(g);
}

}  // namespace
}  // namespace bahdanau_fast

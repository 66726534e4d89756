// The third step of backward (backward.h): gradients through the tanh, of queries, keys and w_v.
#pragma once

#include "forward.h"

namespace bahdanau_fast {
namespace {

// For one vector of hidden units of one query: the constants of score.h (factored, kBase is b and
// the others are not used; direct, kRise is the query itself), and sum_j s u over the keys of a
// tile.
enum UnitRow { kRise, kOffset, kAlpha, kBase, kSign, kPartial, kUnitRows };

constexpr int kGroup = 4;  // neighbouring keys that share one division

template <class A, Form form>
BF_INLINE void denominators(const A* unit, const Vec<A>* m, Vec<A>* d) {
  const Vec<A> base = load_once(unit + kBase * kLanes<A>);
  if constexpr (form == Form::factored) {
    for (int k = 0; k < kGroup; ++k) d[k] = m[k] + base;
  } else {
    const Vec<A> alpha = load_once(unit + kAlpha * kLanes<A>);
    for (int k = 0; k < kGroup; ++k) d[k] = alpha * m[k] + base;
  }
}

template <Form form>
constexpr bool shares_division = form == Form::factored || form == Form::scaled;

// The one division of a group.
template <class A, Form form>
BF_INLINE Vec<A> shared_inverse(const A* unit, const Vec<A>* m) {
  Vec<A> d[kGroup];
  denominators<A, form>(unit, m, d);
  return reciprocal<A>((d[0] * d[1]) * (d[2] * d[3]));
}

// tanh of one query and a group of keys; m are their table entries, `inverse` is from
// shared_inverse if the form shares a division.
template <class A, Form form>
BF_INLINE void tanh_of_group(const A* unit, const Vec<A>* m, Vec<A> inverse, Vec<A>* t) {
  constexpr int L = kLanes<A>;
  Vec<A> d[kGroup];
  denominators<A, form>(unit, m, d);
  const Vec<A> inverse01 = inverse * (d[2] * d[3]), inverse23 = inverse * (d[0] * d[1]);
  const Vec<A> inverses[kGroup] = {inverse01 * d[1], inverse01 * d[0], inverse23 * d[3],
                                   inverse23 * d[2]};
  if constexpr (form == Form::factored) {
    const Vec<A> b = load_once(unit + kBase * L);
    for (int k = 0; k < kGroup; ++k) t[k] = rounded_once<A>(m[k] - b, d[k], inverses[k]);
  } else {
    const Vec<A> rise = load_once(unit + kRise * L);
    const Vec<A> offset = load_once(unit + kOffset * L), sign = load_once(unit + kSign * L);
    for (int k = 0; k < kGroup; ++k) {
      const Vec<A> n = rise * m[k] + offset;
      t[k] = (form == Form::scaled_each ? n / d[k] : rounded_once<A>(n, d[k], inverses[k])) + sign;
    }
  }
}

// s t and s u of one query and a group of keys; in the direct form m are the keys themselves.
template <class T, class A, Form form>
BF_INLINE void tanh_gradients(const A* unit, const Vec<A>* m, Vec<A> inverse, const A* s,
                              Vec<A>* st, Vec<A>* su) {
  if constexpr (form == Form::direct) {
    const Vec<A> a = load_once(unit + kRise * kLanes<A>);
    for (int k = 0; k < kGroup; ++k) {
      const TanhAndSlope<A> f = tanh_and_slope<A>(a + m[k]);
      st[k] = s[k] * f.tanh;
      su[k] = s[k] * f.slope;
    }
  } else {
    Vec<A> t[kGroup];
    tanh_of_group<A, form>(unit, m, inverse, t);
    for (int k = 0; k < kGroup; ++k) {
      st[k] = s[k] * t[k];
      su[k] = s[k] * visible<T, A>(1 - t[k] * t[k]);  // s - st t would add a rounding
    }
  }
}

// grad_tanh of one batch row and slice of hidden units.
//
// Keys are taken in tiles. Within a tile the loops run over vectors of hidden units, groups of keys
// and queries, in this order, so that the entries and sums of a group stay in registers for all
// queries. With few queries a tile is one group, and its rows are read in order. Sums are taken in
// two levels, which rounds less often than one long sum.
template <class T, class A>
struct GradTanh {
  static constexpr int64_t kTileKeys = 64;    // at most; keys in a partial sum
  static constexpr int64_t kTileQueries = 8;  // with fewer queries a tile is one group
  static constexpr int64_t kSettle = 32;      // queries in a partial sum
  static constexpr int64_t kBlock = 512;      // and in a sum of these

  const Problem& p;
  int64_t b, h0, n, valid;
  A keys_max, shift;
  Rows<T, A> query_rows, key_rows;
  const A* scores;
  A *units, *partial_w, *totals, *total_w, *own_rows, *tile_scores;
  Form form;

  static int64_t workspace(const Problem& p, int64_t hidden) {
    return (p.Tq * (kUnitRows + 2) + 3 + kTileKeys) * hidden + kTileKeys * p.Tq;
  }

  GradTanh(const Problem& problem, int64_t row, int64_t begin, int64_t end, const void* scores_in,
           void* work)
      : p(problem),
        b(row),
        h0(begin),
        n(end - begin),
        query_rows(p.queries, b),
        key_rows(p.keys, b) {
    valid = (end < p.H ? end : p.H) - h0;
    keys_max = static_cast<const A*>(p.keys_max)[b];
    shift = table_shift(keys_max);
    form = choose_form(keys_max);
    const auto queries_max = [&] {
      return max_abs<A>(query_rows[0] + h0, query_rows.stride, p.Tq, valid);
    };
    if (form == Form::scaled && is_factored(queries_max(), keys_max)) form = Form::factored;
    scores = static_cast<const A*>(scores_in);
    units = static_cast<A*>(work);
    partial_w = units + p.Tq * kUnitRows * n;
    totals = partial_w + n;
    total_w = settles() ? totals + 2 * p.Tq * n : partial_w;
    own_rows = settles() ? total_w + 2 * n : totals;
    tile_scores = own_rows + kTileKeys * n;
    for (A* sum = partial_w; sum < own_rows; ++sum) *sum = A(0);
    for (int64_t i = 0; i < p.Tq; ++i) prepare(i);
  }

  A* unit(int64_t h, int64_t i) { return units + (h * p.Tq + i * kLanes<A>)*kUnitRows; }

  void prepare(int64_t i) {
    constexpr int L = kLanes<A>;
    const bool factored = form == Form::factored;
    each_units(query_rows[i] + h0, valid, n, keys_max, factored,
               [&](int64_t h, Vec<A> a, const Units<A>& of) {
                 const Vec<A> first = form == Form::direct ? a : of.rise;
                 const Vec<A> rows[kUnitRows] = {first, of.offset, of.alpha, of.base, of.sign, {}};
                 for (int r = 0; r < kUnitRows; ++r) store(unit(h, i) + r * L, rows[r]);
               });
  }

  // Table rows of a tile (in the direct form the keys themselves), padded to whole groups.
  const A* rows_of(int64_t j, int64_t count, int64_t* stride) {
    const bool stored = p.table != nullptr && form != Form::direct;
    const A* table = static_cast<const A*>(p.table) + (b * p.Tk + j) * p.width + h0;
    *stride = stored ? p.width : n;
    if (stored && count % kGroup == 0) return table;
    *stride = n;
    for (int64_t k = 0; k < count; ++k) {
      A* out = own_rows + k * n;
      if (stored)
        for (int64_t h = 0; h < n; ++h) out[h] = table[k * p.width + h];
      else if (form != Form::direct)
        fill_table(key_rows[j + k] + h0, valid, n, shift, out);
      else
        for (int64_t h = 0; h < n; ++h)
          out[h] = h < valid ? A(widen(key_rows[j + k][h0 + h])) : A(0);
    }
    const int64_t padded = (count + kGroup - 1) / kGroup * kGroup;
    for (int64_t k = count * n; k < padded * n; ++k) own_rows[k] = A(1);
    return own_rows;
  }

  // Gradients of the scores of a tile, in the order of use; zero past its last key.
  void gather_scores(int64_t j, int64_t count) {
    for (int64_t k = 0; k < count; k += kGroup)
      for (int64_t i = 0; i < p.Tq; ++i)
        for (int64_t l = 0; l < kGroup; ++l)
          tile_scores[k * p.Tq + i * kGroup + l] =
              k + l < count ? scores[i * p.Tk + j + k + l] : A(0);
  }

  // one: there is a single query. all: every gradient is wanted, not that of the queries alone.
  template <Form form, bool one, bool all>
  void tile(int64_t j, int64_t count, const A* w, T* grad_keys) {
    constexpr int L = kLanes<A>;
    int64_t stride;
    const A* rows = rows_of(j, count, &stride);
    gather_scores(j, count);
    const int64_t queries = one ? 1 : p.Tq;
    for (int64_t h = 0; h < n; h += L) {
      const Vec<A> scale = load(w + h) * A(p.w_scale);
      Vec<A> sum_w{};
      for (int64_t k = 0; k < count; k += kGroup) {
        Vec<A> m[kGroup], sums[kGroup] = {}, lost[kGroup] = {};
        for (int l = 0; l < kGroup; ++l) {
          m[l] = load_once(rows + (k + l) * stride + h);
          __builtin_prefetch(rows + (k + l) * stride + h + L);
        }
        for (int64_t first = 0; first < queries; first += kBlock) {
          const int64_t last = first + kBlock < queries ? first + kBlock : queries;
          Vec<A> of_block[kGroup] = {};
          for (int64_t i = first; i < last; i += kSettle)
            sum_w += queries_pass<form, all>(unit(h, i), tile_scores + k * queries + i * kGroup,
                                             i + kSettle < last ? kSettle : last - i, m, of_block);
          for (int l = 0; l < kGroup; ++l)
            if (first == 0)
              sums[l] = of_block[l];
            else
              add_exactly<A>(of_block[l], sums[l], lost[l]);
        }
        if constexpr (!all) continue;
        const auto put = [&](int l, Vec<A> sum) {
          if (grad_keys != nullptr && k + l < count)
            store_as<A>(grad_keys + (j + k + l) * p.H + h, Vec<A>(sum * scale), valid - h);
        };
        put(0, sums[0]), put(1, sums[1]), put(2, sums[2]), put(3, sums[3]);  // stays in registers
      }
      store(partial_w + h, Vec<A>(load(partial_w + h) + sum_w));
    }
  }

  // With the keys of one tile the partial sums are all there is.
  bool settles() const { return p.Tk > kTileKeys; }

  A* partial(int64_t h, int64_t i) { return unit(h, i) + kPartial * kLanes<A>; }
  A* total(int64_t h, int64_t i) {
    return settles() ? totals + 2 * (h * p.Tq + i * kLanes<A>) : partial(h, i);
  }

  void settle_all() {
    for (int64_t h = 0; h < n; h += kLanes<A>)
      for (int64_t i = 0; i < p.Tq; ++i) settle(partial(h, i), total(h, i), kLanes<A>);
    settle(partial_w, total_w, n);
  }

  // Adds the gradients of `count` queries to those of a group of keys; returns their sum s t.
  template <Form form, bool all>
  BF_INLINE static Vec<A> queries_pass(A* query, const A* s, int64_t count, const Vec<A>* m,
                                       Vec<A>* sums) {
    constexpr int L = kLanes<A>, step = kUnitRows * L;
    // The divisions have their own loop: with them, the dependency chain of an iteration would be
    // too long for the processor to overlap iterations.
    Vec<A> inverses[kSettle];
    for (int64_t i = 0; shares_division<form> && i < count; ++i)
      inverses[i] = shared_inverse<A, form>(query + i * step, m);
    Vec<A> partial[kGroup] = {}, sum_w{};
    for (int64_t i = 0; i < count; ++i, s += kGroup, query += step) {
      Vec<A> st[kGroup], su[kGroup];
      const Vec<A> inverse = shares_division<form> ? inverses[i] : Vec<A>{};
      tanh_gradients<T, A, form>(query, m, inverse, s, st, su);
      A* to = query + kPartial * L;
      store(to, Vec<A>(load(to) + ((su[0] + su[1]) + (su[2] + su[3]))));
      if constexpr (all) {
        sum_w += (st[0] + st[1]) + (st[2] + st[3]);
        for (int l = 0; l < kGroup; ++l) partial[l] += su[l];
      }
    }
    for (int l = 0; l < kGroup; ++l) sums[l] += partial[l];
    return sum_w;
  }

  template <bool all>
  void any_tile(int64_t j, int64_t count, const A* w, T* grad_keys) {
    if (form == Form::factored && p.Tq == 1)
      tile<Form::factored, true, all>(j, count, w, grad_keys);
    else if (form == Form::factored)
      tile<Form::factored, false, all>(j, count, w, grad_keys);
    else if (form == Form::scaled && p.Tq == 1)
      tile<Form::scaled, true, all>(j, count, w, grad_keys);
    else if (form == Form::scaled)
      tile<Form::scaled, false, all>(j, count, w, grad_keys);
    else if (form == Form::scaled_each)
      tile<Form::scaled_each, false, all>(j, count, w, grad_keys);
    else
      tile<Form::direct, false, all>(j, count, w, grad_keys);
  }

  void run(const Backward& g) {
    const int64_t used = keys_used(p, b);
    const A* w = static_cast<const A*>(p.w) + h0;
    T* grad_keys = static_cast<T*>(g.grad_keys);
    if (grad_keys != nullptr) grad_keys += b * p.Tk * p.H + h0;
    const int64_t size = p.Tq < kTileQueries ? kGroup : kTileKeys;
    for (int64_t j = 0; j < used; j += size) {
      const int64_t count = j + size <= used ? size : used - j;
      if (grad_keys == nullptr && g.grad_w == nullptr)
        any_tile<false>(j, count, w, grad_keys);
      else
        any_tile<true>(j, count, w, grad_keys);
      if (settles() && ((j + size) % kTileKeys == 0 || j + size >= used)) settle_all();
    }
    for (int64_t j = used; grad_keys != nullptr && j < p.Tk; ++j)
      for (int64_t h = 0; h < valid; ++h) narrow(A(0), grad_keys + j * p.H + h);
    for (int64_t i = 0; g.grad_queries != nullptr && i < p.Tq; ++i) {
      T* out = static_cast<T*>(g.grad_queries) + (b * p.Tq + i) * p.H + h0;
      for (int64_t h = 0; h < n; h += kLanes<A>)
        store_as<A>(out + h, Vec<A>(load(total(h, i)) * (load(w + h) * A(p.w_scale))), valid - h);
    }
    if (g.grad_w == nullptr) return;
    for (int64_t h = 0; h < n; ++h) static_cast<A*>(g.grad_w)[b * p.width + h0 + h] = total_w[h];
  }
};

template <class T, class A>
void grad_tanh(const Problem& p, const Backward& g, int64_t b, int64_t h0, int64_t h1,
               const void* scores, void* work) {
  GradTanh<T, A>(p, b, h0, h1, scores, work).run(g);
}

}  // namespace
}  // namespace bahdanau_fast

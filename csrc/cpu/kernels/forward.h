// Forward: scores, masked softmax and weighted sum of one task.
//
//   score[b,i,j] = w . tanh(query[b,i] + key[b,j]),  weights = softmax over j < key_counts[b,i],
//   and of those over the j with mask[b,i,j], if there is a mask
//   context[b,i] = sum_j dropout(weights)[b,i,j] value[b,j]
//
// A task is (batch row, block of queries, chunk of keys). It reads the table and the values of its
// keys once, width + Dv numbers for each key; the constants, scores and contexts of its queries are
// in its workspace. With several chunks, each computes sums relative to its own maximum, and
// combine() adds them up.
//
// With a mask the scores of the other keys become -inf, so that their weights are zero; tiles of
// keys that no query of the task may look at are neither scored nor read.
#pragma once

#include <cstring>
#include <limits>

#include "dropout.h"
#include "linear.h"
#include "sums/heads.h"

namespace bahdanau_fast {
namespace {

template <class T, class A>
struct Rows {
  const T* base;
  int64_t stride;
  Rows(const View& view, int64_t b)
      : base(static_cast<const T*>(view.data) + b * view.batch_stride), stride(view.row_stride) {}
  const T* operator[](int64_t row) const { return base + row * stride; }
};

constexpr int64_t kTableRows = 32;

// Whether any of n bytes is not zero.
inline bool any(const uint8_t* bytes, int64_t n) {
  uint64_t word = 0, all = 0;
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    std::memcpy(&word, bytes + j, 8);
    all |= word;
  }
  for (; j < n; ++j) all |= bytes[j];
  return all != 0;
}

template <class T, class A>
struct ForwardTask {
  const Problem& p;
  const ForwardPlan& plan;
  int64_t b, i0, queries, chunk, j0, j1;
  A *constants, *scores, *contexts, *own_table;

  static int64_t workspace(const Problem& p, const ForwardPlan& plan) {
    const int64_t own = p.table == nullptr ? kTableRows * p.width : 0;
    return plan.query_block * (Query<A>::size(p.width) + plan.chunk + p.Dv) + own;
  }

  ForwardTask(const Problem& problem, const ForwardPlan& cut, int64_t task, void* work)
      : p(problem), plan(cut) {
    chunk = task % plan.chunks;
    const int64_t block = task / plan.chunks;
    b = block / plan.query_blocks;
    i0 = block % plan.query_blocks * plan.query_block;
    queries = i0 + plan.query_block <= p.Tq ? plan.query_block : p.Tq - i0;
    j0 = chunk * plan.chunk;
    j1 = j0 + plan.chunk <= p.Tk ? j0 + plan.chunk : p.Tk;
    constants = static_cast<A*>(work);
    scores = constants + plan.query_block * Query<A>::size(p.width);
    contexts = scores + plan.query_block * plan.chunk;
    own_table = contexts + plan.query_block * p.Dv;
  }

  // How many keys of this chunk have a weight for query i.
  int64_t count(int64_t i) const {
    const int64_t keys = p.key_counts[b * p.Tq + i0 + i];
    const int64_t end = keys == 0 || keys > j1 ? j1 : keys;
    return end > j0 ? end - j0 : 0;
  }
  bool uniform(int64_t i) const { return p.key_counts[b * p.Tq + i0 + i] == 0; }
  A* score_row(int64_t i) { return scores + i * plan.chunk; }

  // Whether a mask decides which of its count(i) keys query i looks at.
  bool masked(int64_t i) const { return p.mask.data != nullptr && !uniform(i); }
  const uint8_t* mask_row(int64_t i) const {
    const int64_t row = b * p.mask.batch_stride + (i0 + i) * p.mask.row_stride;
    return static_cast<const uint8_t*>(p.mask.data) + row + j0;
  }
  bool sees(int64_t i, int64_t first, int64_t keys) const {
    return keys > 0 && (!masked(i) || any(mask_row(i) + first, keys));
  }
  // Whether one of `some` queries does. With one mask for all of them, all that are not uniform do
  // or none.
  bool any_sees(int64_t i, int64_t some, int64_t first, int64_t keys) const {
    for (int64_t k = 0; k < some; ++k) {
      const bool as_first = k > 0 && p.mask.row_stride == 0 && !uniform(i + k);
      if (!as_first && sees(i + k, first, keys)) return true;
    }
    return false;
  }

  void score() {
    if (p.pools) return p.gate.data != nullptr ? score_of_heads<true>() : score_of_heads<false>();
    if (p.from_sums)
      return with_activation(p.inside.activation,
                             [&](auto act) { score_of_sums<decltype(act)::value>(); });
    const Rows<T, A> query_rows(p.queries, b), key_rows(p.keys, b);
    const A keys_max = static_cast<const A*>(p.keys_max)[b];
    const Form form = choose_form(keys_max);
    const A* w = static_cast<const A*>(p.w);
    A constant[kQueryBlock] = {};
    Form forms[kQueryBlock] = {};
    // Few keys at a time: they stay in the first-level cache for all queries. If the table is made
    // here, a tile of it stays in the second-level cache.
    const bool whole = p.table != nullptr && p.mask.data == nullptr;
    const int64_t tile = queries > 1 ? 8 : whole ? j1 - j0 : kTableRows;
    for (int64_t first = 0; first < j1 - j0; first += tile) {
      const A* entries = nullptr;
      for (int64_t i = 0; i < queries; ++i) {
        Query<A> q(constants + i * Query<A>::size(p.width), p.width);
        const T* row = query_rows[i0 + i];
        if (first == 0) {
          const bool factored =
              form == Form::scaled && is_factored(max_abs<A>(row, 0, 1, p.H), keys_max);
          forms[i] = factored ? Form::factored : form;
          if (!uniform(i)) constant[i] = q.prepare(row, w, p.H, p.width, keys_max, factored);
        }
        const int64_t left = count(i) - first, keys = left < tile ? left : tile;
        if (!sees(i, first, keys)) continue;
        if (entries == nullptr) entries = table_rows(key_rows, first, tile, keys_max, form);
        A* out = score_row(i) + first;
        if (uniform(i)) {
          for (int64_t j = 0; j < keys; ++j) out[j] = A(0);
        } else if (forms[i] == Form::factored) {
          score_table<A, Form::factored>(q, constant[i], entries, p.width, keys, out);
        } else if (form == Form::scaled) {
          score_table<A, Form::scaled>(q, constant[i], entries, p.width, keys, out);
        } else if (form == Form::scaled_each) {
          score_table<A, Form::scaled_each>(q, constant[i], entries, p.width, keys, out);
        } else {
          score_direct<A>(row, key_rows[j0 + first], key_rows.stride, w, p.H, keys, out);
        }
      }
    }
  }

  // Queries to constants, in rows of `width`; how many keys any of them uses.
  int64_t widen_queries() {
    const Rows<T, A> query_rows(p.queries, b);
    int64_t used = 0;
    for (int64_t i = 0; i < queries; ++i) {
      used = count(i) > used ? count(i) : used;
      for (int64_t h = 0; h < p.width; h += kLanes<A>)
        store(constants + i * p.width + h, load_row<A>(query_rows[i0 + i], h, p.H));
    }
    return used;
  }

  // score() as sums/scores.h has it.
  template <Activation act>
  void score_of_sums() {
    const Rows<T, A> key_rows(p.keys, b);
    const A* w = static_cast<const A*>(p.w);
    const A negative = A(p.inside.negative_slope);
    const Inside& g = p.inside;
    const A* of_keys = static_cast<const A*>(g.features.data) + b * g.features.batch_stride;
    Features<A> features = {
        nullptr, static_cast<const A*>(g.w_f), g.features.row_stride, g.feature_step, p.width, g.C};
    const int64_t used = widen_queries();
    for (int64_t first = 0; first < used; first += kInnerRows) {
      const int64_t most = used - first < kInnerRows ? used - first : kInnerRows;
      if (!any_sees(0, queries, first, most)) continue;
      if (queries > 1)
        make_inner_rows(p, b, key_rows.base, key_rows.stride, j0 + first, most, 0, p.width,
                        features.w_f, p.width, own_table);
      features.f = of_keys + (j0 + first) * g.features.row_stride;
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t some = count(i) - first, keys = some < most ? some : most;
        if (!sees(i, first, keys)) continue;
        const A* query = constants + i * p.width;
        A* out = score_row(i) + first;
        if (uniform(i))
          for (int64_t k = 0; k < keys; ++k) out[k] = A(0);
        else if (queries > 1)
          inner_scores<A, act>(query, own_table, p.width, {}, w, p.width, negative, keys, out);
        else
          inner_scores<A, act>(query, key_rows[j0 + first], key_rows.stride, features, w, p.H,
                               negative, keys, out);
      }
    }
  }

  // score() as sums/heads.h has it.
  template <bool gated>
  void score_of_heads() {
    const Rows<T, A> inner(p.keys, b), gate(p.gate, b);
    const int64_t used = widen_queries();
    for (int64_t first = 0; first < used; first += kInnerRows) {
      const int64_t keys = used - first < kInnerRows ? used - first : kInnerRows;
      if (!any_sees(0, queries, first, keys)) continue;
      hidden_rows<A, gated>(inner, gate, j0 + first, keys, p.H, p.width, own_table);
      dot_rows<A>(constants, p.width, queries, own_table, p.width, keys, p.width, scores + first,
                  plan.chunk);
    }
    const A* bias = static_cast<const A*>(p.head_bias);
    for (int64_t i = 0; i < queries; ++i)
      for (int64_t j = 0; (bias != nullptr || uniform(i)) && j < count(i); ++j)
        score_row(i)[j] = uniform(i) ? A(0) : score_row(i)[j] + bias[i0 + i];
  }

  // Table rows of the keys from j0 + first on; computed here if the call came without a table.
  const A* table_rows(const Rows<T, A>& keys, int64_t first, int64_t tile, A keys_max, Form form) {
    if (p.table != nullptr)
      return static_cast<const A*>(p.table) + (b * p.Tk + j0 + first) * p.width;
    const A shift = table_shift(keys_max);
    const int64_t end = j0 + first + tile < j1 ? j0 + first + tile : j1;
    for (int64_t j = j0 + first; form != Form::direct && j < end; ++j)
      fill_table(keys[j], p.H, p.width, shift, own_table + (j - j0 - first) * p.width);
    return own_table;
  }

  // Multiplies the scores of query i by w_scale; returns the largest. It is finite where a mask
  // leaves none, or all are -inf, so that their weights are zero.
  A finish_scores(int64_t i) {
    A* row = score_row(i);
    const A scale = A(p.w_scale), infinity = std::numeric_limits<A>::infinity();
    const int64_t n = count(i);
    Vec<A> best = splat<A>(std::numeric_limits<A>::lowest());
    const uint8_t* seen = masked(i) ? mask_row(i) : nullptr;
    for (int64_t j = 0; seen != nullptr && j < n; ++j) row[j] = seen[j] ? row[j] : -infinity;
    for (int64_t j = 0; j < n; j += kLanes<A>) {
      const Vec<A> scores = load_as<A>(row + j, n - j) * scale;
      store_as<A>(row + j, scores, n - j);
      best = max<A>(first_lanes<A>(n - j) ? scores : best, best);
    }
    return largest<A>(best);
  }

  // Neighbouring queries with the same number of keys read the values together.
  void weigh_values() {
    const Rows<T, A> values(p.values, b);
    for (int64_t i = 0, same; i < queries; i += same) {
      const int64_t keys = count(i);
      for (same = 1; i + same < queries && count(i + same) == keys;) ++same;
      A* out = contexts + i * p.Dv;
      bool add = false;
      for (int64_t first = 0, end; next_run(i, same, keys, &first, &end); first = end) {
        weighted_sums<A>(score_row(i) + first, plan.chunk, 1, values[j0 + first], values.stride,
                         end - first, p.Dv, add, out, p.Dv, same);
        add = true;
      }
      for (int64_t k = 0; !add && k < same * p.Dv; ++k) out[k] = A(0);
    }
  }

  // The next keys from *first on, up to *end, that one of these queries may look at, in whole
  // tiles; false if there are none.
  bool next_run(int64_t i, int64_t same, int64_t keys, int64_t* first, int64_t* end) const {
    const auto seen = [&](int64_t j) {
      return any_sees(i, same, j, j + kTableRows < keys ? kTableRows : keys - j);
    };
    *end = keys;
    if (p.mask.data == nullptr) return *first < keys;
    while (*first < keys && !seen(*first)) *first += kTableRows;
    for (int64_t j = *first + kTableRows; j < keys; j += kTableRows)
      if (!seen(j)) {
        *end = j;
        break;
      }
    return *first < keys;
  }

  void drop(int64_t i) {
    if (p.dropout)
      drop_weights<A>(p.seed, p.dropout_p, b * p.Tq + i0 + i, j0, j0 + count(i), score_row(i));
  }
};

// sum += x. What rounding adds to a sum of many is in `lost`, and is taken from the next x (Kahan).
template <class A>
BF_INLINE void add_exactly(Vec<A> x, Vec<A>& sum, Vec<A>& lost) {
  const Vec<A> before = sum, rest = x - lost;
  sum += rest;
  const Vec<A> error = (sum - before) - rest;
  lost = error - error == Vec<A>{} ? error : Vec<A>{};  // an infinite sum stays infinite
}

constexpr int64_t kProducts = 512;  // keys in a partial sum of products (linear.h)

// totals += partial, partial = 0, of whole vectors. Behind the n totals is what they have lost.
template <class A>
void settle(A* partial, A* totals, int64_t n) {
  for (int64_t at = 0; at < n; at += kLanes<A>) {
    Vec<A> sum = load(totals + at), lost = load(totals + n + at);
    add_exactly<A>(load(partial + at), sum, lost);
    store(totals + at, sum), store(totals + n + at, lost), store(partial + at, Vec<A>{});
  }
}

// How many keys any query of a batch row uses.
inline int64_t keys_used(const Problem& p, int64_t b) {
  int64_t used = 0;
  for (int64_t i = 0; i < p.Tq; ++i)
    used = p.key_counts[b * p.Tq + i] > used ? p.key_counts[b * p.Tq + i] : used;
  return used;
}

template <class T, class A>
void store_row(const A* row, int64_t n, T* out) {
  for (int64_t k = 0; k < n; k += kLanes<A>) {
    if (k + kLanes<A> <= n)
      store_as<A>(out + k, load(row + k), kLanes<A>);
    else
      store_as<A>(out + k, load_as<A>(row + k, n - k), n - k);
  }
}

// out[k] += row[k] of whole vectors in row.
template <class T, class A>
void add_row(const A* row, int64_t n, T* out) {
  int64_t k = 0;
  for (; k + kLanes<A> <= n; k += kLanes<A>)
    store_as<A>(out + k, Vec<A>(load(row + k) + load_as<A>(out + k)), kLanes<A>);
  if (k < n) store_as<A>(out + k, Vec<A>(load(row + k) + load_as<A>(out + k, n - k)), n - k);
}

// row[j] = exp(row[j] - best); returns the sum. It is in fp64 but for kSome numbers at a time: in
// fp32 that of a hundred thousand keys would lose two digits.
template <class A>
A exponentiate(A* row, int64_t n, A best) {
  constexpr int64_t kSome = 256;
  double total = 0;
  for (int64_t first = 0; first < n; first += kSome) {
    const int64_t end = first + kSome < n ? first + kSome : n;
    Vec<A> some{};
    for (int64_t j = first; j < end; j += kLanes<A>) {
      const Vec<A> e = exp<A>(load_as<A>(row + j, n - j) - best);
      store_as<A>(row + j, e, n - j);
      some += first_lanes<A>(n - j) ? e : Vec<A>{};
    }
    total += sum<A>(some);
  }
  return A(total);
}

template <class A>
void divide(A* row, int64_t n, A total) {
  for (int64_t j = 0; j < n; j += kLanes<A>)
    store_as<A>(row + j, Vec<A>(load_as<A>(row + j, n - j) / total), n - j);
}

// One row of normalised weights, zero for masked keys.
template <class T, class A>
void store_weights(const A* weights, int64_t keys, int64_t Tk, void* all, int64_t row) {
  using W = typename WeightOf<T>::type;
  W* out = static_cast<W*>(all) + row * Tk;
  store_row(weights, keys, out);
  for (int64_t j = keys; j < Tk; ++j) narrow(A(0), out + j);
}

template <class T, class A>
void forward(const Problem& p, const ForwardPlan& plan, const ForwardOut& out, int64_t index,
             void* work) {
  ForwardTask<T, A> task(p, plan, index, work);
  task.score();
  for (int64_t i = 0; i < task.queries; ++i) {
    const int64_t row = task.b * p.Tq + task.i0 + i, n = task.count(i);
    A* weights = task.score_row(i);
    const A best = task.finish_scores(i);
    if (out.logits != nullptr) {
      using W = typename WeightOf<T>::type;
      store_row(weights, n, static_cast<W*>(out.logits) + row * p.Tk + task.j0);
      continue;
    }
    if (plan.chunks > 1) store_row(weights, n, static_cast<A*>(out.scores) + row * p.Tk + task.j0);
    const A total = exponentiate(weights, n, best);
    if (plan.chunks > 1) {
      static_cast<A*>(out.maxima)[row * plan.chunks + task.chunk] = best;
      static_cast<A*>(out.sums)[row * plan.chunks + task.chunk] = total;
    } else {
      divide(weights, n, total);
      if (out.weights != nullptr) store_weights<T>(weights, n, p.Tk, out.weights, row);
    }
    task.drop(i);
  }
  if (out.logits != nullptr) return;
  task.weigh_values();
  for (int64_t i = 0; i < task.queries; ++i) {
    const int64_t row = task.b * p.Tq + task.i0 + i, n = task.count(i);
    const A* context = task.contexts + i * p.Dv;
    if (plan.chunks == 1)
      store_row(context, p.Dv, static_cast<T*>(out.context) + row * p.Dv);
    else
      store_row(context, n > 0 ? p.Dv : 0,
                static_cast<A*>(out.contexts) + (row * plan.chunks + task.chunk) * p.Dv);
  }
}

// Combines the chunks of one (b, i) row, in their order.
template <class T, class A>
void combine(const Problem& p, const ForwardPlan& plan, const ForwardOut& out, int64_t row) {
  const A* maxima = static_cast<const A*>(out.maxima) + row * plan.chunks;
  const A* sums = static_cast<const A*>(out.sums) + row * plan.chunks;
  A* contexts = static_cast<A*>(out.contexts) + row * plan.chunks * p.Dv;
  const int64_t keys = p.key_counts[row] == 0 ? p.Tk : p.key_counts[row];
  const int64_t used = (keys + plan.chunk - 1) / plan.chunk;
  A best = maxima[0];
  for (int64_t c = 1; c < used; ++c) best = maxima[c] > best ? maxima[c] : best;
  const auto share = [&](int64_t c) { return exp<A>(splat<A>(maxima[c] - best))[0]; };
  A total = 0;
  for (int64_t c = 0; c < used; ++c) total += sums[c] * share(c);
  for (int64_t c = 0; c < used; ++c) {
    const A scale = share(c) / total;
    const A* part = contexts + c * p.Dv;
    for (int64_t k = 0; k < p.Dv; ++k)
      contexts[k] = c == 0 ? part[k] * scale : contexts[k] + part[k] * scale;
  }
  store_row(contexts, p.Dv, static_cast<T*>(out.context) + row * p.Dv);
  if (out.weights == nullptr) return;
  A* weights = static_cast<A*>(out.scores) + row * p.Tk;
  exponentiate(weights, keys, best);
  divide(weights, keys, total);
  store_weights<T>(weights, keys, p.Tk, out.weights, row);
}

}  // namespace
}  // namespace bahdanau_fast

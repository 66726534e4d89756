// A step of a recurrent decoder without its attention: products with weights that are the same at
// every step, and the cells.
//
// Weights are packed once per call into panels of as many columns as the registers hold. A panel is
// read in order, and stays in the second-level cache for all rows of a batch.
//
// The gates of a cell, four blocks of H:
//   GRU   n_input r z n_hidden   the input adds to the first three, the hidden state to the last
//   three LSTM  i f g o                both add to all four
#pragma once

#include "elementary.h"
#include "linear.h"

namespace bahdanau_fast {
namespace {

template <class A>
constexpr int64_t kPanel = kProductVectors * kLanes<A>;

template <class A>
int64_t panel_columns() {
  return kPanel<A>;
}

// Panel `index` of a matrix (K,N) whose entry (k,n) is at from[k * k_stride + n * n_stride].
template <class A>
void pack_panel(const void* from, int64_t k_stride, int64_t n_stride, int64_t K, int64_t N,
                int64_t index, void* out) {
  const A* matrix = static_cast<const A*>(from) + index * kPanel<A> * n_stride;
  A* panel = static_cast<A*>(out) + index * K * kPanel<A>;
  const int64_t left = N - index * kPanel<A>, columns = left < kPanel<A> ? left : kPanel<A>;
  for (int64_t k = 0; k < K; ++k)
    for (int64_t n = 0; n < columns; ++n)
      panel[k * kPanel<A> + n] = matrix[k * k_stride + n * n_stride];
}

// out (rows,N) += left (rows,K) times the matrix, in the columns of panel `index`.
template <class A>
void multiply_panel(const void* left, int64_t left_stride, int64_t rows, const void* packed,
                    int64_t K, int64_t N, int64_t index, void* out, int64_t out_stride) {
  const int64_t first = index * kPanel<A>;
  weighted_sums<A>(static_cast<const A*>(left), left_stride, 1,
                   static_cast<const A*>(packed) + first * K, kPanel<A>, K,
                   N - first < kPanel<A> ? N - first : kPanel<A>, true,
                   static_cast<A*>(out) + first, out_stride, rows);
}

template <class A>
BF_INLINE Vec<A> sigmoid(Vec<A> x) {
  return reciprocal<A>(1 + exp<A>(-x));
}

template <class A>
BF_INLINE Vec<A> tanh(Vec<A> x) {
  return tanh_and_slope<A>(x).tanh;
}

// f(u, n) for each vector of hidden units [u, u + n).
template <class A, class F>
BF_INLINE void each_vector(int64_t H, const F& f) {
  for (int64_t u = 0; u < H; u += kLanes<A>) f(u, H - u < kLanes<A> ? H - u : int64_t(kLanes<A>));
}

// One row of a cell: the nonlinearities of the gates, in place; hidden (and cell) are written.
template <class A>
void gru_row(const CellStep& s) {
  A* a = static_cast<A*>(s.gates);
  const A* before = static_cast<const A*>(s.hidden_before);
  const int64_t H = s.H;
  each_vector<A>(H, [&](int64_t u, int64_t n) {
    const Vec<A> r = sigmoid<A>(load_as<A>(a + H + u, n));
    const Vec<A> z = sigmoid<A>(load_as<A>(a + 2 * H + u, n));
    const Vec<A> fresh = tanh<A>(load_as<A>(a + u, n) + r * load_as<A>(a + 3 * H + u, n));
    const Vec<A> h = fresh + z * (load_as<A>(before + u, n) - fresh);
    store_as<A>(a + u, fresh, n);
    store_as<A>(a + H + u, r, n);
    store_as<A>(a + 2 * H + u, z, n);
    store_as<A>(static_cast<A*>(s.hidden) + u, h, n);
  });
}

template <class A>
void lstm_row(const CellStep& s) {
  A* a = static_cast<A*>(s.gates);
  const A* before = static_cast<const A*>(s.cell_before);
  const int64_t H = s.H;
  each_vector<A>(H, [&](int64_t u, int64_t n) {
    const Vec<A> in = sigmoid<A>(load_as<A>(a + u, n));
    const Vec<A> keep = sigmoid<A>(load_as<A>(a + H + u, n));
    const Vec<A> fresh = tanh<A>(load_as<A>(a + 2 * H + u, n));
    const Vec<A> out = sigmoid<A>(load_as<A>(a + 3 * H + u, n));
    const Vec<A> cell = keep * load_as<A>(before + u, n) + in * fresh;
    store_as<A>(a + u, in, n);
    store_as<A>(a + H + u, keep, n);
    store_as<A>(a + 2 * H + u, fresh, n);
    store_as<A>(a + 3 * H + u, out, n);
    store_as<A>(static_cast<A*>(s.cell) + u, cell, n);
    store_as<A>(static_cast<A*>(s.hidden) + u, Vec<A>(out * tanh<A>(cell)), n);
  });
}

// Backward of one row: the gradients of the gates, and that part of the gradients of the state
// before which does not pass through a product. It replaces the gradients of the state after in
// g.hidden and g.cell.
template <class A>
void gru_row_back(const CellStep& s, const CellGrads& g) {
  const A *a = static_cast<const A*>(s.gates), *before = static_cast<const A*>(s.hidden_before);
  A *grad = static_cast<A*>(g.hidden), *out = static_cast<A*>(g.gates);
  const int64_t H = s.H;
  each_vector<A>(H, [&](int64_t u, int64_t n) {
    const Vec<A> fresh = load_as<A>(a + u, n), r = load_as<A>(a + H + u, n);
    const Vec<A> z = load_as<A>(a + 2 * H + u, n), through = load_as<A>(a + 3 * H + u, n);
    const Vec<A> dh = load_as<A>(grad + u, n);
    const Vec<A> dn = dh * (1 - z) * (1 - fresh * fresh);
    store_as<A>(out + u, dn, n);
    store_as<A>(out + H + u, Vec<A>(dn * through * r * (1 - r)), n);
    store_as<A>(out + 2 * H + u, Vec<A>(dh * (load_as<A>(before + u, n) - fresh) * z * (1 - z)), n);
    store_as<A>(out + 3 * H + u, Vec<A>(dn * r), n);
    store_as<A>(grad + u, Vec<A>(dh * z), n);
  });
}

template <class A>
void lstm_row_back(const CellStep& s, const CellGrads& g) {
  const A *a = static_cast<const A*>(s.gates), *before = static_cast<const A*>(s.cell_before);
  const A* after = static_cast<const A*>(s.cell);
  A *grad = static_cast<A*>(g.hidden), *grad_cell = static_cast<A*>(g.cell);
  A* out = static_cast<A*>(g.gates);
  const int64_t H = s.H;
  each_vector<A>(H, [&](int64_t u, int64_t n) {
    const Vec<A> in = load_as<A>(a + u, n), keep = load_as<A>(a + H + u, n);
    const Vec<A> fresh = load_as<A>(a + 2 * H + u, n), shown = load_as<A>(a + 3 * H + u, n);
    const Vec<A> c = tanh<A>(load_as<A>(after + u, n)), dh = load_as<A>(grad + u, n);
    const Vec<A> dc = load_as<A>(grad_cell + u, n) + dh * shown * (1 - c * c);
    store_as<A>(out + u, Vec<A>(dc * fresh * in * (1 - in)), n);
    store_as<A>(out + H + u, Vec<A>(dc * load_as<A>(before + u, n) * keep * (1 - keep)), n);
    store_as<A>(out + 2 * H + u, Vec<A>(dc * in * (1 - fresh * fresh)), n);
    store_as<A>(out + 3 * H + u, Vec<A>(dh * c * shown * (1 - shown)), n);
    store_as<A>(grad_cell + u, Vec<A>(dc * keep), n);
    store_as<A>(grad + u, Vec<A>{}, n);
  });
}

}  // namespace
}  // namespace bahdanau_fast

// Small matrix products: of the weights and the values, of gradients, of a recurrent decoder.
#pragma once

#include "simd.h"

namespace bahdanau_fast {
namespace {

// out[c] = (add ? out[c] : 0) + sum_r p[r * p_stride] * rows[r][c].
//
// Eight rows at a time: their weights stay in registers, out is read and written once for eight
// rows, and the sum is taken in two levels.
template <class A, int R, bool add, class T>
BF_INLINE void weighted_rows(const A* p, int64_t p_stride, const T* rows, int64_t row_stride,
                             int64_t columns, A* out) {
  Vec<A> weight[R];
  for (int k = 0; k < R; ++k) weight[k] = splat<A>(p[k * p_stride]);
  int64_t c = 0;
  for (; c + kLanes<A> <= columns; c += kLanes<A>) {
    Vec<A> total = weight[0] * load_as<A>(rows + c);
    for (int k = 1; k < R; ++k) total += weight[k] * load_as<A>(rows + k * row_stride + c);
    store(out + c, add ? Vec<A>(load(out + c) + total) : total);
  }
  for (; c < columns; ++c) {
    A total = 0;
    for (int k = 0; k < R; ++k) total += weight[k][0] * A(widen(rows[k * row_stride + c]));
    out[c] = add ? out[c] + total : total;
  }
}

template <class A, class T>
void weighted_sum(const A* p, int64_t p_stride, const T* rows, int64_t row_stride, int64_t count,
                  int64_t columns, bool add, A* out) {
  constexpr int R = 8;
  for (int64_t r = 0; r < count;) {
    const A* weights = p + r * p_stride;
    const T* from = rows + r * row_stride;
    const bool whole = r + R <= count;
    if (whole && (add || r > 0))
      weighted_rows<A, R, true>(weights, p_stride, from, row_stride, columns, out);
    else if (whole)
      weighted_rows<A, R, false>(weights, p_stride, from, row_stride, columns, out);
    else if (add || r > 0)
      weighted_rows<A, 1, true>(weights, p_stride, from, row_stride, columns, out);
    else
      weighted_rows<A, 1, false>(weights, p_stride, from, row_stride, columns, out);
    r += whole ? R : 1;
  }
}

// Rows, and vectors of columns, of a product that the registers hold.
constexpr int kProductRows = 4;
constexpr int kProductVectors = kVectorBytes == 64 ? 4 : 2;

// out[r][c] = (add ? out[r][c] : 0) + sum_k p[r][k] rows[k][c] for kProductRows rows r, with
// p[r][k] at r * p_row + k * p_step. Summed in two levels, kTerms at a time.
template <class A, int vectors, class T>
BF_INLINE void product_tile(const A* p, int64_t p_row, int64_t p_step, const T* rows,
                            int64_t row_stride, int64_t count, bool add, A* out,
                            int64_t out_stride) {
  constexpr int64_t kTerms = 32;
  for (int64_t first = 0; first < count; first += kTerms) {
    const int64_t end = first + kTerms < count ? first + kTerms : count;
    Vec<A> total[kProductRows][vectors] = {};
    for (int64_t k = first; k < end; ++k) {
      Vec<A> x[vectors];
      for (int v = 0; v < vectors; ++v) x[v] = load_as<A>(rows + k * row_stride + v * kLanes<A>);
      for (int r = 0; r < kProductRows; ++r) {
        const Vec<A> weight = splat<A>(p[r * p_row + k * p_step]);
        for (int v = 0; v < vectors; ++v) total[r][v] += weight * x[v];
      }
    }
    for (int r = 0; r < kProductRows; ++r) {
      for (int v = 0; v < vectors; ++v) {
        A* to = out + r * out_stride + v * kLanes<A>;
        store(to, add || first > 0 ? Vec<A>(load(to) + total[r][v]) : total[r][v]);
      }
    }
  }
}

// The same for any number of rows r and columns; count >= 1 unless it adds.
template <class A, class T>
void weighted_sums(const A* p, int64_t p_row, int64_t p_step, const T* rows, int64_t row_stride,
                   int64_t count, int64_t columns, bool add, A* out, int64_t out_stride,
                   int64_t out_rows) {
  constexpr int64_t wide = kProductVectors * kLanes<A>;
  int64_t r = 0;
  for (; r + kProductRows <= out_rows; r += kProductRows) {
    const A* weights = p + r * p_row;
    A* to = out + r * out_stride;
    int64_t c = 0;
    for (; c + wide <= columns; c += wide)
      product_tile<A, kProductVectors>(weights, p_row, p_step, rows + c, row_stride, count, add,
                                       to + c, out_stride);
    for (; c + 2 * kLanes<A> <= columns; c += 2 * kLanes<A>)
      product_tile<A, 2>(weights, p_row, p_step, rows + c, row_stride, count, add, to + c,
                         out_stride);
    for (; c + kLanes<A> <= columns; c += kLanes<A>)
      product_tile<A, 1>(weights, p_row, p_step, rows + c, row_stride, count, add, to + c,
                         out_stride);
    for (int64_t i = 0; c < columns && i < kProductRows; ++i)
      weighted_sum(weights + i * p_row, p_step, rows + c, row_stride, count, columns - c, add,
                   to + i * out_stride + c);
  }
  for (; r < out_rows; ++r)
    weighted_sum(p + r * p_row, p_step, rows, row_stride, count, columns, add,
                 out + r * out_stride);
}

// out[i][j] = left[i] . right[j] for a tile of NI x NJ rows.
template <class A, int NI, int NJ, class T>
BF_INLINE void dot_tile(const T* left, int64_t left_stride, const T* right, int64_t right_stride,
                        int64_t columns, A* out, int64_t out_stride) {
  constexpr int L = kLanes<A>, V = kNeighbours;
  Vec<A> total[NI * NJ] = {};
  A dots[NI * NJ];
  const auto add = [&](int64_t c, auto vectors) BF_INLINED {
    constexpr int count = decltype(vectors)::value;
    Vec<A> x[NI][count], y[count];
    for (int i = 0; i < NI; ++i) load_neighbours<A, count>(left + i * left_stride + c, x[i]);
    for (int j = 0; j < NJ; ++j) {
      load_neighbours<A, count>(right + j * right_stride + c, y);
      for (int v = 0; v < count; ++v)
        for (int i = 0; i < NI; ++i) total[i * NJ + j] += x[i][v] * y[v];
    }
  };
  int64_t c = 0;
  for (; c + V * L <= columns; c += V * L) add(c, std::integral_constant<int, V>{});
  for (; c + L <= columns; c += L) add(c, std::integral_constant<int, 1>{});
  sums<A, NI * NJ>(total, dots);
  for (int i = 0; i < NI; ++i) {
    for (int j = 0; j < NJ; ++j) {
      A dot = dots[i * NJ + j];
      for (int64_t k = c; k < columns; ++k)
        dot += A(widen(left[i * left_stride + k])) * A(widen(right[j * right_stride + k]));
      out[i * out_stride + j] = dot;
    }
  }
}

template <class A, int NI, class T>
void dot_row_block(const T* left, int64_t left_stride, const T* right, int64_t right_stride,
                   int64_t right_count, int64_t columns, A* out, int64_t out_stride) {
  int64_t j = 0;
  for (; j + 4 <= right_count; j += 4)
    dot_tile<A, NI, 4>(left, left_stride, right + j * right_stride, right_stride, columns, out + j,
                       out_stride);
  for (; j < right_count; ++j)
    dot_tile<A, NI, 1>(left, left_stride, right + j * right_stride, right_stride, columns, out + j,
                       out_stride);
}

template <class A, class T>
void dot_rows(const T* left, int64_t left_stride, int64_t left_count, const T* right,
              int64_t right_stride, int64_t right_count, int64_t columns, A* out,
              int64_t out_stride) {
  int64_t i = 0;
  constexpr int kRows = kVectorBytes == 64 ? 4 : 2;
  for (; i + kRows <= left_count; i += kRows)
    dot_row_block<A, kRows>(left + i * left_stride, left_stride, right, right_stride, right_count,
                            columns, out + i * out_stride, out_stride);
  for (; i < left_count; ++i)
    dot_row_block<A, 1>(left + i * left_stride, left_stride, right, right_stride, right_count,
                        columns, out + i * out_stride, out_stride);
}

}  // namespace
}  // namespace bahdanau_fast

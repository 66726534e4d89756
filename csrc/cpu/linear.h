// The two small matrix products around the softmax.
#pragma once

#include "simd.h"

namespace bahdanau_fast {
namespace {

// out[c] = (add ? out[c] : 0) + sum_r p[r * p_stride] * rows[r][c]; count >= 1 rows.
//
// Eight rows at a time: their weights stay in registers, out is read and written once per eight,
// and the sum rounds in two levels instead of one by one.
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

// out[i][j] = left[i] . right[j] for a tile of NI x NJ rows.
template <class A, int NI, int NJ, class T>
BF_INLINE void dot_tile(const T* left, int64_t left_stride, const T* right, int64_t right_stride,
                        int64_t columns, A* out, int64_t out_stride) {
  Vec<A> total[NI][NJ] = {};
  int64_t c = 0;
  for (; c + kLanes<A> <= columns; c += kLanes<A>) {
    Vec<A> x[NI];
    for (int i = 0; i < NI; ++i) x[i] = load_as<A>(left + i * left_stride + c);
    for (int j = 0; j < NJ; ++j) {
      const Vec<A> y = load_as<A>(right + j * right_stride + c);
      for (int i = 0; i < NI; ++i) total[i][j] += x[i] * y;
    }
  }
  for (int i = 0; i < NI; ++i) {
    for (int j = 0; j < NJ; ++j) {
      A dot = sum<A>(total[i][j]);
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
  for (; i + 2 <= left_count; i += 2)
    dot_row_block<A, 2>(left + i * left_stride, left_stride, right, right_stride, right_count,
                        columns, out + i * out_stride, out_stride);
  if (i < left_count)
    dot_row_block<A, 1>(left + i * left_stride, left_stride, right, right_stride, right_count,
                        columns, out + i * out_stride, out_stride);
}

}  // namespace
}  // namespace bahdanau_fast

// The table of kernels of the instruction set this file is compiled for.
#pragma once

#include "cpu/kernels/backward.h"
#include "cpu/kernels/grad_tanh.h"
#include "cpu/kernels/hash.h"
#include "cpu/kernels/project.h"
#include "cpu/kernels/recurrent.h"
#include "cpu/kernels/sums/convolution.h"
#include "cpu/kernels/sums/gradients.h"
#include "cpu/kernels/sums/head_gradients.h"

namespace bahdanau_fast {
namespace {

template <class T, class A>
void keys_max(const View& keys, int64_t H, int64_t b, int64_t j0, int64_t j1, void* out) {
  const Rows<T, A> rows(keys, b);
  *static_cast<A*>(out) = max_abs<A>(rows[j0], rows.stride, j1 - j0, H);
}

template <class T, class A>
void exp_keys(const View& keys, int64_t H, int64_t width, int64_t b, int64_t Tk, int64_t j0,
              int64_t j1, const void* keys_max, void* table) {
  const Rows<T, A> rows(keys, b);
  const A shift = table_shift(static_cast<const A*>(keys_max)[b]);
  A* out = static_cast<A*>(table) + b * Tk * width;
  for (int64_t j = j0; j < j1; ++j) fill_table(rows[j], H, width, shift, out + j * width);
}

template <class T, class A>
void sum_rows(const void* parts, int64_t rows, int64_t width, int64_t H, void* out) {
  const A* from = static_cast<const A*>(parts);
  for (int64_t h = 0; h < H; h += kLanes<A>) {
    Vec<A> total{};
    for (int64_t r = 0; r < rows; ++r) total += load(from + r * width + h);
    store_as<A>(static_cast<T*>(out) + h, total, H - h);
  }
}

template <class T, class A>
constexpr Kernels kernels_of() {
  return {keys_max<T, A>,
          exp_keys<T, A>,
          ForwardTask<T, A>::workspace,
          forward<T, A>,
          combine<T, A>,
          grad_scores<T, A>,
          grad_softmax<T, A>,
          GradTanh<T, A>::workspace,
          grad_tanh<T, A>,
          GradOfSums<T, A>::workspace,
          grad_of_sums<T, A>,
          GradOfHeads<T, A>::workspace,
          grad_of_heads<T, A>,
          convolve_workspace<T, A>,
          convolve<T, A>,
          convolve_backward_workspace<T, A>,
          convolve_backward<T, A>,
          sum_rows<T, A>,
          project<T, A>,
          project_grad_rows<T, A>,
          project_grad_weight<T, A>,
          panel_columns<A>,
          pack_panel<A>,
          multiply_panel<A>,
          gru_row<A>,
          lstm_row<A>,
          gru_row_back<A>,
          lstm_row_back<A>,
          hash_blocks};
}

}  // namespace
}  // namespace bahdanau_fast

// In the order of Kind.
#define BF_DEFINE_KERNELS(name)                                                           \
  namespace bahdanau_fast {                                                               \
  const Kernels name[kKinds] = {kernels_of<float, float>(), kernels_of<double, double>(), \
                                kernels_of<bf16, float>(), kernels_of<f16, float>(),      \
                                kernels_of<float, double>()};                             \
  }

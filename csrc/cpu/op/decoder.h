// A recurrent decoder that attends at every step: what its forward, its backward and its greedy
// decoding share.
//
// Sizes: L layers, T steps, B rows, H hidden units of the cells, G = 3H (GRU) or 4H (LSTM) gates,
// F hidden units of the attention.
#pragma once

#include <cstring>
#include <type_traits>

#include "run.h"

namespace bahdanau_fast {

// Of no bytes at all, what lies nowhere too: memcpy and memset ask for an address even then.
inline void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
inline void clear(void* at, int64_t bytes) {
  if (bytes > 0) std::memset(at, 0, bytes);
}

// The costs that `parallel` is told, in elements of the attention: so many multiplications are one,
// and a hidden unit of a cell is so many. A step has half a dozen regions of threads, and each ends
// when its last thread has been given a core. Where other programs use the cores too, that can take
// a time slice: a small layer is done by one thread.
constexpr int64_t kMultiplications = 64, kUnit = 4;

// A weight, packed for products from the left: (K,N), or the transpose of the (N,K) given.
class Packed {
 public:
  Packed(const Kernels& kernels, int64_t bytes, const void* weight, int64_t row_stride,
         int64_t rows, int64_t columns, bool transposed)
      : k_(kernels),
        K_(transposed ? columns : rows),
        N_(transposed ? rows : columns),
        panels_((N_ + k_.panel_columns() - 1) / k_.panel_columns()),
        data_(panels_ * k_.panel_columns() * K_ * bytes) {
    parallel(
        panels_, K_ * k_.panel_columns(), [] { return 0; },
        [&](int64_t index, int) {
          k_.pack_panel(weight, transposed ? 1 : row_stride, transposed ? row_stride : 1, K_, N_,
                        index, data_.get());
        });
  }

  // out += left times the matrix.
  void add(const void* left, int64_t left_stride, int64_t rows, void* out,
           int64_t out_stride) const {
    parallel(
        panels_, rows * K_ * k_.panel_columns() / kMultiplications, [] { return 0; },
        [&](int64_t index, int) {
          k_.multiply_panel(left, left_stride, rows, data_.get(), K_, N_, index, out, out_stride);
        });
  }

 private:
  const Kernels& k_;
  int64_t K_, N_, panels_;
  Buffer data_;
};

struct Weights {
  const Tensor &query, &context, &input, &hidden, &bias;
};

// Everything of a call but its results.
struct Decoder {
  Decoder(int64_t steps, const Tensor& first_hidden, const MaybeTensor& first_cell,
          const Inputs& in, const Weights& w, const MaybeTensor& drop_masks)
      : k(kernels(storage_kind(first_hidden, "hidden"))) {
    STD_TORCH_CHECK(first_hidden.dim() == 3, "hidden must have 3 dimensions");
    T = steps, B = in.problem.B;
    L = first_hidden.size(0), H = first_hidden.size(2);
    F = in.problem.H, Dv = in.problem.Dv, Tk = in.problem.Tk;
    lstm = first_cell.has_value();
    G = (lstm ? 4 : 3) * H;
    type = first_hidden.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                    "hidden must be float32 or float64");
    STD_TORCH_CHECK(in.storage == type, "keys must have the dtype of hidden");
    weight_type = type;  // fp64 for fp64 and fp32 for fp32, as the states
    bytes = type == ScalarType::Double ? 8 : 4;
    hidden_from = 4 * H - G;
    STD_TORCH_CHECK(L > 0, "hidden must have a layer");
    check(w.query, {F, H}, "w_query"), check(w.context, {G, Dv}, "w_context");
    check(w.input, {L - 1, G, H}, "w_input"), check(w.hidden, {L, G, H}, "w_hidden");
    check(w.bias, {L, 4 * H}, "bias"), check(first_hidden, {L, B, H}, "hidden");
    if (lstm) check(*first_cell, {L, B, H}, "cell");
    if (drop_masks.has_value()) {
      check(*drop_masks, {L - 1, T, B, H}, "masks");
      masks = drop_masks->const_data_ptr();
    }
  }

  // Nobody to look, or nothing to look at.
  bool empty() const { return B == 0 || Tk == 0; }

  void check(const Tensor& t, std::vector<int64_t> shape, const char* name) const {
    bool fits = t.is_cpu() && t.is_contiguous() && t.scalar_type() == type &&
                t.dim() == static_cast<int64_t>(shape.size());
    for (size_t i = 0; fits && i < shape.size(); ++i) fits = t.size(i) == shape[i];
    STD_TORCH_CHECK(fits, name, " must be contiguous and have the size and dtype of the others");
  }

  // Element i of something in the storage type.
  template <class P>
  P at(P data, int64_t i) const {
    using Byte = typename std::conditional<std::is_const<std::remove_pointer_t<P>>::value,
                                           const char*, char*>::type;
    return static_cast<Byte>(data) + i * bytes;
  }

  // out[i] = a[i] (+ out[i]) (times mask[i]), for n numbers.
  template <class F>
  void each(int64_t n, const F& f) const {
    const auto run = [&](auto zero) {
      parallel((n + 4095) / 4096, 4096, [] { return 0; },
               [&](int64_t block, int) {
                 const int64_t end = block * 4096 + 4096 < n ? block * 4096 + 4096 : n;
                 f(zero, block * 4096, end);
               });
    };
    bytes == 8 ? run(double{}) : run(float{});
  }

  // The rows of one layer at one step, by the kernel of the cell.
  template <class Step>
  void rows(const Step& step) const {
    const int64_t some = 8;
    parallel((B + some - 1) / some, some * H * kUnit, [] { return 0; },
             [&](int64_t block, int) {
               const int64_t end = block * some + some < B ? block * some + some : B;
               for (int64_t b = block * some; b < end; ++b) step(b);
             });
  }

  Packed pack(const Tensor& weight, int64_t layer, int64_t columns, bool transposed) const {
    const int64_t rows = weight.size(weight.dim() - 2);
    return Packed(k, bytes, at(weight.const_data_ptr(), layer * rows * columns), columns, rows,
                  columns, transposed);
  }

  const Kernels& k;
  int64_t T, B, G, L, H, F, Dv, Tk, bytes, hidden_from;
  bool lstm;
  ScalarType type, weight_type;
  const void* masks = nullptr;

  // Blocks of the tensors that hold all steps.
  int64_t state_of(int64_t l, int64_t t) const { return (l * (T + 1) + t) * B * H; }
  int64_t gates_of(int64_t l, int64_t t) const { return (l * T + t) * B * 4 * H; }
  int64_t mask_of(int64_t l, int64_t t) const { return ((l - 1) * T + t) * B * H; }
};

// Stands for the queries of any step.
inline Tensor queries_of_step(const Tensor& keys) {
  STD_TORCH_CHECK(keys.dim() == 3, "keys must have 3 dimensions");
  return new_tensor({keys.size(0), 1, keys.size(2)}, keys.scalar_type());
}

// The first size of what has so many dimensions.
inline int64_t length(const Tensor& tensor, int64_t dimensions, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == dimensions, name, " must have ", dimensions, " dimensions");
  return tensor.size(0);
}

inline uint64_t seed_of_step(uint64_t seed, int64_t t) {
  return seed + static_cast<uint64_t>(t) * 0x9e3779b97f4a7c15u;
}

}  // namespace bahdanau_fast

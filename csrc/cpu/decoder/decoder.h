// What forward, backward and greedy decoding of a recurrent decoder with attention share.
//
// Sizes: L layers, T steps, B rows, H hidden units of the cells, G = 3H (GRU) or 4H (LSTM) gates,
// F hidden units of the attention.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/philox.h"
#include "cpu/op/run.h"

namespace bahdanau_fast {

// memcpy and memset require a valid pointer even for 0 bytes.
inline void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
inline void clear(void* at, int64_t bytes) {
  if (bytes > 0) std::memset(at, 0, bytes);
}

// Costs for parallel(), in elements of the attention: kMultiplications count as one element, a
// hidden unit of a cell as kUnit. A step has six parallel loops, and each waits for its slowest
// thread, which on a busy machine may first have to wait for a core: small layers therefore run on
// one thread.
constexpr int64_t kMultiplications = 64, kUnit = 4;

// A packed weight (K,N) to multiply rows (.,K) with; the transpose of the given (N,K) if
// `transposed`.
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

// Sizes and inputs of a call.
struct Decoder {
  Decoder(int64_t steps, const DecoderArguments& args, const Inputs& in)
      : k(kernels(storage_kind(args.hidden, "hidden"))) {
    STD_TORCH_CHECK(args.hidden.dim() == 3, "hidden must have 3 dimensions");
    T = steps, B = in.problem.B;
    L = args.hidden.size(0), H = args.hidden.size(2);
    F = in.problem.H, Dv = in.problem.Dv, Tk = in.problem.Tk;
    lstm = args.cell.has_value();
    G = (lstm ? 4 : 3) * H;
    type = args.hidden.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                    "hidden must be float32 or float64");
    STD_TORCH_CHECK(in.storage == type, "keys must have the dtype of hidden");
    weight_type = type;  // float32 or float64, like the states
    bytes = type == ScalarType::Double ? 8 : 4;
    hidden_from = 4 * H - G;
    STD_TORCH_CHECK(L > 0, "hidden must have a layer");
    check(args.w_query, {F, H}, "w_query"), check(args.w_context, {G, Dv}, "w_context");
    check(args.w_input, {L - 1, G, H}, "w_input"), check(args.w_hidden, {L, G, H}, "w_hidden");
    check(args.bias, {L, 4 * H}, "bias"), check(args.hidden, {L, B, H}, "hidden");
    if (lstm) check(*args.cell, {L, B, H}, "cell");
    if (args.masks.has_value()) {
      check(*args.masks, {L - 1, T, B, H}, "masks");
      masks = args.masks->const_data_ptr();
    }
  }

  // Empty batch or no keys.
  bool empty() const { return B == 0 || Tk == 0; }

  void check(const Tensor& t, std::vector<int64_t> shape, const char* name) const {
    bool fits = t.is_cpu() && t.is_contiguous() && t.scalar_type() == type &&
                t.dim() == static_cast<int64_t>(shape.size());
    for (size_t i = 0; fits && i < shape.size(); ++i) fits = t.size(i) == shape[i];
    STD_TORCH_CHECK(fits, name, " must be contiguous and have the size and dtype of the others");
  }

  // The address of element i.
  template <class P>
  P at(P data, int64_t i) const {
    using Byte = typename std::conditional<std::is_const<std::remove_pointer_t<P>>::value,
                                           const char*, char*>::type;
    return static_cast<Byte>(data) + i * bytes;
  }

  // f(zero, begin, end) for parts of [0, n); `zero` has the storage type.
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

  // step(b) for each row b of the batch, at the cost of a cell.
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

  // Where layer l and step t begin, in the tensors that hold all steps.
  int64_t state_of(int64_t l, int64_t t) const { return (l * (T + 1) + t) * B * H; }
  int64_t gates_of(int64_t l, int64_t t) const { return (l * T + t) * B * 4 * H; }
  int64_t mask_of(int64_t l, int64_t t) const { return ((l - 1) * T + t) * B * H; }
};

// Of a step, with a placeholder of the shape that its queries have.
inline Inputs inputs_of_step(const DecoderArguments& args) {
  const Tensor& keys = args.keys;
  STD_TORCH_CHECK(keys.dim() == 3, "keys must have 3 dimensions");
  const Tensor queries = new_tensor({keys.size(0), 1, keys.size(2)}, keys.scalar_type());
  return Inputs(queries, keys, args.attention(queries), Exponentials::tabled);
}

// size(0) of a tensor that must have so many dimensions.
inline int64_t length(const Tensor& tensor, int64_t dimensions, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == dimensions, name, " must have ", dimensions, " dimensions");
  return tensor.size(0);
}

}  // namespace bahdanau_fast

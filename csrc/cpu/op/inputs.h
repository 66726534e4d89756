// From tensors to the sizes and pointers that the kernels take.
#pragma once

#include <vector>

#include "common/limits.h"
#include "common/operators.h"
#include "cpu/isa/dispatch.h"
#include "parallel.h"

namespace bahdanau_fast {

int64_t size_of(Kind kind);  // bytes of the sum type
int64_t table_width(int64_t H, Kind kind);

// Raises unless the tensor is on the CPU; the error names the argument.
inline constexpr auto check_cpu = [](const auto& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.defined() && tensor.is_cpu(), name, " must be a tensor on the cpu");
};

// Contiguous rows (B,rows,columns) that an operator makes for itself: a tensor takes longer to make
// than a small problem to solve.
class OwnRows {
 public:
  OwnRows(int64_t B, int64_t rows, int64_t columns, ScalarType type, int64_t element_bytes)
      : sizes_{B, rows, columns}, type_(type), memory_(B * rows * columns * element_bytes) {}
  bool defined() const { return true; }
  bool is_cpu() const { return true; }
  int64_t dim() const { return 3; }
  int64_t size(int64_t i) const { return sizes_[i]; }
  ScalarType scalar_type() const { return type_; }
  void* data() const { return memory_.get(); }

 private:
  int64_t sizes_[3];
  ScalarType type_;
  Buffer memory_;
};

inline View view_of(const OwnRows& rows, std::vector<Tensor>&) {
  return {rows.data(), rows.size(1) * rows.size(2), rows.size(2)};
}

// The storage kind of a floating tensor on the CPU; an error that names the argument otherwise.
Kind storage_kind(const Tensor& tensor, const char* name);

// A new contiguous tensor on the CPU.
Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type);

// `count` elements of any real dtype, `stride` apart, to out[0], out[1], ...
void read(const Tensor& t, const char* name, int64_t offset, int64_t stride, int64_t count,
          double* out);

// All elements of a one-dimensional (or (1, n)) tensor of any real dtype.
std::vector<double> to_doubles(const Tensor& tensor, const char* name);

// All elements of a contiguous tensor, in the sum type.
Buffer in_sum_type(const Tensor& tensor, Kind kind, const char* name);

// max |c| and, unless null, the table of keys (B,Tk,H), into memory of the right size.
void fill_tables(Kind kind, const View& keys, int64_t B, int64_t Tk, int64_t H, void* keys_max,
                 void* table);

// The exponentials of the keys, where no table of them is given.
enum class Exponentials {
  as_read,  // the kernels make them as they read the keys
  tabled,   // made first, all of them
  unused    // tanh of the sums instead
};

// Of a forward. A single query would use each of them once; where there are several blocks of
// queries, each would make them again.
template <class Queries>
Exponentials exponentials_for(const Queries& queries) {
  const int64_t Tq = queries.dim() == 3 ? queries.size(1) : 1;
  return Tq == 1             ? Exponentials::unused
         : Tq <= kQueryBlock ? Exponentials::as_read
                             : Exponentials::tabled;
}

// Of pooling without a query, projected.
struct PoolingArguments {
  const Tensor &inner, &w_v, &values;  // (B,Tk,H), (heads,H), (B,Tk,Dv)
  const MaybeTensor &b_v, &gate;       // (heads), (B,Tk,H)
  const MaybeTensor &valid_lens, &mask, &seed;
  double dropout_p;
};

// A Problem, and all the memory it points to.
struct Inputs {
  // Projected queries and keys, each a Tensor or OwnRows, and what else `args` has. `precise`: a
  // gradient may be asked for, or as exact a result. `halves`: scores need not be those of sigmoid,
  // as only their differences count.
  template <class Queries, class Keys>
  Inputs(const Queries& queries, const Keys& keys, const AttentionArguments& args,
         Exponentials exponentials, bool precise = true, bool halves = false);

  explicit Inputs(const PoolingArguments& args);

  // How many keys the lengths leave, int32 of their shape; without a mask.
  Tensor counts(const Tensor& valid_lens) const;

  Problem problem;
  Kind kind;  // that computes
  ScalarType storage;

 private:
  void set_seen(const MaybeTensor& seed, const MaybeTensor& valid_lens, const MaybeTensor& mask);
  void set_w(const std::vector<double>& w, double largest);
  void set_key_counts(const Tensor& valid_lens);
  void set_mask(const Tensor& mask);
  void set_inside(const AttentionArguments& args);
  template <class A>
  void set_features(const Tensor& features, const Tensor& w_f);
  void halve();
  void set_table(const MaybeTensor& table, const MaybeTensor& keys_max, Exponentials exponentials);

  std::vector<Tensor> owned_;
  std::vector<Buffer> buffers_;
  std::vector<int64_t> key_counts_;
};

// Contiguous weights, or gradients of the scores.
const void* rows_like(const Tensor& tensor, ScalarType type, const char* name, const Problem& p,
                      std::vector<Tensor>& owned);

// The inputs of a backward; its results are still to be set.
Backward received(const Inputs& in, const Tensor& weights, const MaybeTensor& grad_context,
                  const MaybeTensor& grad_weights, std::vector<Tensor>& owned);

// For the gradient of a tensor; of no elements if it is not wanted.
Tensor gradient(const Tensor& tensor, bool wanted);

}  // namespace bahdanau_fast

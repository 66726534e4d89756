// From tensors to the sizes and pointers that the kernels take.
#pragma once

#include <vector>

#include "common/limits.h"
#include "common/tensors.h"
#include "cpu/isa/dispatch.h"
#include "parallel.h"

namespace bahdanau_fast {

int64_t size_of(Kind kind);  // bytes of the sum type
int64_t table_width(int64_t H, Kind kind);

// Raises unless the tensor is on the CPU; the error names the argument.
void check_cpu(const Tensor& tensor, const char* name);

// The storage kind of a floating tensor on the CPU; an error that names the argument otherwise.
Kind storage_kind(const Tensor& tensor, const char* name);

// A new contiguous tensor on the CPU.
Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type);

// All elements of a one-dimensional (or (1, n)) tensor of any real dtype.
std::vector<double> to_doubles(const Tensor& tensor, const char* name);

// max |c| and, unless null, the table of keys (B,Tk,H), into memory of the right size.
void fill_tables(Kind kind, const View& keys, int64_t B, int64_t Tk, int64_t H, void* keys_max,
                 void* table);

// A Problem, and all the memory it points to. A mask, bool (B,1,Tk) or (B,Tq,Tk), may take the
// place of valid_lens.
struct Inputs {
  Inputs(const Tensor& queries, const Tensor& keys, const MaybeTensor& table,
         const MaybeTensor& keys_max, const Tensor& values, const Tensor& w_v,
         const MaybeTensor& valid_lens, const MaybeTensor& seed, double dropout_p, bool make_table);

  Problem problem;
  Kind kind;  // that computes
  ScalarType storage;

 private:
  void set_w(const std::vector<double>& w, double largest);
  void set_key_counts(const MaybeTensor& valid_lens);
  void set_mask(const Tensor& mask);
  void set_table(const MaybeTensor& table, const MaybeTensor& keys_max, bool make_table);

  std::vector<Tensor> owned_;
  std::vector<Buffer> buffers_;
  std::vector<int64_t> key_counts_;
};

}  // namespace bahdanau_fast

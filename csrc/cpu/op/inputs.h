// From tensors to the plain sizes and pointers the kernels take.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <vector>

#include "common/dtypes.h"
#include "cpu/isa/dispatch.h"

namespace bahdanau_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Keys of at most so many elements get their table in fp64: sums of gradients cancel more than
// those of scores, hence fewer where no gradient will be asked for. A table in fp32 decides for
// fp32.
constexpr int64_t kSmallTable = 196608, kSmallForward = 16384;
// In fp64 too are those whose w_v is longer than this: scores in the hundreds, where fp32 would
// round to parts of a softmax exponent that show.
constexpr double kLongW = 64.0;

// Uninitialised memory on a cache line, for sums and workspaces.
class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : data_(
            ::operator new(static_cast<size_t>(bytes > 0 ? bytes : 1), kAlignment, std::nothrow)) {
    STD_TORCH_CHECK(data_ != nullptr, "not enough memory for a workspace of ", bytes, " bytes");
  }
  void* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<void, Free> data_;
};

// What ThreadSanitizer cannot see, libgomp being built without it: parallel_for begins after what
// its caller did before, and ends before what its caller does next.
#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
inline void before_others(void* region) { __tsan_release(region); }
inline void after_others(void* region) { __tsan_acquire(region); }
#else
inline void before_others(void*) {}
inline void after_others(void*) {}
#endif

// Runs f(i) for i in [0, n), on all threads when a task is worth it. `make` gives each thread
// what it works in. Tasks write disjoint results, so the cut over threads changes nothing.
template <class Make, class F>
void parallel(int64_t n, int64_t cost, const Make& make, const F& f) {
  if (n <= 0) return;
  constexpr int64_t kWorthAThread = 8192;  // elements: some microseconds
  const int64_t grain = cost >= kWorthAThread ? 1 : kWorthAThread / (cost > 0 ? cost : 1) + 1;
  if (n <= grain) {
    auto own = make();
    for (int64_t i = 0; i < n; ++i) f(i, own);
    return;
  }
  // An exception may not cross torch's C interface, which would lose its words.
  std::exception_ptr failure;
  std::mutex failing;
  char begun, ended;
  before_others(&begun);
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    after_others(&begun);
    try {
      auto own = make();
      for (int64_t i = begin; i < end; ++i) f(i, own);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failing);
      failure = std::current_exception();
    }
    before_others(&ended);
  });
  after_others(&ended);
  if (failure) std::rethrow_exception(failure);
}

int64_t size_of(Kind kind);  // bytes of the sum type
int64_t table_width(int64_t H, Kind kind);

// A new contiguous tensor on the CPU, by the shortest way: the boxed aten::empty takes longer than
// a small problem.
Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type);

// The tensor itself, or a contiguous copy.
Tensor packed(const Tensor& tensor);

// Everything a Problem points to, kept alive for the time of a call.
struct Inputs {
  Inputs(const Tensor& queries, const Tensor& keys, const MaybeTensor& table,
         const MaybeTensor& keys_max, const Tensor& values, const Tensor& w_v,
         const MaybeTensor& valid_lens, const MaybeTensor& seed, double dropout_p, bool make_table);

  Problem problem;
  Kind kind;
  ScalarType storage;

 private:
  void set_w(const std::vector<double>& w, double largest);
  void set_kept(const MaybeTensor& valid_lens);
  void set_table(const MaybeTensor& table, const MaybeTensor& keys_max, bool make_table);

  std::vector<Tensor> owned_;
  std::vector<Buffer> buffers_;
  std::vector<int64_t> kept_;
};

// The storage kind of a floating tensor on the CPU; an error that names the argument otherwise.
Kind storage_kind(const Tensor& tensor, const char* name);

// The dtype attention weights are kept in.
ScalarType weights_dtype(Kind storage);

// The kind that computes: fp64 for small fp32 problems.
Kind computing_kind(Kind storage, int64_t elements, int64_t small = kSmall);

// All elements of a one-dimensional (or (1, n)) tensor of any real dtype.
std::vector<double> to_doubles(const Tensor& tensor, const char* name);

// Rows of a (B, rows, columns) tensor; copied first where columns do not lie together.
View view_of(const Tensor& tensor, std::vector<Tensor>& owned);

// Table (null: none) and max |c| of keys (B,Tk,H), into memory of the right size.
void fill_tables(Kind kind, const View& keys, int64_t B, int64_t Tk, int64_t H, void* keys_max,
                 void* table);

}  // namespace bahdanau_fast

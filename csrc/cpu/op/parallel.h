// Loops over threads, and the memory they work in.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

namespace bahdanau_fast {

// Uninitialised memory, aligned to a cache line; nullptr for no bytes. It comes from malloc, which
// keeps small blocks at hand: an aligned allocation searches for one each time.
class Buffer {
 public:
  static constexpr uintptr_t kAlignment = 64;

  explicit Buffer(int64_t bytes)
      : data_(bytes > 0 ? std::malloc(static_cast<size_t>(bytes) + kAlignment) : nullptr) {
    STD_TORCH_CHECK(bytes <= 0 || data_ != nullptr, "not enough memory for a workspace of ", bytes,
                    " bytes");
  }
  void* get() const {
    const auto address = reinterpret_cast<uintptr_t>(data_.get());
    return reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
};

// libgomp is built without ThreadSanitizer, which therefore has to be told that a parallel_for
// begins after what its caller did before it and ends before what its caller does next.
#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
inline void before_others(void* region) { __tsan_release(region); }
inline void after_others(void* region) { __tsan_acquire(region); }
#else
inline void before_others(void*) {}
inline void after_others(void*) {}
#endif

// Runs f(i, own) for i in [0, n), on several threads if there is enough work: `cost` is that of one
// i in elements (query, key, hidden). `own` is made by make(), once for each thread. The f(i) must
// write disjoint memory; the results are then the same for any number of threads, and whichever
// takes an i. Each thread begins with a part of its own, whose memory its caches may have from the
// call before; one that is through with it helps with the others'.
template <class Make, class F>
void parallel(int64_t n, int64_t cost, const Make& make, const F& f) {
  if (n <= 0) return;
  constexpr int64_t kWorthAThread = 8192;  // elements: a few microseconds
  const int64_t grain = cost >= kWorthAThread ? 1 : kWorthAThread / (cost > 0 ? cost : 1) + 1;
  if (n <= grain) {
    auto own = make();
    for (int64_t i = 0; i < n; ++i) f(i, own);
    return;
  }
  struct alignas(Buffer::kAlignment) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t count = std::min<int64_t>(torch::stable::get_num_threads(), (n - 1) / grain + 1);
  const Buffer memory(count * sizeof(Part));
  Part* const parts = static_cast<Part*>(memory.get());
  for (int64_t k = 0; k < count; ++k) new (parts + k) Part{{n * k / count}, n * (k + 1) / count};
  // torch's C interface would lose the message of an exception: it is carried past it.
  std::exception_ptr failure;
  std::mutex failing;
  char begun, ended;
  before_others(&begun);
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t) {
    after_others(&begun);
    try {
      auto own = make();
      for (int64_t k = first; k < first + count; ++k) {
        Part& part = parts[k % count];
        for (int64_t i; (i = part.next.fetch_add(grain, std::memory_order_relaxed)) < part.end;)
          for (int64_t j = i; j < std::min(i + grain, part.end); ++j) f(j, own);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failing);
      failure = std::current_exception();
    }
    before_others(&ended);
  });
  after_others(&ended);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace bahdanau_fast

// What the mock GPUs are like, and what was asked of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"

namespace bahdanau_fast::mock {

struct Gpu {
  int multiprocessors = 132;
  int largest_cluster = 8;            // blocks that fit; 0: no cluster, not even of one block
  int ptx_version = 90;               // of the code that runs here
  int most_shared = 227 * 1024;       // bytes of shared memory that a block can have
  cudaError_t loads = cudaSuccess;    // what loading that code gives
  std::map<const void*, int> shared;  // most dynamic shared memory, by kernel

  // What a kernel may have.
  int allowed(const void* kernel) const {
    const auto found = shared.find(kernel);
    return found == shared.end() ? 48 * 1024 : found->second;
  }
  // How many of its blocks a multiprocessor has room for, by their threads and shared memory, of
  // which each takes 1 KB more.
  int resident(const void* kernel, int threads, size_t bytes) const {
    if (bytes > size_t(allowed(kernel))) return 0;
    return std::min(2048 / threads, (most_shared + 1024) / (int(bytes) + 1024));
  }
};

// All of it may be read and changed by any thread that holds `lock`.
struct Gpus {
  std::mutex lock;
  std::map<int, Gpu> gpu;
  int of_tensors = 0;                          // the device of all tensors
  bool noted = true;                           // calls are, and launches do anything at all
  std::vector<std::string> calls;              // JSON
  std::map<std::string, cudaError_t> failing;  // functions, and what their next call gives
  std::map<std::string, void (*)()> after;     // functions, and what their next call runs last
  std::map<cudaStream_t, int> green;           // streams of green contexts, their multiprocessors
  std::map<cudaStream_t, bool> blocking;       // streams, and whether the legacy one waits for them
  // Streams whose work goes into graphs, until that is ended, and whether it can: nothing was
  // asked that a capture cannot have.
  std::map<cudaStream_t, bool> captures;

  static Gpus& get() {
    static auto* const all = new Gpus;
    return *all;
  }
};

// What runs launches, and is told of memory. Neither: nothing runs.
enum Memory { kOfTensor, kFilled };  // new; something is written
struct Runs {
  void (*launch)(const char* kernel, int64_t blocks, int64_t threads, int64_t cluster,
                 int64_t shared, int64_t cooperative, const void* parameters,
                 int64_t bytes) = nullptr;
  void (*memory)(void* at, int64_t bytes, int which) = nullptr;

  static Runs& get() {
    static Runs runs;
    return runs;
  }
  void tell(void* at, int64_t bytes, Memory which) const {
    if (memory != nullptr && bytes > 0) memory(at, bytes, which);
  }
};

// Of the calling thread, as CUDA and torch have them.
inline int& current_device() {
  static thread_local int device = 0;
  return device;
}
inline cudaStream_t& current_stream() {
  static thread_local cudaStream_t stream = nullptr;
  return stream;
}
inline cudaError_t& last_error() {
  static thread_local cudaError_t error = cudaSuccess;
  return error;
}

}  // namespace bahdanau_fast::mock

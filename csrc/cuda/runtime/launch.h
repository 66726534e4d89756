// Launches through the CUDA runtime. Host code without torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace bahdanau_fast::gpu {

// Bytes of shared memory that a block can have without asking, and, asked for, from sm_80 on; a GPU
// may have more.
constexpr int64_t kUsualShared = 48 * 1024, kSharedLimit = 96 * 1024;

// A launch of a kernel with one argument, its parameters by value. The grid is one-dimensional. The
// blocks of a cluster are neighbours, run at the same time and can access all its shared memory.
struct Launch {
  const char* name;
  int64_t blocks;
  int threads;
  int64_t shared;  // bytes, at most those of most_shared
  void* stream;
  int cluster = 1;
  // All blocks are resident at once, or the launch fails.
  bool cooperative = false;
  int64_t most_shared = kSharedLimit;
};

inline void check_cuda(cudaError_t error, const char* name) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
}

// What make() gave when the key was first asked for. It runs without the lock, perhaps in several
// threads at once: it may wait for another lock, such as an interpreter's.
template <class Key, class Make>
auto cached(const Key& key, const Make& make) {
  static auto* const results = new std::map<Key, decltype(make())>;
  static auto* const lock = new std::mutex;
  {
    const std::lock_guard<std::mutex> guard(*lock);
    const auto at = results->find(key);
    if (at != results->end()) return at->second;
  }
  const auto result = make();
  const std::lock_guard<std::mutex> guard(*lock);
  return results->emplace(key, result).first->second;
}

// Lets every launch of a kernel on the current GPU have up to `most` bytes of shared memory.
// That is a property of the kernel there, not of a launch: asking for what one launch needs would
// take from another thread's, and from graphs. So it is set once, and always to the same.
template <class P>
void allow_shared_memory(void (*kernel)(P), const char* name, int64_t most = kSharedLimit) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), name);
  cached(std::pair(device, kernel), [&] {
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    check_cuda(cudaFuncSetAttribute(kernel, attribute, static_cast<int>(most)), name);
    return true;
  });
}

// A launch as the runtime takes it.
struct LaunchConfig : cudaLaunchConfig_t {
  explicit LaunchConfig(const Launch& at) : cudaLaunchConfig_t{} {
    if (at.cooperative) {
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    } else {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = static_cast<unsigned>(at.cluster);
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    gridDim = dim3(static_cast<unsigned>(at.blocks));
    blockDim = dim3(static_cast<unsigned>(at.threads));
    dynamicSmemBytes = static_cast<size_t>(at.shared);
    stream = static_cast<cudaStream_t>(at.stream);
    attrs = &attribute;
    numAttrs = at.cooperative || at.cluster > 1 ? 1 : 0;
  }
  LaunchConfig(const LaunchConfig&) = delete;

 private:
  cudaLaunchAttribute attribute{};
};

template <class P>
void launch(void (*kernel)(P), const Launch& at, const P& p) {
  if (at.blocks <= 0) return;
  if (at.blocks > 2147483647)
    throw std::runtime_error(std::string(at.name) + ": more blocks than a grid holds (" +
                             std::to_string(at.blocks) + ")");
  if (at.shared > kUsualShared) allow_shared_memory(kernel, at.name, at.most_shared);
  const LaunchConfig config(at);
  check_cuda(cudaLaunchKernelEx(&config, kernel, p), at.name);
}

// What keeps a kernel from running on the current GPU; null if nothing does.
template <class P>
const char* why_not(void (*kernel)(P)) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) return nullptr;
  (void)cudaGetLastError();
  return cudaGetErrorString(error);
}

// How many blocks, at most 8, the current GPU has room for in a cluster of a kernel, with all the
// shared memory that they may have. 1 if the kernel was compiled for less than 9.0: code for 8.0
// that the driver compiles for a later GPU has no clusters.
template <class P>
int largest_cluster(void (*kernel)(P), int threads) {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  if (attributes.ptxVersion < 90) return 1;
  allow_shared_memory(kernel, "cudaFuncSetAttribute");
  for (int blocks = 8; blocks > 1; blocks /= 2) {
    const LaunchConfig config({"", blocks, threads, kSharedLimit, nullptr, blocks});
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0)
      return blocks;
  }
  (void)cudaGetLastError();
  return 1;
}

// How many blocks of a kernel a multiprocessor of the current GPU has room for at a time; it lets
// them have up to `most` bytes of shared memory.
template <class P>
int blocks_of_multiprocessor(void (*kernel)(P), int threads, int64_t shared, int64_t most) {
  int blocks = 0;
  allow_shared_memory(kernel, "cudaFuncSetAttribute", most);
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads,
                                                           static_cast<size_t>(shared)),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

}  // namespace bahdanau_fast::gpu

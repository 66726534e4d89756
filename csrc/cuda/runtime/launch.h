// Launches through the CUDA runtime. Host code without torch.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/kernels/device.h"

namespace bahdanau_fast::gpu {

inline void check_cuda(cudaError_t error, const char* name) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
}

template <class P>
void launch(void (*kernel)(P), const Launch& at, const P& p) {
  if (at.blocks <= 0) return;
  check_blocks(at);
  if (at.shared > 48 * 1024)  // the default limit of a block
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(at.shared)),
               at.name);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(at.cluster);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(at.blocks));
  config.blockDim = dim3(static_cast<unsigned>(at.threads));
  config.dynamicSmemBytes = static_cast<size_t>(at.shared);
  config.stream = static_cast<cudaStream_t>(at.stream);
  config.attrs = &cluster;
  config.numAttrs = at.cluster > 1 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, p), at.name);
}

// How many blocks a cluster may have: 8 if the kernel was compiled for 9.0 or later (code for 8.0
// that the driver compiles for a later GPU has no clusters).
template <class P>
int largest_cluster(void (*kernel)(P)) {
  cudaFuncAttributes found{};
  check_cuda(cudaFuncGetAttributes(&found, kernel), "cudaFuncGetAttributes");
  return found.ptxVersion >= 90 ? 8 : 1;
}

inline void fill_zero(void* p, int64_t bytes, void* stream) {
  check_cuda(cudaMemsetAsync(p, 0, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
}

}  // namespace bahdanau_fast::gpu

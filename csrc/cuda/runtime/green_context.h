// What a green context leaves of a GPU. Host code without torch.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace bahdanau_fast::gpu {

// How many of a GPU's multiprocessors work of a stream may use: in a green context, fewer than all.
// Older toolkits know no such contexts, older drivers have none.
inline int multiprocessors_of(void* stream, int all) {
#if CUDART_VERSION >= 12050
  constexpr unsigned since = 12040;
  static const auto driver = [](const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault, &result);
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  };
  static const auto of_stream =
      reinterpret_cast<decltype(&cuStreamGetGreenCtx)>(driver("cuStreamGetGreenCtx"));
  static const auto resource_of =
      reinterpret_cast<decltype(&cuGreenCtxGetDevResource)>(driver("cuGreenCtxGetDevResource"));
  CUgreenCtx context = nullptr;
  CUdevResource part{};
  if (of_stream != nullptr && resource_of != nullptr &&
      of_stream(static_cast<CUstream>(stream), &context) == CUDA_SUCCESS && context != nullptr &&
      resource_of(context, &part, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS)
    return static_cast<int>(part.sm.smCount);
#endif
  return all;
}

}  // namespace bahdanau_fast::gpu

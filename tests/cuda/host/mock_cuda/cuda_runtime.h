// What the toolkit's header of this name adds for C++: kernels as typed functions.
#pragma once

#include <functional>

#include "cuda_runtime_api.h"

// `bytes` of parameters at `parameters`, which the toolkit knows from the kernel's binary; `thread`
// runs the kernel as one thread.
cudaError_t mock_launch(const cudaLaunchConfig_t* config, const void* kernel,
                        const void* parameters, size_t bytes, const std::function<void()>& thread);

template <class P>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P),
                               const P& parameters) {
  return mock_launch(config, reinterpret_cast<const void*>(kernel), &parameters, sizeof parameters,
                     [&] { kernel(parameters); });
}
template <class P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, void (*kernel)(P)) {
  return cudaFuncGetAttributes(found, reinterpret_cast<const void*>(kernel));
}
template <class P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <class P>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*kernel)(P),
                                           const cudaLaunchConfig_t* config) {
  return cudaOccupancyMaxActiveClusters(clusters, reinterpret_cast<const void*>(kernel), config);
}

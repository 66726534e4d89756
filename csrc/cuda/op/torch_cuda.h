// Functions of torch's C interface that only a torch with CUDA has.
#pragma once

#include <dlfcn.h>

#include "common/tensors.h"

namespace bahdanau_fast::gpu {

// Looked up in the library that torch has loaded: a binary built against a torch without CUDA
// cannot link to it.
template <class Function>
Function in_torch_cuda(const char* name) {
  void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = torch_cuda ? dlsym(torch_cuda, name) : nullptr;
  STD_TORCH_CHECK(found != nullptr, "this torch has no CUDA, or no ", name);
  return reinterpret_cast<Function>(found);
}

}  // namespace bahdanau_fast::gpu

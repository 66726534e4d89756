// To csrc/cuda/op, CPU tensors are tensors of the mock GPU: these functions of torch's C interface
// take precedence over torch's own in this library.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstring>

#include "mock.h"

using bahdanau_fast::mock::Gpus;

extern "C" {

int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* device) {
  *device = Gpus::get().of_tensors;
  return 0;
}

// The device that was current before.
AOTITorchError aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  int& current = bahdanau_fast::mock::current_device();
  *guard = reinterpret_cast<DeviceGuardHandle>(new int(current));
  current = device;
  return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  int* before = reinterpret_cast<int*>(guard);
  bahdanau_fast::mock::current_device() = *before;
  delete before;
  return 0;
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = bahdanau_fast::mock::current_stream();
  return 0;
}

// Where inputs.cpp looks for the function above.
__attribute__((visibility("hidden"))) void* dlopen(const char*, int) { return &Gpus::get(); }
__attribute__((visibility("hidden"))) void* dlsym(void*, const char* name) {
  const bool known = std::strcmp(name, "aoti_torch_get_current_cuda_stream") == 0;
  return known ? reinterpret_cast<void*>(&aoti_torch_get_current_cuda_stream) : nullptr;
}
}

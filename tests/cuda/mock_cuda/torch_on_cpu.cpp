// To csrc/cuda/op, CPU tensors are tensors of the mock GPU: these functions of torch's C interface
// take precedence over torch's own in this library.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>

#include <map>
#include <string>

#include "mock.h"

using namespace bahdanau_fast::mock;

namespace {

// Of a view, from its first number to the end of the storage.
void tell(AtenTensorHandle tensor, Memory which) {
  void* at = nullptr;
  int64_t bytes = 0, offset = 0;
  int32_t dtype = 0;
  aoti_torch_get_data_ptr(tensor, &at);
  aoti_torch_get_storage_size(tensor, &bytes);
  aoti_torch_get_storage_offset(tensor, &offset);
  aoti_torch_get_dtype(tensor, &dtype);
  bytes -= offset * int64_t(aoti_torch_dtype_element_size(dtype));
  Runs::get().tell(at, bytes, which);
}

}  // namespace

extern "C" {

int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* device) {
  *device = Gpus::get().of_tensors;
  return 0;
}

// The device that was current before.
AOTITorchError aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  int& current = current_device();
  *guard = reinterpret_cast<DeviceGuardHandle>(new int(current));
  current = device;
  return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  int* before = reinterpret_cast<int*>(guard);
  current_device() = *before;
  delete before;
  return 0;
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = current_stream();
  return 0;
}

// Calls of these two come here (--wrap): a new tensor, and an operator, which gives one tensor.
decltype(aoti_torch_empty_strided) __real_aoti_torch_empty_strided;
decltype(torch_call_dispatcher) __real_torch_call_dispatcher;

AOTITorchError __wrap_aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes,
                                               const int64_t* strides, int32_t dtype,
                                               int32_t device_type, int32_t device,
                                               AtenTensorHandle* made) {
  const AOTITorchError error =
      __real_aoti_torch_empty_strided(ndim, sizes, strides, dtype, device_type, device, made);
  if (error == 0) tell(*made, kOfTensor);
  return error;
}
AOTITorchError __wrap_torch_call_dispatcher(const char* name, const char* overload,
                                            StableIValue* stack, uint64_t version) {
  const AOTITorchError error = __real_torch_call_dispatcher(name, overload, stack, version);
  if (error == 0) tell(reinterpret_cast<AtenTensorHandle>(stack[0]), kFilled);
  return error;
}

// Products, into a tensor that is there.
AOTITorchError mm_out(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle y) {
  const AOTITorchError error = aoti_torch_cpu_mm_out(out, x, y);
  if (error == 0) tell(out, kFilled);
  return error;
}
AOTITorchError addmm_out(AtenTensorHandle out, AtenTensorHandle added, AtenTensorHandle x,
                         AtenTensorHandle y, double beta, double alpha) {
  const AOTITorchError error = aoti_torch_cpu_addmm_out(out, added, x, y, beta, alpha);
  if (error == 0) tell(out, kFilled);
  return error;
}

// Where torch_cuda.h looks for functions.
__attribute__((visibility("hidden"))) void* dlopen(const char*, int) { return &Gpus::get(); }
__attribute__((visibility("hidden"))) void* dlsym(void*, const char* name) {
  static const std::map<std::string, void*> known = {
      {"aoti_torch_get_current_cuda_stream",
       reinterpret_cast<void*>(&aoti_torch_get_current_cuda_stream)},
      {"aoti_torch_cuda_mm_out", reinterpret_cast<void*>(&mm_out)},
      {"aoti_torch_cuda_addmm_out", reinterpret_cast<void*>(&addmm_out)}};
  const auto found = known.find(name);
  return found == known.end() ? nullptr : found->second;
}
}

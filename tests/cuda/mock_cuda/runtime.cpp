// The mock CUDA runtime: Python answers its calls (__init__.py). To csrc/cuda/op, CPU tensors are
// tensors of the mock GPU: functions of torch's C interface that are defined here take precedence
// over torch's own in this library.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "cuda.h"
#include "cuda/kernels/persistent_plan.h"
#include "cuda_runtime.h"

namespace {

// Of the calling thread, as CUDA and torch have them.
thread_local int current_device = 0;
thread_local cudaStream_t current_stream = nullptr;
thread_local cudaError_t last_error = cudaSuccess;

int64_t number(const void* address) { return reinterpret_cast<int64_t>(address); }

const char* name_of(const void* kernel) {
  Dl_info symbol{};
  return kernel != nullptr && dladdr(kernel, &symbol) != 0 ? symbol.dli_sname : "";
}

unsigned cluster_of(const cudaLaunchConfig_t& config) {
  for (unsigned k = 0; k < config.numAttrs; ++k)
    if (config.attrs[k].id == cudaLaunchAttributeClusterDimension)
      return config.attrs[k].val.clusterDim.x;
  return 1;
}
bool is_cooperative(const cudaLaunchConfig_t& config) {
  return config.numAttrs == 1 && config.attrs[0].id == cudaLaunchAttributeCooperative;
}

}  // namespace

extern "C" {

int mock_tensors = 0;   // the device of all tensors
int mock_launches = 1;  // 0: they return at once
// Answers a call by its error: function, device, kernel, numbers, of which the first may be
// changed.
int (*mock_answers)(const char*, int, const char*, int64_t*) = nullptr;
// Is told of memory unless null: address, bytes, and whether it is new, or something is written.
void (*mock_memory)(void*, int64_t, int) = nullptr;

void mock_set_device(int device) { current_device = mock_tensors = device; }
void mock_set_stream(void* stream) { current_stream = static_cast<cudaStream_t>(stream); }

// How a decoder is cut for a GPU of so many blocks and bytes.
void mock_plan(int lstm, int backward, int64_t B, int64_t Tk, int64_t F, int64_t Dv, int64_t H,
               int64_t blocks, int64_t shared, int* found) {
  bahdanau_fast::gpu::Decoder d;
  d.lstm = lstm != 0, d.backward = backward != 0, d.H = H;
  d.p.B = B, d.p.Tk = Tk, d.p.H = F, d.p.Dv = Dv;
  const auto plan = bahdanau_fast::gpu::plan_persistent(d, blocks, shared);
  const int all[] = {plan.groups, plan.blocks,   plan.rows,     plan.sentences, plan.units,
                     plan.hidden, plan.features, plan.resident, plan.bytes};
  std::copy(std::begin(all), std::end(all), found);
}
}

namespace {

cudaError_t ask(const char* function, const void* kernel, std::initializer_list<int64_t> given,
                int* found = nullptr) {
  int64_t numbers[8] = {};
  std::copy(given.begin(), given.end(), numbers);
  const auto error = cudaError_t(mock_answers(function, current_device, name_of(kernel), numbers));
  if (found != nullptr) *found = int(numbers[0]);
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  int64_t numbers[8] = {error};
  mock_answers("cudaGetErrorString", current_device, "", numbers);
  return reinterpret_cast<const char*>(numbers[0]);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return ask("cudaDeviceGetAttribute", nullptr, {attribute}, value);
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  const int64_t size = int64_t(bytes);
  return ask("cudaMemsetAsync", nullptr, {number(memory), value, size, number(stream)});
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  const int64_t size = int64_t(bytes);
  return ask("cudaMemcpyAsync", nullptr, {number(to), number(from), size, number(stream)});
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return ask("cudaStreamSynchronize", nullptr, {number(stream)});
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return ask("cudaStreamIsCapturing", nullptr, {number(stream)}, reinterpret_cast<int*>(status));
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void* kernel) {
  return ask("cudaFuncGetAttributes", kernel, {}, &found->ptxVersion);
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  return ask("cudaFuncSetAttribute", kernel, {value});
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel,
                                           const cudaLaunchConfig_t* config) {
  const int64_t shared = int64_t(config->dynamicSmemBytes);
  return ask("cudaOccupancyMaxActiveClusters", kernel, {cluster_of(*config), shared}, clusters);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                          int threads, size_t shared) {
  const char* const name = "cudaOccupancyMaxActiveBlocksPerMultiprocessor";
  return ask(name, kernel, {threads, int64_t(shared)}, blocks);
}
cudaError_t mock_launch(const cudaLaunchConfig_t* config, const void* kernel,
                        const void* parameters, size_t bytes) {
  if (mock_launches == 0) return cudaSuccess;
  return ask("cudaLaunchKernelEx", kernel,
             {config->gridDim.x, config->blockDim.x, cluster_of(*config),
              int64_t(config->dynamicSmemBytes), is_cooperative(*config), number(parameters),
              int64_t(bytes), number(config->stream)});
}

// A green context is its stream. What is asked of it is a call of the driver: it leaves no error.
CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx* context) {
  int multiprocessors = 0;
  ask("cuStreamGetGreenCtx", nullptr, {number(stream)}, &multiprocessors);
  *context = multiprocessors == 0 ? nullptr : reinterpret_cast<CUgreenCtx>(stream);
  return CUDA_SUCCESS;
}
CUresult cuGreenCtxGetDevResource(CUgreenCtx context, CUdevResource* resource, CUdevResourceType) {
  int multiprocessors = 0;
  ask("cuStreamGetGreenCtx", nullptr, {number(context)}, &multiprocessors);
  resource->sm.smCount = unsigned(multiprocessors);
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool of_stream = std::strcmp(name, "cuStreamGetGreenCtx") == 0;
  *function = of_stream ? reinterpret_cast<void*>(cuStreamGetGreenCtx)
                        : reinterpret_cast<void*>(cuGreenCtxGetDevResource);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- torch ----

namespace {

// Of a view, from its first number to the end of the storage, if a function gave one.
AOTITorchError told(AOTITorchError error, AtenTensorHandle tensor, bool written) {
  if (error != 0 || mock_memory == nullptr) return error;
  void* at = nullptr;
  int64_t bytes = 0, offset = 0;
  int32_t dtype = 0;
  aoti_torch_get_data_ptr(tensor, &at);
  aoti_torch_get_storage_size(tensor, &bytes);
  aoti_torch_get_storage_offset(tensor, &offset);
  aoti_torch_get_dtype(tensor, &dtype);
  bytes -= offset * int64_t(aoti_torch_dtype_element_size(dtype));
  if (bytes > 0) mock_memory(at, bytes, written);
  return error;
}

}  // namespace

extern "C" {

int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* device) {
  *device = mock_tensors;
  return 0;
}

// The device that was current before.
AOTITorchError aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  *guard = reinterpret_cast<DeviceGuardHandle>(new int(std::exchange(current_device, device)));
  return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  int* before = reinterpret_cast<int*>(guard);
  current_device = *before;
  delete before;
  return 0;
}

static AOTITorchError get_current_cuda_stream(int32_t, void** stream) {
  *stream = current_stream;
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
  return told(error, *made, false);
}
AOTITorchError __wrap_torch_call_dispatcher(const char* name, const char* overload,
                                            StableIValue* stack, uint64_t version) {
  const AOTITorchError error = __real_torch_call_dispatcher(name, overload, stack, version);
  return told(error, reinterpret_cast<AtenTensorHandle>(stack[0]), true);
}

// Products, into a tensor that is there.
static AOTITorchError mm_out(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle y) {
  return told(aoti_torch_cpu_mm_out(out, x, y), out, true);
}
static AOTITorchError addmm_out(AtenTensorHandle out, AtenTensorHandle added, AtenTensorHandle x,
                                AtenTensorHandle y, double beta, double alpha) {
  return told(aoti_torch_cpu_addmm_out(out, added, x, y, beta, alpha), out, true);
}

// Where torch_cuda.h looks for functions.
__attribute__((visibility("hidden"))) void* dlopen(const char*, int) noexcept {
  return &mock_memory;
}
__attribute__((visibility("hidden"))) void* dlsym(void*, const char* name) noexcept {
  if (std::strstr(name, "addmm")) return reinterpret_cast<void*>(&addmm_out);
  if (std::strstr(name, "mm_out")) return reinterpret_cast<void*>(&mm_out);
  const bool known = std::strcmp(name, "aoti_torch_get_current_cuda_stream") == 0;
  return known ? reinterpret_cast<void*>(&get_current_cuda_stream) : nullptr;
}
}

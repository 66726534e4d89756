// The mock CUDA runtime: notes each call as a line of JSON and refuses what a GPU would refuse.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "cuda.h"
#include "cuda_runtime.h"
#include "mock.h"

namespace {

using namespace bahdanau_fast::mock;

std::string quoted(const std::string& text) { return '"' + text + '"'; }

std::string name_of(const void* kernel) {
  Dl_info symbol{};
  dladdr(kernel, &symbol);
  return symbol.dli_sname == nullptr ? "?" : symbol.dli_sname;
}

std::string hex(const void* data, size_t bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes; ++i) {
    const unsigned char byte = static_cast<const unsigned char*>(data)[i];
    text += {digits[byte >> 4], digits[byte & 15]};
  }
  return text;
}

// One call of the runtime: its note, and its result.
struct Call {
  const char* name;
  std::string note;

  explicit Call(const char* name) : name(name) {
    if (Gpus::get().noted)
      note = "{\"call\": " + quoted(name) + ", \"device\": " + std::to_string(current_device());
  }

  void tell(const char* what, const std::string& json) {
    note += ", " + quoted(what) + ": " + json;
  }
  void tell(const char* what, long long number) { tell(what, std::to_string(number)); }
  void tell(const char* what, const void* address) { tell(what, (long long)(intptr_t)(address)); }

  // `does` changes the state and gives an error.
  template <class Does>
  cudaError_t run(const Does& does) {
    Gpus& all = Gpus::get();
    cudaError_t error = cudaSuccess;
    void (*then)() = nullptr;
    {
      const std::lock_guard<std::mutex> guard(all.lock);
      if (const auto found = all.failing.find(name); found != all.failing.end()) {
        error = found->second;
        all.failing.erase(found);
      } else {
        error = does(all);
      }
      tell("error", (long long)(error));
      if (all.noted) all.calls.push_back(note + "}");
      if (const auto found = all.after.find(name); found != all.after.end()) {
        then = found->second;
        all.after.erase(found);
      }
    }
    if (error != cudaSuccess) last_error() = error;
    if (then != nullptr) then();
    return error;
  }
};

// ---- what a capture refuses, by the CUDA programming guide (stream capture): asked for all the
// ---- same, it ends it

// Any use of a stream. The legacy stream would wait for blocking ones.
cudaError_t use(Gpus& all, cudaStream_t stream) {
  if (const auto found = all.captures.find(stream); found != all.captures.end())
    return found->second ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
  cudaError_t error = cudaSuccess;
  if (stream == nullptr || stream == cudaStreamLegacy)
    for (auto& [captured, valid] : all.captures)
      if (all.blocking[captured]) valid = false, error = cudaErrorStreamCaptureImplicit;
  return error;
}

// To wait, for any stream: it would be missing from the graph. Captures are in the global mode, as
// torch's.
cudaError_t wait(Gpus& all, cudaStream_t stream) {
  cudaError_t error = use(all, stream);
  if (error != cudaSuccess) return error;
  for (auto& [captured, valid] : all.captures)
    valid = false, error = cudaErrorStreamCaptureUnsupported;
  return error;
}

bool captures(cudaStream_t stream) {
  Gpus& all = Gpus::get();
  const std::lock_guard<std::mutex> guard(all.lock);
  return all.captures.count(stream) != 0;
}

// An attribute of a launch; null if it has none of the kind.
const cudaLaunchAttributeValue* attribute(const cudaLaunchConfig_t& config,
                                          cudaLaunchAttributeID id) {
  for (unsigned k = 0; k < config.numAttrs; ++k)
    if (config.attrs[k].id == id) return &config.attrs[k].val;
  return nullptr;
}
unsigned cluster_of(const cudaLaunchConfig_t& config) {
  const auto* const found = attribute(config, cudaLaunchAttributeClusterDimension);
  return found == nullptr ? 1 : found->clusterDim.x;
}
bool is_cooperative(const cudaLaunchConfig_t& config) {
  const auto* const found = attribute(config, cudaLaunchAttributeCooperative);
  return found != nullptr && found->cooperative != 0;
}

cudaError_t check_launch(const Gpus& all, const void* kernel, const cudaLaunchConfig_t& config) {
  const Gpu& here = all.gpu.at(current_device());
  const auto green = all.green.find(config.stream);
  if (here.loads != cudaSuccess) return here.loads;
  if (config.gridDim.x == 0 || config.blockDim.x == 0 || config.blockDim.x > 1024 ||
      config.dynamicSmemBytes > size_t(here.allowed(kernel)))
    return cudaErrorInvalidValue;
  const unsigned cluster = cluster_of(config);
  if (cluster > 1 && (here.ptx_version < 90 || int(cluster) > here.largest_cluster ||
                      config.gridDim.x % cluster != 0))
    return cudaErrorInvalidClusterSize;
  const int threads = int(config.blockDim.x);
  const int resident = here.resident(kernel, threads, config.dynamicSmemBytes) *
                       (green == all.green.end() ? here.multiprocessors : green->second);
  if (is_cooperative(config) && config.gridDim.x > unsigned(resident))
    return cudaErrorCooperativeLaunchTooLarge;
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error();
  last_error() = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorCooperativeLaunchTooLarge:
      return "too many blocks in cooperative launch";
    case cudaErrorInvalidClusterSize:
      return "cluster misconfiguration";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    default:
      return "invalid argument";
  }
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return Call("cudaDeviceGetAttribute").run([&](Gpus& all) {
    const Gpu& gpu = all.gpu[device];
    const bool shared = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin;
    *value = shared ? gpu.most_shared : gpu.multiprocessors;
    return cudaSuccess;
  });
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
// A green context is its stream.
CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx* context) {
  *context = Gpus::get().green.count(stream) == 0 ? nullptr : reinterpret_cast<CUgreenCtx>(stream);
  return CUDA_SUCCESS;
}
CUresult cuGreenCtxGetDevResource(CUgreenCtx context, CUdevResource* resource,
                                  CUdevResourceType type) {
  resource->type = type;
  resource->sm.smCount = unsigned(Gpus::get().green.at(reinterpret_cast<CUstream>(context)));
  return CUDA_SUCCESS;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  Call call("cudaMemsetAsync");
  call.tell("bytes", (long long)(bytes));
  call.tell("stream", stream);
  return call.run([&](Gpus& all) {
    const cudaError_t error = use(all, stream);
    if (error != cudaSuccess || all.captures.count(stream) != 0) return error;
    std::memset(memory, value, bytes);
    Runs::get().tell(memory, int64_t(bytes), kFilled);
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return Call("cudaMemcpyAsync").run([&](Gpus& all) {
    const cudaError_t error = use(all, stream);
    if (error == cudaSuccess && all.captures.count(stream) == 0) std::memcpy(to, from, bytes);
    return error;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return Call("cudaStreamCreateWithFlags").run([&](Gpus& all) {
    *stream = reinterpret_cast<cudaStream_t>(64 * (16 + all.blocking.size()));
    all.blocking[*stream] = (flags & cudaStreamNonBlocking) == 0;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return Call("cudaStreamSynchronize").run([&](Gpus& all) { return wait(all, stream); });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return Call("cudaStreamIsCapturing").run([&](Gpus& all) {
    const auto found = all.captures.find(stream);
    *status = found == all.captures.end() ? cudaStreamCaptureStatusNone
              : found->second             ? cudaStreamCaptureStatusActive
                                          : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  return Call("cudaFuncGetAttributes").run([&](Gpus& all) {
    const Gpu& here = all.gpu[current_device()];
    found->ptxVersion = here.ptx_version;
    return here.loads;
  });
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  Call call("cudaFuncSetAttribute");
  call.tell("value", (long long)(value));
  return call.run([&](Gpus& all) {
    Gpu& here = all.gpu[current_device()];
    if (value > here.most_shared) return cudaErrorInvalidValue;
    here.shared[kernel] = value;
    return cudaSuccess;
  });
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel,
                                           const cudaLaunchConfig_t* config) {
  return Call("cudaOccupancyMaxActiveClusters").run([&](Gpus& all) {
    const Gpu& here = all.gpu[current_device()];
    if (here.ptx_version < 90) return cudaErrorInvalidClusterSize;
    if (config->dynamicSmemBytes > size_t(here.allowed(kernel))) return cudaErrorInvalidValue;
    const int cluster = int(cluster_of(*config));
    *clusters = cluster <= here.largest_cluster ? here.multiprocessors / cluster : 0;
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                          int threads, size_t shared) {
  return Call("cudaOccupancyMaxActiveBlocksPerMultiprocessor").run([&](Gpus& all) {
    *blocks = all.gpu[current_device()].resident(kernel, threads, shared);
    return cudaSuccess;
  });
}

cudaError_t mock_launch(const cudaLaunchConfig_t* config, const void* kernel,
                        const void* parameters, size_t bytes) {
  if (!Gpus::get().noted) return cudaSuccess;
  const int64_t blocks = config->gridDim.x, shared = int64_t(config->dynamicSmemBytes);
  const int threads = int(config->blockDim.x), cluster = int(cluster_of(*config));
  const int cooperative = is_cooperative(*config);
  Call call("cudaLaunchKernelEx");
  call.tell("kernel", quoted(name_of(kernel)));
  call.tell("grid", blocks);
  call.tell("block", threads);
  call.tell("cluster", cluster);
  call.tell("cooperative", cooperative);
  call.tell("shared", shared);
  call.tell("stream", config->stream);
  call.tell("parameters", quoted(hex(parameters, bytes)));
  const cudaError_t error = call.run([&](Gpus& all) {
    const cudaError_t refused = use(all, config->stream);
    return refused != cudaSuccess ? refused : check_launch(all, kernel, *config);
  });
  const Runs& runs = Runs::get();
  if (error != cudaSuccess || captures(config->stream)) return error;
  if (runs.launch != nullptr)
    runs.launch(name_of(kernel).c_str(), blocks, threads, cluster, shared, cooperative, parameters,
                int64_t(bytes));
  return cudaSuccess;
}

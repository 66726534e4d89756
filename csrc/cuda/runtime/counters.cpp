#include "cuda/runtime/counters.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace bahdanau_fast::gpu {
namespace {

constexpr int64_t kCounters = 1 << 18;  // for each GPU: 1 MB
constexpr int64_t kLine = 32;           // counters in 128 bytes

// A stream for as long as the program runs, which its handle is not: that of a stream that is
// destroyed is given to another one, and every thread's own default stream has the same.
using Stream = std::pair<unsigned long long, int64_t>;  // its id; its thread, or 0

cudaError_t identify(cudaStream_t handle, Stream* stream) {
  static std::atomic<int64_t> threads{0};
  static thread_local const int64_t thread = ++threads;
  stream->second = handle == cudaStreamPerThread ? thread : 0;
  return cudaStreamGetId(handle, &stream->first);
}

struct Slice {
  unsigned* first = nullptr;
  int64_t count = 0;
};

// The counters of one GPU. Never freed: graphs that use them may outlive everything here.
struct Counters {
  unsigned* first = nullptr;
  int64_t used = 0;
  std::map<Stream, Slice> of_stream;

  // Once for each GPU. Waits until the counters are zero for every stream. A new stream and the
  // relaxed mode keep this out of a graph that is being captured.
  void make() {
    const size_t bytes = kCounters * sizeof(unsigned);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaStream_t own = nullptr;
    void* memory = nullptr;
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) == cudaSuccess &&
        cudaMalloc(&memory, bytes) == cudaSuccess &&
        cudaMemsetAsync(memory, 0, bytes, own) == cudaSuccess &&
        cudaStreamSynchronize(own) == cudaSuccess)
      first = static_cast<unsigned*>(memory);
    else
      used = kCounters;  // callers then use their workspace
    if (own != nullptr) cudaStreamDestroy(own);
    cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaGetLastError();
  }

  unsigned* take(int64_t count) {
    count = (count + kLine - 1) / kLine * kLine;
    if (count > kCounters - used) return nullptr;
    used += count;
    return first + used - count;
  }
};

}  // namespace

unsigned* counters_of(int device, void* stream, int64_t count) {
  static auto* const all = new std::map<int, Counters>;
  static auto* const lock = new std::mutex;
  const auto handle = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  Stream known;
  // In a capture the id is not needed, and to ask for it would end the capture.
  if (cudaStreamIsCapturing(handle, &capture) != cudaSuccess ||
      (capture == cudaStreamCaptureStatusNone && identify(handle, &known) != cudaSuccess)) {
    (void)cudaGetLastError();  // it is dealt with here: nobody else is to find it
    return nullptr;
  }
  const std::lock_guard<std::mutex> guard(*lock);
  Counters& here = (*all)[device];
  if (here.first == nullptr && here.used == 0) here.make();
  if (capture != cudaStreamCaptureStatusNone) return here.take(count);
  Slice& slice = here.of_stream[known];
  if (slice.count < count) slice = {here.take(count), count};
  if (slice.first == nullptr) slice.count = 0;
  return slice.first;
}

}  // namespace bahdanau_fast::gpu

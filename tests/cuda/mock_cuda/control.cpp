// What the tests change and read of the mock runtime, through ctypes.
#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/kernels/persistent_plan.h"
#include "cuda/kernels/types.h"
#include "mock.h"

using namespace bahdanau_fast::mock;

namespace {

template <class Change>
void change(const Change& what) {
  Gpus& all = Gpus::get();
  const std::lock_guard<std::mutex> guard(all.lock);
  what(all);
}

}  // namespace

extern "C" {

void mock_set_device(int device) {
  current_device() = device;
  change([&](Gpus& all) { all.of_tensors = device; });
}
void mock_set_gpu(int device, int multiprocessors, int largest_cluster, int ptx_version, int loads,
                  int most_shared) {
  change([&](Gpus& all) {
    auto shared = std::move(all.gpu[device].shared);
    all.gpu[device] = {multiprocessors, largest_cluster,    ptx_version,
                       most_shared,     cudaError_t(loads), shared};
  });
}
// The current stream of this thread, if it has so many multiprocessors only; else the usual one.
void mock_green_context(void* stream, int multiprocessors) {
  const auto handle = static_cast<cudaStream_t>(stream);
  change([&](Gpus& all) { all.green[handle] = multiprocessors; });
  current_stream() = multiprocessors > 0 ? handle : nullptr;
}
void mock_runs(decltype(Runs::launch) launch, decltype(Runs::memory) memory) {
  Runs::get().launch = launch;
  Runs::get().memory = memory;
}
void mock_noted(int noted) {
  change([&](Gpus& all) { all.noted = noted != 0; });
}
void mock_fail(const char* function, int error) {
  change([&](Gpus& all) { all.failing[function] = cudaError_t(error); });
}
void mock_after(const char* function, void (*then)()) {
  change([&](Gpus& all) { all.after[function] = then; });
}
// This thread begins to capture a stream of its own, which is torch's current one until it ends.
void mock_begin_capture(void* stream) {
  const auto handle = static_cast<cudaStream_t>(stream);
  current_stream() = handle;
  change([&](Gpus& all) { all.captures[handle] = true; });
}
int mock_end_capture(void* stream) {
  const auto handle = static_cast<cudaStream_t>(stream);
  bool valid = true;
  current_stream() = nullptr;
  change([&](Gpus& all) {
    valid = all.captures.at(handle);
    all.captures.erase(handle);
  });
  return valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
}

// The calls since the last time, as a JSON list.
const char* mock_calls() {
  static thread_local std::string text;
  text.clear();
  change([&](Gpus& all) {
    for (const std::string& call : all.calls) text += (text.empty() ? "[" : ",\n ") + call;
    all.calls.clear();
  });
  text += text.empty() ? "[]" : "]";
  return text.c_str();
}

void mock_clusters(int on) { bahdanau_fast::gpu::clusters_on = on != 0; }
const char* mock_why_not() { return bahdanau_fast::gpu::kernels_f32.why_not(); }
const char* mock_why_not_decode(int lstm, int backward, int64_t B, int64_t Tk, int64_t F,
                                int64_t Dv, int64_t H, int64_t V, int64_t T) {
  bahdanau_fast::gpu::Decoder d;
  d.lstm = lstm != 0, d.backward = backward != 0, d.H = H, d.V = V, d.T = T;
  d.p.B = B, d.p.Tq = 1, d.p.Tk = Tk, d.p.H = F, d.p.Dv = Dv;
  return bahdanau_fast::gpu::why_not_decode(d);
}
// The plan for a GPU of so many blocks and bytes: groups, blocks, rows, sentences, units, hidden,
// features, resident, bytes.
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

// How a decoder becomes a launch. Host code without torch.
#pragma once

#include "cuda/kernels/persistent_backward.h"
#include "cuda/kernels/persistent_forward.h"
#include "cuda/kernels/types.h"
#include "cuda/runtime/launch.h"

namespace bahdanau_fast::gpu {

template <class T>
struct Decode {
  static auto kernel_of(const DecoderForward& d) {
    return d.lstm ? persistent_forward<T, true> : persistent_forward<T, false>;
  }
  static auto kernel_of(const DecoderBackward& d) {
    return d.lstm ? persistent_backward<T, true> : persistent_backward<T, false>;
  }

  static const char* why_not(const Decoder& d, const Device& device) {
    if (d.H % kDepth != 0 || d.p.H % kDepth != 0 || d.p.Dv % kDepth != 0)
      return "sizes are not multiples of 32";
    const PersistentPlan plan = plan_persistent(d, device.multiprocessors, device.shared);
    if (plan.groups == 0) return why_no_plan(d, device.multiprocessors);
    const auto blocks = [&](auto* kernel) {
      return blocks_of_multiprocessor(kernel, kPersistentThreads, plan.bytes, device.shared);
    };
    const int fit =
        d.backward ? blocks(kernel_of(DecoderBackward{d})) : blocks(kernel_of(DecoderForward{d}));
    return fit > 0 ? nullptr : "a multiprocessor has no room for a block";
  }

  template <class Direction>
  static void run(const Direction& d, const Device& device, const Memory& memory) {
    Persistent<Direction> all{d, plan_persistent(d, device.multiprocessors, device.shared)};
    if (all.plan.groups == 0) throw std::runtime_error(why_no_plan(d, device.multiprocessors));
    const int64_t counters = all.plan.groups * kCounterStride * int64_t(sizeof(unsigned));
    all.arrived = static_cast<unsigned*>(memory(counters));
    const auto stream = static_cast<cudaStream_t>(device.stream);
    check_cuda(cudaMemsetAsync(all.arrived, 0, counters, stream), "cudaMemsetAsync");
    Launch at{d.backward ? "persistent_backward" : "persistent_forward",
              int64_t(all.plan.groups) * all.plan.blocks, kPersistentThreads, all.plan.bytes,
              device.stream};
    at.cooperative = true;
    at.most_shared = device.shared;
    launch(kernel_of(d), at, all);
  }
};

}  // namespace bahdanau_fast::gpu

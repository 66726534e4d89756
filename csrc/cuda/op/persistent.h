// How a decoder becomes a launch. Host code without torch.
#pragma once

#include "cuda/kernels/persistent_backward.h"
#include "cuda/kernels/persistent_forward.h"
#include "cuda/kernels/types.h"
#include "cuda/runtime/launch.h"

namespace bahdanau_fast::gpu {

template <class T>
struct Decode {
  template <class Of>
  using Kernel = void (*)(Persistent<Of>);
  static Kernel<DecoderForward> kernel_of(const DecoderForward& d) {
    return d.lstm ? persistent_forward<T, true> : persistent_forward<T, false>;
  }
  static Kernel<DecoderBackward> kernel_of(const DecoderBackward& d) {
    return d.lstm ? persistent_backward<T, true> : persistent_backward<T, false>;
  }

  static const char* why_not(const Decoder& d, bool backward, const Device& device) {
    if (d.H % kDepth != 0 || d.p.H % kDepth != 0 || d.p.Dv % kDepth != 0)
      return "sizes are not multiples of 32";
    const PersistentPlan plan = plan_persistent(d, backward, device.multiprocessors, device.shared);
    if (plan.groups == 0) return why_no_plan(d, backward, device.multiprocessors);
    const bool there = backward ? resident(kernel_of(DecoderBackward{d}), plan.bytes, device)
                                : resident(kernel_of(DecoderForward{d}), plan.bytes, device);
    return there ? nullptr : "a multiprocessor has no room for a block";
  }

  // Whether every multiprocessor has room for a block with so many bytes.
  template <class Of>
  static bool resident(Kernel<Of> kernel, int64_t bytes, const Device& device) {
    return blocks_of_multiprocessor(kernel, kPersistentThreads, bytes, device.shared) > 0;
  }

  template <class Of>
  static void run(const Of& of, bool backward, const char* name, const Device& device,
                  const Memory& memory) {
    Persistent<Of> all{of, plan_persistent(of, backward, device.multiprocessors, device.shared)};
    if (all.plan.groups == 0)
      throw std::runtime_error(why_no_plan(of, backward, device.multiprocessors));
    const int64_t counters = all.plan.groups * kCounterStride * int64_t(sizeof(unsigned));
    all.arrived = static_cast<unsigned*>(memory(counters));
    fill_zero(all.arrived, counters, device.stream);
    Launch at{name, int64_t(all.plan.groups) * all.plan.blocks, kPersistentThreads, all.plan.bytes,
              device.stream};
    at.cooperative = true;
    at.most_shared = device.shared;
    launch(kernel_of(of), at, all);
  }
  static void forward(const DecoderForward& d, const Device& device, const Memory& memory) {
    run(d, false, "persistent_forward", device, memory);
  }
  static void backward(const DecoderBackward& d, const Device& device, const Memory& memory) {
    run(d, true, "persistent_backward", device, memory);
  }
};

}  // namespace bahdanau_fast::gpu

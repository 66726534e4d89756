#include "dispatch.h"

#include <atomic>

namespace bahdanau_fast {

bool supported(InstructionSet isa) {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  switch (isa) {
    case InstructionSet::avx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    case InstructionSet::avx2:
      return avx2;  // every processor with AVX2 converts fp16 too
    case InstructionSet::baseline:
      return true;
  }
#endif
  return isa == InstructionSet::baseline;
}

namespace {

InstructionSet best() {
  if (supported(InstructionSet::avx512)) return InstructionSet::avx512;
  if (supported(InstructionSet::avx2)) return InstructionSet::avx2;
  return InstructionSet::baseline;
}

std::atomic<InstructionSet>& current() {
  static std::atomic<InstructionSet> isa{best()};
  return isa;
}

}  // namespace

InstructionSet instruction_set() { return current().load(std::memory_order_relaxed); }

void set_instruction_set(InstructionSet isa) { current().store(isa, std::memory_order_relaxed); }

const Kernels& kernels(Kind kind) {
#ifdef __x86_64__
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return kernels_avx512[static_cast<int>(kind)];
    case InstructionSet::avx2:
      return kernels_avx2[static_cast<int>(kind)];
    case InstructionSet::baseline:
      break;
  }
#endif
  return kernels_baseline[static_cast<int>(kind)];
}

}  // namespace bahdanau_fast

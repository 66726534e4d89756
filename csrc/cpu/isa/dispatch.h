// The instruction set in use, and its kernels.
#pragma once

#include "cpu/kernels/types.h"

namespace bahdanau_fast {

enum class InstructionSet : int { baseline = 0, avx2 = 1, avx512 = 2 };
constexpr const char* kInstructionSetNames[] = {"baseline", "avx2", "avx512"};

// In use is the best that the processor supports, unless a test has set a lesser one.
bool supported(InstructionSet isa);
InstructionSet instruction_set();
void set_instruction_set(InstructionSet isa);

const Kernels& kernels(Kind kind);

}  // namespace bahdanau_fast

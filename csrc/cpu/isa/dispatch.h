// Which instruction set serves this process.
#pragma once

#include "cpu/kernels/types.h"

namespace bahdanau_fast {

enum class InstructionSet : int { baseline = 0, avx2 = 1, avx512 = 2 };
constexpr const char* kInstructionSetNames[] = {"baseline", "avx2", "avx512"};

// What the processor has, and what is in use: the best of it, unless a test asked for less.
bool supported(InstructionSet isa);
InstructionSet instruction_set();
void set_instruction_set(InstructionSet isa);

const Kernels& kernels(Kind kind);

}  // namespace bahdanau_fast

#include "attend.h"

namespace bahdanau_fast::gpu {

const Kernels kernels_bf16 = kernels_of<bf16>();

}  // namespace bahdanau_fast::gpu

#include "attend.h"

namespace bahdanau_fast::gpu {

const Kernels kernels_f32 = kernels_of<float>();

}  // namespace bahdanau_fast::gpu

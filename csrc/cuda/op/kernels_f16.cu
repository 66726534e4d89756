#include "attend.h"

namespace bahdanau_fast::gpu {

const Kernels kernels_f16 = kernels_of<f16>();

}  // namespace bahdanau_fast::gpu

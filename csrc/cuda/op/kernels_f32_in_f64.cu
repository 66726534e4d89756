#include "attend.h"

namespace bahdanau_fast::gpu {

const Kernels kernels_f32_in_f64 = kernels_of<float, double>();

}  // namespace bahdanau_fast::gpu

#include "attend.h"

namespace bahdanau_fast::gpu {

const Kernels kernels_f64 = kernels_of<double, double>();

}  // namespace bahdanau_fast::gpu

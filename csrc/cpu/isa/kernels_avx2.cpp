#include "kernels.h"

BF_DEFINE_KERNELS(kernels_avx2)

// In the place of the header of the same name in cuda_on_host, whose fibers would run the kernels:
// launches go through csrc/cuda/runtime to the mock CUDA runtime, which notes them.
#pragma once

#define launch launch_on_fibers
#define largest_cluster largest_cluster_on_fibers
#define why_not why_not_on_fibers
#define fill_zero fill_zero_on_fibers
#include_next "device_on_host.h"
#undef launch
#undef largest_cluster
#undef why_not
#undef fill_zero

#pragma push_macro("blockDim")  // a launch has a member of this name
#undef blockDim
#include "cuda/runtime/launch.h"
#pragma pop_macro("blockDim")

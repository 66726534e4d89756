// The part of the CUDA driver that csrc/cuda calls, as cuda_runtime_api.h has that of the runtime.
#pragma once

#include "cuda_runtime_api.h"

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
using CUstream = cudaStream_t;
using CUgreenCtx = struct CUgreenCtx_st*;
enum CUdevResourceType { CU_DEV_RESOURCE_TYPE_SM = 1 };
struct CUdevResource {
  CUdevResourceType type;
  struct {
    unsigned smCount;
  } sm;
};

extern "C" {

CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx* context);
CUresult cuGreenCtxGetDevResource(CUgreenCtx context, CUdevResource* resource,
                                  CUdevResourceType type);
}

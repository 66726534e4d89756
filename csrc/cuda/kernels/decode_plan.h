// The parameters of decode.h, and its shared memory.
#pragma once

#include "problem.h"

namespace bahdanau_fast::gpu {

constexpr int kDecodeThreads = 256, kDecodeWarps = kDecodeThreads / kWarp;

struct DecodeForward {
  Problem p;
  const void* w_q = nullptr;  // (H,Dq) of T: queries are (B,Tq,Dq) and projected here
  int64_t Dq = 0;
  int cluster = 1;                // blocks that share the projection
  int64_t splits = 1, split = 1;  // parts of the keys, and keys in each
  void* context = nullptr;        // (B,Tq,Dv) of T
  void* weights = nullptr;        // (B,Tq,Tk) of fp32; may be null
  // With several splits, whose scores are where the weights go to:
  void* maxima = nullptr;       // (B,Tq,splits) of fp32, as are the sums of exp(score - maximum)
  void* sums = nullptr;         // and, times Dv, the values weighted by that
  void* contexts = nullptr;     //
  unsigned* arrived = nullptr;  // (B), zero before and after
};

template <class T, int QT>
struct DecodeShared {
  float *queries, *w, *scores, *parts, *scratch, *totals;
  int64_t* counts;  // keys of the split that each query has; -1 - that if its weights are uniform
  int* last;
  int64_t bytes, width;

  __host__ __device__ DecodeShared(char* base, const DecodeForward& d) {
    Carver from{base};
    width = ceil_div(d.p.H, 32) * 32;
    queries = from.take<float>(QT * width);
    w = from.take<float>(width);
    scores = from.take<float>(d.p.Tq * d.split);
    parts = from.take<float>(larger(kDecodeWarps * QT * kWarp * kVector<T>, d.splits));
    scratch = from.take<float>(kDecodeWarps);
    totals = from.take<float>(d.p.Tq);
    counts = from.take<int64_t>(d.p.Tq);
    last = from.take<int>(1);
    bytes = from.used;
  }
};

}  // namespace bahdanau_fast::gpu

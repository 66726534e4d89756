// The parameters of decode.h, how it cuts its work, and its shared memory.
#pragma once

#include "problem.h"

namespace bahdanau_fast::gpu {

constexpr int kStages = 2;               // of a warp's ring: one is on its way while one is read
constexpr int kMostWarps = 4;            // of a block
static_assert(8 * kMostWarps <= kWarp);  // a lane for each warp of the largest cluster

// Where the parts of shared memory are, in bytes, and how large: computed once, on the host.
struct DecodeLayout {
  int width = 0;       // of a key, in whole pieces of 16 bytes
  int values = 0;      // of the columns of a group of the values, likewise
  int stage = 0;       // elements of a stage
  int warp_bytes = 0;  // of a warp's ring, where its part of the context is at the end
  int queries = 0, w = 0, scores = 0, scratch = 0, maxima = 0, sums = 0, counts = 0, seen = 0;
  int bytes = 0;
};

struct DecodeForward : Forward {
  DecodeLayout layout;
  int cluster = 1;                // blocks that share the projection, and of a row its splits
  int warps = kMostWarps;         // of a block
  int64_t query_groups = 1;       // of QT queries
  int64_t column_groups = 1;      // of the values
  int64_t splits = 1, split = 1;  // parts of the keys, and keys in each
  // Where the splits of a row are in several clusters, for combine_splits, all of fp32:
  void* scores = nullptr;    // (B,Tq,Tk), where the weights go to if those are of fp32
  void* maxima = nullptr;    // (B,Tq,splits), as are the sums of exp(score - maximum)
  void* sums = nullptr;      // and, per column, the values weighted by that:
  void* contexts = nullptr;  // (B,Tq,splits,width)
  int64_t width = 0;         // Dv, in whole pieces of four
};

// What a kernel for QT queries, which keeps `floats` columns of a context in each lane, takes.
template <class T, int QT, int floats>
struct DecodeSizes {
  static constexpr int U = kVector<T>, columns = kWarp * floats;
  static constexpr int KU = sizeof(T) == 2 && floats == 16 ? 2 : 1;  // keys of a stage
  static constexpr int blocks = QT > 1 ? 2 : 3;                      // of a multiprocessor

  static DecodeLayout layout(const DecodeForward& d) {
    DecodeLayout to;
    to.width = int(ceil_div(d.p.H, U)) * U;
    to.values = int(ceil_div(smaller(d.p.Dv, columns), U)) * U;
    to.stage = KU * (to.width + to.values);
    to.warp_bytes =
        int(larger(kStages * to.stage * int(sizeof(T)), QT * columns * int(sizeof(float))));
    Carver from{nullptr};
    from.take<char>(int64_t(d.warps) * to.warp_bytes);
    const auto offset = [&](int64_t bytes) {
      const int64_t begin = from.used;
      from.take<char>(bytes);
      return int(begin);
    };
    constexpr int64_t number = sizeof(float);
    to.queries = offset(QT * to.width * number);
    to.w = offset(to.width * number);
    to.scores = offset(QT * d.split * number);
    to.scratch = offset(d.warps * number);
    to.maxima = offset(d.warps * QT * number);
    to.sums = offset(d.warps * QT * number);
    to.counts = offset(QT * number);
    to.seen = offset(d.p.mask.data != nullptr ? QT * d.split : 0);
    to.bytes = int(from.used);
    return to;
  }
};

struct DecodeShared {
  const DecodeLayout& layout;
  char* const rings = shared_memory();
  float *const queries = at<float>(layout.queries), *const w = at<float>(layout.w);
  float *const scores = at<float>(layout.scores), *const scratch = at<float>(layout.scratch);
  float *const maxima = at<float>(layout.maxima), *const sums = at<float>(layout.sums);
  int* const counts = at<int>(layout.counts);  // of valid keys; -1 - that for uniform weights
  bool* const seen = at<bool>(layout.seen);    // (QT,split), where there is a mask

  template <class X>
  __device__ X* at(int offset) const {
    return reinterpret_cast<X*>(rings + offset);
  }
};

template <class T>
__device__ __forceinline__ void store_weight(const DecodeForward& d, float x, int64_t at) {
  if (d.narrow)
    narrow(x, static_cast<T*>(d.weights) + at);
  else
    static_cast<float*>(d.weights)[at] = x;
}

}  // namespace bahdanau_fast::gpu

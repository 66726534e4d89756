// The parameters of decode.h, how it cuts its work, and its shared memory.
#pragma once

#include "problem.h"

namespace bahdanau_fast::gpu {

constexpr int kStages = 2;               // of a warp's ring: one is on its way while one is read
constexpr int kMostWarps = 4;            // of a block
static_assert(8 * kMostWarps <= kWarp);  // a lane for each warp of the largest cluster

// Where the parts of shared memory are, in bytes, and how large: computed once, on the host.
struct DecodeLayout {
  int width = 0;    // of a key, in whole pieces of 16 bytes
  int values = 0;   // of the columns of a group of the values, likewise
  int stage = 0;    // elements of a stage
  int of_warp = 0;  // of a warp's ring, where its part of the context is at the end
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
    DecodeLayout of;
    of.width = int(ceil_div(d.p.H, U)) * U;
    of.values = int(ceil_div(smaller(d.p.Dv, columns), U)) * U;
    of.stage = KU * (of.width + of.values);
    of.of_warp =
        int(larger(kStages * of.stage * int(sizeof(T)), QT * columns * int(sizeof(float))));
    Carver from{nullptr};
    from.take<char>(int64_t(d.warps) * of.of_warp);
    const auto place = [&](int64_t bytes) {
      const int64_t at = from.used;
      from.take<char>(bytes);
      return int(at);
    };
    constexpr int64_t number = sizeof(float);
    of.queries = place(QT * of.width * number);
    of.w = place(of.width * number);
    of.scores = place(QT * d.split * number);
    of.scratch = place(d.warps * number);
    of.maxima = place(d.warps * QT * number);
    of.sums = place(d.warps * QT * number);
    of.counts = place(QT * number);
    of.seen = place(d.p.mask.data != nullptr ? QT * d.split : 0);
    of.bytes = int(from.used);
    return of;
  }
};

struct DecodeShared {
  char* rings;
  float *queries, *w, *scores, *scratch, *maxima, *sums;
  int* counts;  // keys of the split that each query has; -1 - that if its weights are uniform
  bool* seen;   // (QT,split), where there is a mask

  __device__ DecodeShared(char* base, const DecodeLayout& of)
      : rings(base),
        queries(reinterpret_cast<float*>(base + of.queries)),
        w(reinterpret_cast<float*>(base + of.w)),
        scores(reinterpret_cast<float*>(base + of.scores)),
        scratch(reinterpret_cast<float*>(base + of.scratch)),
        maxima(reinterpret_cast<float*>(base + of.maxima)),
        sums(reinterpret_cast<float*>(base + of.sums)),
        counts(reinterpret_cast<int*>(base + of.counts)),
        seen(reinterpret_cast<bool*>(base + of.seen)) {}
};

template <class T>
__device__ __forceinline__ void store_weight(const DecodeForward& d, float x, int64_t at) {
  if (d.narrow)
    narrow(x, static_cast<T*>(d.weights) + at);
  else
    static_cast<float*>(d.weights)[at] = x;
}

}  // namespace bahdanau_fast::gpu

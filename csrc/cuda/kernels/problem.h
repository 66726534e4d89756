// What all kernels need of a problem: rows, key counts, dropout, loads and stores of 16 bytes.
#pragma once

#include "common/lengths.h"
#include "common/philox.h"
#include "device.h"
#include "types.h"

namespace bahdanau_fast::gpu {

template <class T>
__device__ inline const T* row_at(const View& view, int64_t b, int64_t i) {
  return static_cast<const T*>(view.data) + b * view.batch_stride + i * view.row_stride;
}

// How many keys query (b, i) has; 0: none is valid, and the softmax is uniform over all of them.
__device__ inline int64_t key_count(const Problem& p, int64_t b, int64_t i) {
  const int64_t at = b * p.lens.batch_stride + i * p.lens.row_stride;
  const void* data = p.lens.data;
  double len = 0;
  switch (p.lens.type) {
    case LenType::none:
      return p.Tk;
    case LenType::i64:
      len = double(static_cast<const int64_t*>(data)[at]);
      break;
    case LenType::i32:
      len = static_cast<const int32_t*>(data)[at];
      break;
    case LenType::i16:
      len = static_cast<const int16_t*>(data)[at];
      break;
    case LenType::i8:
      len = static_cast<const int8_t*>(data)[at];
      break;
    case LenType::u8:
      len = static_cast<const uint8_t*>(data)[at];
      break;
    case LenType::u16:
      len = static_cast<const uint16_t*>(data)[at];
      break;
    case LenType::u32:
      len = static_cast<const uint32_t*>(data)[at];
      break;
    case LenType::u64:
      len = double(static_cast<const uint64_t*>(data)[at]);
      break;
    case LenType::f32:
      len = static_cast<const float*>(data)[at];
      break;
    case LenType::f64:
      len = static_cast<const double*>(data)[at];
      break;
    case LenType::bf16:
      len = widen(static_cast<const bf16*>(data)[at]);
      break;
    case LenType::f16:
      len = widen(static_cast<const f16*>(data)[at]);
      break;
  }
  return keys_within(len, p.Tk);
}

// What dropout multiplies a weight by (common/philox.h).
struct Dropout {
  uint64_t seed = 0, threshold = 0;
  double scale = 1.0;
  bool on = false;

  __device__ explicit Dropout(const Problem& p) {
    if (p.seed == nullptr) return;
    on = true;
    seed = uint64_t(*p.seed);
    threshold = dropout_threshold(p.dropout_p);
    scale = dropout_scale(p.dropout_p);
  }

  // The factor of weight (row, j), row = b * Tq + i.
  template <class A>
  __device__ A factor(int64_t row, int64_t j) const {
    if (!on) return A(1);
    const PhiloxBlock block = philox(seed, uint64_t(row), uint32_t(j >> 2));
    const int lane = int(j & 3);
    const uint32_t drawn = lane == 0   ? block.lane[0]
                           : lane == 1 ? block.lane[1]
                           : lane == 2 ? block.lane[2]
                                       : block.lane[3];
    return drawn >= threshold ? A(scale) : A(0);
  }
};

// Elements of T in 16 bytes.
template <class T>
constexpr int kVector = 16 / int(sizeof(T));

// True if every row of `columns` of a view consists of aligned pieces of 16 bytes.
template <class T>
__device__ inline bool in_vectors(const View& view, int64_t columns) {
  return (reinterpret_cast<uint64_t>(view.data) & 15) == 0 && view.batch_stride % kVector<T> == 0 &&
         view.row_stride % kVector<T> == 0 && columns % kVector<T> == 0;
}

// Hidden units (columns) that a lane holds at a time: 16 bytes, or 32 in fp64.
template <class T>
constexpr int kUnits = sizeof(T) == 8 ? 4 : kVector<T>;

// row[h..h+kUnits) in A, zero from `end` on; `vectors` only if in_vectors().
template <class T, class A, bool vectors>
__device__ __forceinline__ void load_units(const T* row, int64_t h, int64_t end, A* out) {
  constexpr int V = kVector<T>;
#pragma unroll
  for (int part = 0; part < kUnits<T>; part += V, out += V) {
    const int64_t first = h + part;
    if constexpr (!vectors) {
#pragma unroll
      for (int k = 0; k < V; ++k) out[k] = first + k < end ? A(widen(row[first + k])) : A(0);
    } else {
      Bytes16 bytes{};
      if (part == 0 || first < end) bytes = load16(row + first);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if constexpr (sizeof(T) == 2)
          out[k] = A(widen(T{uint16_t(bytes.word[k / 2] >> (k % 2 * 16))}));
        else if constexpr (sizeof(T) == 4)
          out[k] = A(from_bits(bytes.word[k]));
        else
          out[k] = A(from_bits(bytes.word[2 * k], bytes.word[2 * k + 1]));
      }
    }
  }
}

// x into row[h..h+kUnits), up to `end`.
template <class T, class A, bool vectors>
__device__ __forceinline__ void store_units(const A* x, T* row, int64_t h, int64_t end) {
  struct alignas(16) Piece {
    T x[kVector<T>];
  };
#pragma unroll
  for (int part = 0; part < kUnits<T>; part += kVector<T>) {
    Piece piece;
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) narrow(x[part + k], &piece.x[k]);
    const int64_t first = h + part;
    if constexpr (vectors) {
      if (first < end) *reinterpret_cast<Piece*>(row + first) = piece;
    } else {
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k)
        if (first + k < end) row[first + k] = piece.x[k];
    }
  }
}

}  // namespace bahdanau_fast::gpu

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

template <class X>
__device__ inline int64_t keys_within_len(const Lens& lens, int64_t index, int64_t Tk) {
  if constexpr (std::is_same_v<X, double>)
    return keys_within_bits(static_cast<const uint64_t*>(lens.data)[index], Tk);
  else if constexpr (std::is_arithmetic_v<X>)
    return keys_within(static_cast<const X*>(lens.data)[index], Tk);
  else
    return keys_within(widen(static_cast<const X*>(lens.data)[index]), Tk);
}

__device__ inline int64_t keys_within_lens(const Problem& p, int64_t b, int64_t i) {
  const int64_t index = b * p.lens.batch_stride + i * p.lens.row_stride;
  switch (p.lens.type) {
#define BAHDANAU_FAST_CASE(name, type) \
  case LenType::name:                  \
    return keys_within_len<type>(p.lens, index, p.Tk);
    BAHDANAU_FAST_LEN_TYPES(BAHDANAU_FAST_CASE)
#undef BAHDANAU_FAST_CASE
    case LenType::none:
      return p.Tk;
  }
  return 0;
}

// Whether the mask lets query (b, i) see key j.
__device__ inline bool sees(const Problem& p, int64_t b, int64_t i, int64_t j) {
  const Mask& m = p.mask;
  return m.data == nullptr || m.data[b * m.batch_stride + i * m.row_stride + j * m.key_stride];
}

// How many keys query (b, i) has, those that the mask hides among them; 0: it sees none, and the
// softmax is uniform over all of them. For a whole warp, which looks at the mask together.
__device__ inline int64_t key_count(const Problem& p, int64_t b, int64_t i) {
  const int64_t keys = keys_within_lens(p, b, i);
  if (p.mask.data == nullptr) return keys;
  for (int64_t j = threadIdx.x % kWarp; j - threadIdx.x % kWarp < keys; j += kWarp)
    if (warp_max(j < keys && sees(p, b, i, j) ? 1.0f : 0.0f) > 0) return keys;
  return 0;
}

// What dropout multiplies a weight by (common/philox.h).
struct Dropout {
  uint64_t seed = 0, threshold;
  float scale;
  bool on;

  __device__ explicit Dropout(const Problem& p)
      : threshold(p.threshold), scale(p.scale), on(p.seed != nullptr) {
    if (on) seed = uint64_t(*p.seed);
  }

  // The factor of weight (row, j), row = b * Tq + i.
  __device__ float factor(int64_t row, int64_t j) const {
    if (!on) return 1.0f;
    const PhiloxBlock block = philox(seed, uint64_t(row), uint32_t(j >> 2));
    const int lane = int(j & 3);
    const uint32_t drawn = lane == 0   ? block.lane[0]
                           : lane == 1 ? block.lane[1]
                           : lane == 2 ? block.lane[2]
                                       : block.lane[3];
    return drawn >= threshold ? scale : 0.0f;
  }
};

// Elements of T in 16 bytes: what a lane holds at a time.
template <class T>
constexpr int kVector = 16 / int(sizeof(T));

// True if every row of `columns` of a view consists of aligned pieces of 16 bytes.
template <class T>
inline bool in_vectors(const View& view, int64_t columns) {
  return (reinterpret_cast<uint64_t>(view.data) & 15) == 0 && view.batch_stride % kVector<T> == 0 &&
         view.row_stride % kVector<T> == 0 && columns % kVector<T> == 0;
}

// The numbers in 16 bytes, in fp32.
template <class T>
__device__ __forceinline__ void unpack(const Bytes16& bytes, float* out) {
#pragma unroll
  for (int k = 0; k < kVector<T>; ++k) {
    if constexpr (sizeof(T) == 2)
      out[k] = widen(T{uint16_t(bytes.word[k / 2] >> (k % 2 * 16))});
    else
      out[k] = from_bits(bytes.word[k]);
  }
}

// row[h..h+kVector) in fp32, zero from `end` on; `vectors` only if in_vectors() was true.
template <class T, bool vectors>
__device__ __forceinline__ void load_units(const T* row, int64_t h, int64_t end, float* out) {
  if constexpr (vectors) {
    unpack<T>(load16(row + h), out);
  } else {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) out[k] = h + k < end ? widen(row[h + k]) : 0.0f;
  }
}

// Attention weights, or their gradients: of fp32, or `narrow` of T.
template <class T>
__device__ __forceinline__ float weight_at(const void* weights, bool narrow, int64_t at) {
  return narrow ? widen(static_cast<const T*>(weights)[at])
                : static_cast<const float*>(weights)[at];
}

template <class T>
__device__ __forceinline__ float grad_weight_at(const View& grads, bool narrow, int64_t b,
                                                int64_t i, int64_t j) {
  return weight_at<T>(grads.data, narrow, b * grads.batch_stride + i * grads.row_stride + j);
}

// x into row[h..h+kVector), up to `end`.
template <class T, bool vectors>
__device__ __forceinline__ void store_units(const float* x, T* row, int64_t h, int64_t end) {
  struct alignas(16) Piece {
    T x[kVector<T>];
  };
  Piece piece;
#pragma unroll
  for (int k = 0; k < kVector<T>; ++k) narrow(x[k], &piece.x[k]);
  if constexpr (vectors) {
    if (h < end) *reinterpret_cast<Piece*>(row + h) = piece;
  } else {
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k)
      if (h + k < end) row[h + k] = piece.x[k];
  }
}

}  // namespace bahdanau_fast::gpu

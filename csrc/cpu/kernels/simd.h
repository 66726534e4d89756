// Vector extensions of GCC and Clang: one source for every instruction set. Everything here has
// internal linkage, so that the linker cannot mix instruction sets.
#pragma once

#include <cstring>
#include <type_traits>

#include "types.h"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bahdanau_fast {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class A>
struct VecOf {
  static constexpr int lanes = kVectorBytes / sizeof(A);
  using Int = typename std::conditional<sizeof(A) == 4, int32_t, int64_t>::type;
  typedef A type __attribute__((vector_size(kVectorBytes)));
  typedef Int ints __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vec = typename VecOf<A>::type;
template <class A>
using IntVec = typename VecOf<A>::ints;
template <class A>
constexpr int kLanes = VecOf<A>::lanes;

#define BF_INLINED __attribute__((always_inline))  // of a lambda
#define BF_INLINE inline BF_INLINED

template <class A>
BF_INLINE Vec<A> splat(A x) {
  return x - Vec<A>{};  // x - 0 keeps the sign of zero; the compiler makes it one broadcast
}

template <class To, class From>
BF_INLINE To bitcast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bitcast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class A>
BF_INLINE Vec<A> abs(Vec<A> x) {
  const IntVec<A> mask = ~(IntVec<A>{} + (typename VecOf<A>::Int(1) << (sizeof(A) * 8 - 1)));
  return bitcast<Vec<A>>(bitcast<IntVec<A>>(x) & mask);
}

// The larger, and the smaller, of x and y; y where one is NaN. Of a choice GCC makes two
// instructions.
template <class A>
BF_INLINE Vec<A> max(Vec<A> x, Vec<A> y) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) return (Vec<A>)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
  if constexpr (sizeof(A) == 4) return (Vec<A>)_mm256_max_ps((__m256)x, (__m256)y);
#endif
  return x > y ? x : y;
}

template <class A>
BF_INLINE Vec<A> min(Vec<A> x, Vec<A> y) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) return (Vec<A>)_mm512_min_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
  if constexpr (sizeof(A) == 4) return (Vec<A>)_mm256_min_ps((__m256)x, (__m256)y);
#endif
  return x < y ? x : y;
}

// Lane i is lane from(i) of x and y, one behind the other.
template <class A, class From>
BF_INLINE Vec<A> lanes_of(Vec<A> x, Vec<A> y, const From& from) {
#if defined(__clang__)
  Vec<A> out;
  for (int i = 0; i < kLanes<A>; ++i)
    out[i] = from(i) < kLanes<A> ? x[from(i)] : y[from(i) - kLanes<A>];
  return out;
#else
  IntVec<A> index;
  for (int i = 0; i < kLanes<A>; ++i) index[i] = from(i);
  return __builtin_shuffle(x, y, index);
#endif
}

// Combines x with itself rotated by n / 2 lanes, then by n / 4 and so on: in the end every lane
// holds the result.
template <class A, int n = kLanes<A>, class Combine>
BF_INLINE A reduce(Vec<A> x, const Combine& combine) {
  if constexpr (n == 1) {
    return x[0];
  } else {
    const Vec<A> other = lanes_of<A>(x, x, [](int i) { return (i + n / 2) % kLanes<A>; });
    return reduce<A, n / 2>(combine(x, other), combine);
  }
}

template <class A>
BF_INLINE A sum(Vec<A> x) {
  return reduce<A>(x, [](Vec<A> a, Vec<A> b) { return a + b; });
}

// out[k] = sum(v[k]), to the bit, for a power of two of vectors, which are overwritten. Each step
// adds the halves of parts of n lanes, and brings the parts of two vectors into one.
template <class A, int count, int n = kLanes<A>>
BF_INLINE void sums(Vec<A>* v, A* out) {
  if constexpr (n == 1 && count == 1) {
    std::memcpy(out, v, sizeof(*v));
  } else if constexpr (n == kLanes<A> && count > n) {
    sums<A, count / 2>(v, out);
    sums<A, count / 2>(v + count / 2, out + count / 2);
  } else if constexpr (count == 1) {
    for (int k = 0; k < kLanes<A> / n; ++k) {
      const Vec<A> part = lanes_of<A>(v[0], v[0], [k](int i) { return (k * n + i) % kLanes<A>; });
      out[k] = reduce<A, n>(part, [](Vec<A> a, Vec<A> b) { return a + b; });
    }
  } else {
    constexpr int L = kLanes<A>, half = n / 2;
    for (int k = 0; k < count / 2; ++k) {
      const auto from = [](int i) { return (i / half % 2) * L + i / n * n + i % half; };
      const Vec<A> low = lanes_of<A>(v[k], v[k + count / 2], from);
      const Vec<A> high =
          lanes_of<A>(v[k], v[k + count / 2], [from](int i) { return from(i) + half; });
      v[k] = low + high;
    }
    sums<A, count / 2, half>(v, out);
  }
}

template <class A>
BF_INLINE A largest(Vec<A> x) {
  return reduce<A>(x, [](Vec<A> a, Vec<A> b) { return max<A>(a, b); });
}

// ---- scalar conversions -----------------------------------------------------------------------

BF_INLINE float widen(float x) { return x; }
BF_INLINE double widen(double x) { return x; }
BF_INLINE float widen(bf16 x) { return bitcast<float>(uint32_t(x.bits) << 16); }
BF_INLINE float widen(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  return bitcast<__fp16>(x.bits);
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  // In the place of fp32's, the exponent is too small by 112: a product corrects it, also for
  // subnormals.
  float value = bitcast<float>(magnitude << 13) * bitcast<float>(uint32_t(239) << 23);
  if (magnitude >= 0x7c00) value = bitcast<float>((magnitude << 13) | 0x7f800000);
  return bitcast<float>(bitcast<uint32_t>(value) | sign);
#endif
}

BF_INLINE void narrow(float x, float* out) { *out = x; }
BF_INLINE void narrow(double x, double* out) { *out = x; }
BF_INLINE void narrow(double x, float* out) { *out = float(x); }
BF_INLINE void narrow(float x, bf16* out) {
  uint32_t bits = bitcast<uint32_t>(x);
  bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
  out->bits = x == x ? uint16_t(bits >> 16) : uint16_t(0x7fc0);
}
BF_INLINE void narrow(float x, f16* out) {
#if defined(__F16C__)
  out->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  out->bits = bitcast<uint16_t>(__fp16(x));
#else
  const uint32_t bits = bitcast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {
    half = 0x7c00;  // rounds past the largest fp16
  } else if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 makes fp32 round at the last bit of fp16.
    half = bitcast<uint32_t>(bitcast<float>(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  out->bits = uint16_t(half | sign);
#endif
}

// ---- vector loads and stores, any alignment ---------------------------------------------------

template <class A>
BF_INLINE Vec<A> load(const A* p) {
  Vec<A> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// A vector that stays in a register. GCC would load it again for each use, and loads would then
// limit a loop of multiply-adds.
template <class A>
BF_INLINE Vec<A> load_once(const A* p) {
  Vec<A> v = load(p);
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__SSE2__)
  asm("" : "+x"(v));
#endif
  return v;
}

template <class A>
BF_INLINE void store(A* p, Vec<A> v) {
  std::memcpy(p, &v, sizeof(v));
}

// -1 in the first n lanes, 0 in the others.
template <class A>
BF_INLINE IntVec<A> first_lanes(int64_t n) {
  using Int = typename VecOf<A>::Int;
  IntVec<A> lane;
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = i;
  return lane < IntVec<A>{} + Int(n < kLanes<A> ? n : kLanes<A>);
}

// A whole vector, converted to the sum type.
template <class A, class T>
BF_INLINE Vec<A> load_as(const T* p) {
  if constexpr (sizeof(A) == sizeof(T)) {
    return load(p);
  } else if constexpr (sizeof(A) == 8) {
    typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
    Half half;
    std::memcpy(&half, p, sizeof(half));
#if defined(__AVX512F__)
    return (Vec<A>)_mm512_cvtps_pd((__m256)half);  // of a convertvector GCC makes six instructions
#elif defined(__aarch64__)
    return (Vec<A>)vcvt_f64_f32((float32x2_t)half);  // likewise
#else
    return __builtin_convertvector(half, Vec<A>);
#endif
  } else {
    typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
    Half half;
    std::memcpy(&half, p, sizeof(half));
    if constexpr (std::is_same<T, bf16>::value) {
#if defined(__aarch64__)
      return (Vec<A>)vshll_n_u16((uint16x4_t)half, 16);  // likewise
#else
      typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
      return bitcast<Vec<A>>(__builtin_convertvector(half, Bits) << 16);
#endif
    } else {
#if defined(__AVX512F__)
      return (Vec<A>)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
      return (Vec<A>)_mm256_cvtph_ps((__m128i)half);
#elif defined(__aarch64__)
      return (Vec<A>)vcvt_f32_f16((float16x4_t)half);
#else
      Vec<A> v{};
      for (int i = 0; i < kLanes<A>; ++i) v[i] = A(widen(p[i]));
      return v;
#endif
    }
  }
}

// As many vectors as it pays to load one right after the other. Of vectors of half a cache line
// AMD's Zen 3 reads two in a cycle if they are the halves of one line, and not if they are the same
// half of two: row by row, loads would limit a product.
constexpr int kNeighbours = kVectorBytes == 32 ? 2 : 1;

// Vectors that follow each other, loaded one right after the other and kept in registers.
template <class A, int count, class T>
BF_INLINE void load_neighbours(const T* p, Vec<A>* out) {
  for (int k = 0; k < count; ++k) out[k] = load_as<A>(p + k * kLanes<A>);
#if defined(__AVX2__)
  if constexpr (count == 2) asm("" : "+x"(out[0]), "+x"(out[1]));
#endif
}

// The first n lanes from memory, the others zero; n >= 1.
template <class A, class T>
BF_INLINE Vec<A> load_as(const T* p, int64_t n) {
  if (n >= kLanes<A>) return load_as<A>(p);
#if defined(__AVX512F__)
  const uint32_t mask = (uint32_t(1) << n) - 1;
  if constexpr (sizeof(T) == 4 && sizeof(A) == 4) return (Vec<A>)_mm512_maskz_loadu_ps(mask, p);
  if constexpr (sizeof(T) == 8 && sizeof(A) == 8) return (Vec<A>)_mm512_maskz_loadu_pd(mask, p);
#endif
  A lanes[kLanes<A>] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = A(widen(p[i]));
  return load(lanes);
}

// The first n lanes to memory; n of zero or less stores nothing.
template <class A, class T>
BF_INLINE void store_as(T* p, Vec<A> v, int64_t n) {
  if constexpr (sizeof(A) == sizeof(T)) {
    if (n >= kLanes<A>) return store(p, v);
#if defined(__AVX512F__)
    const uint32_t mask = n > 0 ? (uint32_t(1) << n) - 1 : 0;
    if constexpr (sizeof(A) == 4) return _mm512_mask_storeu_ps(p, mask, (__m512)v);
    if constexpr (sizeof(A) == 8) return _mm512_mask_storeu_pd(p, mask, (__m512d)v);
#endif
  } else if constexpr (std::is_same<T, float>::value) {
    if (n >= kLanes<A>) {
      typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
#if defined(__AVX512F__)
      const Half half = (Half)_mm512_cvtpd_ps((__m512d)v);
#else
      const Half half = __builtin_convertvector(v, Half);
#endif
      std::memcpy(p, &half, sizeof(half));
      return;
    }
  } else if constexpr (std::is_same<T, bf16>::value) {
    if (n >= kLanes<A>) {
      typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
      typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
      Bits bits = bitcast<Bits>(v);
      bits += 0x7fff + ((bits >> 16) & 1);
      bits = bitcast<Bits>(v == v) & (bits >> 16);
      bits |= bitcast<Bits>(v != v) & 0x7fc0;
      const Half half = __builtin_convertvector(bits, Half);
      std::memcpy(p, &half, sizeof(half));
      return;
    }
  }
#if defined(__AVX512F__) || defined(__aarch64__)
  if constexpr (std::is_same<T, f16>::value) {
    if (n >= kLanes<A>) {
#if defined(__AVX512F__)
      const __m256i half = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#else
      const float16x4_t half = vcvt_f16_f32((float32x4_t)v);
#endif
      std::memcpy(p, &half, sizeof(half));
      return;
    }
  }
#endif
  for (int64_t i = 0; i < (n < kLanes<A> ? n : kLanes<A>); ++i) narrow(v[i], p + i);
}

// 1 / y. With AVX-512 in fp32, where division is slow: an estimate and a Newton step (2^-23
// relative).
template <class A>
BF_INLINE Vec<A> reciprocal(Vec<A> y) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) {
    const Vec<A> r = (Vec<A>)_mm512_rcp14_ps((__m512)y);
    return r + r * (1 - y * r);
  }
#endif
  return 1 / y;
}

template <class A>
BF_INLINE Vec<A> quotient(Vec<A> x, Vec<A> y) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) return x * reciprocal<A>(y);
#endif
  return x / y;
}

// n / d of a tanh from an inverse of d that went through many roundings: in fp32 they would show in
// 1 - tanh^2, which is 0 where tanh is rounded to 1.
template <class A>
BF_INLINE Vec<A> rounded_once(Vec<A> n, Vec<A> d, Vec<A> inverse) {
  const Vec<A> quotient = n * inverse;
  if constexpr (sizeof(A) == 8) return quotient;
  return quotient + (n - quotient * d) * inverse;
}

}  // namespace
}  // namespace bahdanau_fast

// Block hash of the fingerprints of memory (fingerprint.cpp).
//
// NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999): over the 32-bit words m of a block
//
//   nh(m) = sum_i (m[2i] + key[2i] mod 2^32) * (m[2i+1] + key[2i+1] mod 2^32)   mod 2^64
//
// Two different blocks have the same nh for at most one key in 2^32. With two keys, both
// results are the same for at most one pair of keys in 2^64.
// Reads each byte once; two multiplications per eight bytes, so that memory is the limit.
#pragma once

#include "simd.h"
#include "types.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace bahdanau_fast {
namespace {

typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint64_t Sums __attribute__((vector_size(kVectorBytes)));

// The 64-bit product of each pair of 32-bit words.
BF_INLINE Sums pair_products(Words x) {
#if defined(__AVX512F__)
  return (Sums)_mm512_mul_epu32((__m512i)x, _mm512_srli_epi64((__m512i)x, 32));
#elif defined(__AVX2__)
  return (Sums)_mm256_mul_epu32((__m256i)x, _mm256_srli_epi64((__m256i)x, 32));
#elif defined(__SSE2__)
  return (Sums)_mm_mul_epu32((__m128i)x, _mm_srli_epi64((__m128i)x, 32));
#elif defined(__aarch64__)
  return (Sums)vmull_u32(vmovn_u64((uint64x2_t)x), vshrn_n_u64((uint64x2_t)x, 32));
#else
  const Sums pairs = bitcast<Sums>(x);
  return (pairs & 0xffffffff) * (pairs >> 32);
#endif
}

BF_INLINE uint64_t total(Sums x) {
  uint64_t sum = 0;
  for (size_t i = 0; i < sizeof(Sums) / sizeof(uint64_t); ++i) sum += x[i];
  return sum;
}

// key: two keys of kHashWords words each; out: two numbers for each block.
inline void hash_blocks(const void* from, int64_t blocks, const uint32_t* key, uint64_t* out) {
  constexpr int64_t kStep = kVectorBytes / sizeof(uint32_t);
  const char* at = static_cast<const char*>(from);
  for (int64_t block = 0; block < blocks; ++block, at += kHashBytes) {
    Sums first{}, second{};
    for (int64_t i = 0; i < kHashWords; i += kStep) {
      Words words, one, other;
      std::memcpy(&words, at + i * sizeof(uint32_t), sizeof(words));
      std::memcpy(&one, key + i, sizeof(one));
      std::memcpy(&other, key + kHashWords + i, sizeof(other));
      first += pair_products(words + one);
      second += pair_products(words + other);
    }
    out[2 * block] = total(first);
    out[2 * block + 1] = total(second);
  }
}

}  // namespace
}  // namespace bahdanau_fast

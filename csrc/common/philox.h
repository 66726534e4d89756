// Which attention weights survive dropout: Philox4x32-10 (Salmon et al. 2011), counted by place.
//
// The number of weight (row, j), row = b * Tq + i, is lane j % 4 of the block with the counter
// (j / 4, row low, row high, 0) under the key (seed low, seed high): the same in forward and
// backward, in any backend, and for any number of threads. A weight survives if its number is at
// least dropout_threshold(p), and is then multiplied by dropout_scale(p).
//
// Internal linkage: the CPU kernels are compiled for several instruction sets.
#pragma once

#include <cstdint>

namespace bahdanau_fast {
namespace {

struct PhiloxBlock {
  uint32_t lane[4];
};

constexpr PhiloxBlock philox(uint64_t seed, uint64_t row, uint32_t block) {
  uint32_t c0 = block, c1 = uint32_t(row), c2 = uint32_t(row >> 32), c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// ceil(p 2^32): of the 2^32 numbers, so many are dropped.
constexpr uint64_t dropout_threshold(double p) {
  const double exact = p * 4294967296.0;
  const uint64_t whole = uint64_t(exact);
  return whole + (double(whole) < exact ? 1 : 0);
}

constexpr double dropout_scale(double p) { return p < 1.0 ? 1.0 / (1.0 - p) : 0.0; }

// The key of a decoder's step t, whose weights have the places of one call.
constexpr uint64_t seed_of_step(uint64_t seed, int64_t t) {
  return seed + static_cast<uint64_t>(t) * 0x9e3779b97f4a7c15u;
}

}  // namespace
}  // namespace bahdanau_fast

// Which attention weights survive dropout: Philox4x32-10 (Salmon et al. 2011), counted by place.
//
// The number of weight (row, j), row = b * Tq + i, is lane j % 4 of the block with the counter
// (j / 4, row low, row high, 0) under the key (seed low, seed high): the same in forward and
// backward, in any backend, and for any number of threads.
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

// row[j - j0] *= 0 or 1 / (1 - p), for j in [j0, j1).
template <class A>
void drop_weights(uint64_t seed, double p, int64_t row, int64_t j0, int64_t j1, A* weights) {
  const A scale = p < 1.0 ? A(1.0 / (1.0 - p)) : A(0);
  const double threshold = p * 4294967296.0;
  for (int64_t j = j0; j < j1;) {
    const PhiloxBlock block = philox(seed, uint64_t(row), uint32_t(j >> 2));
    for (int64_t end = (j | 3) + 1; j < end && j < j1; ++j)
      weights[j - j0] *= double(block.lane[j & 3]) >= threshold ? scale : A(0);
  }
}

}  // namespace
}  // namespace bahdanau_fast

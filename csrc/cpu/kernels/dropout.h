// Dropout of a row of attention weights.
#pragma once

#include "common/philox.h"

namespace bahdanau_fast {
namespace {

// row[j - j0] *= 0 or 1 / (1 - p), for j in [j0, j1).
template <class A>
void drop_weights(uint64_t seed, double p, int64_t row, int64_t j0, int64_t j1, A* weights) {
  const A scale = A(dropout_scale(p));
  const uint64_t threshold = dropout_threshold(p);
  for (int64_t j = j0; j < j1;) {
    const PhiloxBlock block = philox(seed, uint64_t(row), uint32_t(j >> 2));
    for (int64_t end = (j | 3) + 1; j < end && j < j1; ++j)
      weights[j - j0] *= block.lane[j & 3] >= threshold ? scale : A(0);
  }
}

}  // namespace
}  // namespace bahdanau_fast

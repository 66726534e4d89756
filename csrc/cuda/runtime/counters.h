// Counters that launches use and set back to zero, kept from one call to the next.
#pragma once

#include <cstdint>

namespace bahdanau_fast::gpu {

// `count` counters on the current GPU, cuda:device, for launches on `stream`; null if too few are
// left.
//
// The launches of a stream run one after another and share counters. A captured launch may be
// replayed at any time, at the same time as any other, and gets counters of its own, for good. Two
// instances of one graph have them, as they have its results, in common.
unsigned* counters_of(int device, void* stream, int64_t count);

}  // namespace bahdanau_fast::gpu

// Numbers that launches count by and leave at zero, kept from one call to the next.
#pragma once

#include <cstdint>

namespace bahdanau_fast::gpu {

// Room for `count` of them on the current GPU, cuda:device, for launches on `stream`; null where
// none is left.
//
// Launches of a stream follow each other and share theirs. A launch that is captured may be
// replayed at any time, beside any other, and gets some of its own for good.
unsigned* counters_of(int device, void* stream, int64_t count);

}  // namespace bahdanau_fast::gpu

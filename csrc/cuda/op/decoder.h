// Whether all steps of a decoder are one launch. No torch in here.
#pragma once

#include <cstdint>

namespace bahdanau_fast::gpu {

// What is against it on the current GPU, in 16 bits; null if nothing is. B batch rows, Tk keys, F
// hidden units of the attention, Dv features of the values, H units of the cells; of V tokens at
// most T steps are written, or V is 0 and inputs are given.
const char* why_not_decode(bool lstm, bool backward, int64_t B, int64_t Tk, int64_t F, int64_t Dv,
                           int64_t H, int64_t V, int64_t T);

}  // namespace bahdanau_fast::gpu

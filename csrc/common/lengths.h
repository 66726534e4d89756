// The rule of valid_lens. No torch in here.
#pragma once

#include <cstdint>

namespace bahdanau_fast {

// How many of Tk keys have an index j < length: ceil(length), limited to [0, Tk]. NaN gives 0.
// Where the result is 0, the softmax is uniform over all Tk keys.
constexpr int64_t keys_within(double length, int64_t Tk) {
  if (!(length > 0.0)) return 0;
  if (length >= double(Tk)) return Tk;
  const int64_t whole = int64_t(length);
  return whole + (double(whole) < length ? 1 : 0);
}

}  // namespace bahdanau_fast

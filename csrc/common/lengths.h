// The rule of valid_lens. No torch in here.
#pragma once

#include <cstdint>
#include <type_traits>

namespace bahdanau_fast {

// How many of Tk keys have an index j < length: ceil(length), limited to [0, Tk]. NaN gives 0.
// Where the result is 0, the softmax is uniform over all Tk keys.
template <class X>
constexpr int64_t keys_within(X length, int64_t Tk) {
  if (!(length > X(0))) return 0;
  if constexpr (std::is_integral_v<X>) {
    return uint64_t(length) < uint64_t(Tk) ? int64_t(length) : Tk;
  } else {
    if (length >= X(int64_t{1} << 62)) return Tk;
    const int64_t whole = int64_t(length), keys = whole + (X(whole) < length ? 1 : 0);
    return keys < Tk ? keys : Tk;
  }
}
static_assert(keys_within(uint64_t{1} << 63, 7) == 7 && keys_within(~0u, 7) == 7);

// The same of the bits of a double, by integers alone: GPUs have little fp64.
constexpr int64_t keys_within_bits(uint64_t length, int64_t Tk) {
  constexpr uint64_t infinity = uint64_t{0x7ff} << 52, one = uint64_t{1} << 52;
  if (length == 0 || length > infinity) return 0;  // zero; negative or NaN
  const int exponent = int(length >> 52) - 1023;
  if (exponent >= 62) return Tk;
  if (exponent < 0) return keys_within(1, Tk);
  const uint64_t digits = (length & (one - 1)) | one;
  const uint64_t whole = exponent < 52 ? digits >> (52 - exponent) : digits << (exponent - 52);
  const bool more = exponent < 52 && digits << (12 + exponent) != 0;
  return keys_within(whole + more, Tk);
}

}  // namespace bahdanau_fast

// Integers and bits.
#pragma once

#include <type_traits>

#include "../state.h"

namespace ptx {

// Calls f with a number of the type that a part of an opcode names; false if it names none.
template <class F>
bool with_integer(const std::string& type, F f) {
  if (type == "s16") return f(int16_t{}), true;
  if (type == "u16" || type == "b16") return f(uint16_t{}), true;
  if (type == "s32") return f(int32_t{}), true;
  if (type == "u32" || type == "b32") return f(uint32_t{}), true;
  if (type == "s64") return f(int64_t{}), true;
  if (type == "u64" || type == "b64") return f(uint64_t{}), true;
  return false;
}

// d = F(a, b, ...) lane by lane.
template <class D, class F, class... S, size_t... k>
void mapped(Warp& w, const Instr& i, Mask mask, std::index_sequence<k...>) {
  D* d = w.of<D>(i.o[0]);
  const auto run = [&](const S*... from) { each(mask, [&](int l) { d[l] = F()(from[l]...); }); };
  run(w.of<S>(i.o[1 + k])...);
}
template <class D, class F, class... S>
void map(Warp& w, const Instr& i, Mask mask) {
  mapped<D, F, S...>(w, i, mask, std::index_sequence_for<S...>());
}
// The same for one type.
template <class F, class T>
void unary(Warp& w, const Instr& i, Mask mask) {
  map<T, F, T>(w, i, mask);
}
template <class F, class T>
void binary(Warp& w, const Instr& i, Mask mask) {
  map<T, F, T, T>(w, i, mask);
}
template <class F, class T>
void ternary(Warp& w, const Instr& i, Mask mask) {
  map<T, F, T, T, T>(w, i, mask);
}

// As wide as it takes to compute modulo 2^n without promotion to int.
template <class T>
using Wide = std::conditional_t<(sizeof(T) < 8), uint64_t, unsigned __int128>;
template <class T>
using WideOf = std::conditional_t<std::is_signed_v<T>,
                                  std::conditional_t<(sizeof(T) < 8), int64_t, __int128>, Wide<T>>;

// ---- operations ----

using Add = decltype([]<class T>(T a, T b) { return T(Wide<T>(a) + Wide<T>(b)); });
using Sub = decltype([]<class T>(T a, T b) { return T(Wide<T>(a) - Wide<T>(b)); });
using MulLo = decltype([]<class T>(T a, T b) { return T(Wide<T>(a) * Wide<T>(b)); });
using MadLo =
    decltype([]<class T>(T a, T b, T c) { return T(Wide<T>(a) * Wide<T>(b) + Wide<T>(c)); });
using MulWide = decltype([]<class T>(T a, T b) { return WideOf<T>(a) * WideOf<T>(b); });
using MadWide = decltype([]<class T, class R>(T a, T b, R c) {
  return Add()(R(WideOf<T>(a) * WideOf<T>(b)), c);
});
// Division by zero gives all ones on the machines there are; PTX leaves it open.
using Div =
    decltype([]<class T>(T a, T b) { return b == 0 ? T(-1) : T(WideOf<T>(a) / WideOf<T>(b)); });
using Rem = decltype([]<class T>(T a, T b) { return b == 0 ? a : T(WideOf<T>(a) % WideOf<T>(b)); });
using Min = decltype([]<class T>(T a, T b) { return b < a ? b : a; });
using Max = decltype([]<class T>(T a, T b) { return b > a ? b : a; });
using Neg = decltype([]<class T>(T a) { return T(-Wide<T>(a)); });
using And = decltype([]<class T>(T a, T b) { return T(a & b); });
using Or = decltype([]<class T>(T a, T b) { return T(a | b); });
using Xor = decltype([]<class T>(T a, T b) { return T(a ^ b); });
using Not = decltype([]<class T>(T a) { return T(~a); });
using Copied = decltype([]<class T>(T a) { return a; });
using Exchange = decltype([]<class T>(T, T b) { return b; });
using Shl = decltype([]<class T>(T a, uint32_t by) {
  return by >= 8 * sizeof(T) ? T(0) : T(Wide<T>(a) << by);
});
using Shr = decltype([]<class T>(T a, uint32_t by) {
  const uint32_t most = 8 * sizeof(T) - 1;
  if (by > most) return std::is_signed_v<T> ? T(a >> most) : T(0);
  return T(a >> by);
});
using Popc = decltype([](uint32_t a) { return uint32_t(__builtin_popcount(a)); });
// bfi d, a, b, position, length: a's low bits into b.
using Bfi = decltype([]<class T>(T a, T b, uint32_t c, uint32_t d) {
  const uint32_t at = c & 255, length = d & 255, bits = 8 * sizeof(T);
  if (at >= bits || length == 0) return b;
  const T ones = length >= bits ? T(~T(0)) : T((T(1) << length) - 1);
  return T((b & T(~(ones << at))) | ((a & ones) << at));
});
using Bfe = decltype([]<class T>(T a, uint32_t b, uint32_t c) {
  const uint32_t at = b & 255, length = c & 255, bits = 8 * sizeof(T);
  if (length == 0) return T(0);
  const auto all = __int128(a) >> std::min(at, bits);  // of a signed number, signs follow
  if (length >= bits) return T(all);
  const T low = T(all & ((__int128(1) << length) - 1));
  const bool sign = std::is_signed_v<T> && (all >> (length - 1) & 1);
  return sign ? T(low | T(~T(0)) << length) : low;
});
using Prmt = decltype([](uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t nibble = select >> 4 * k & 15;
    uint32_t byte = bytes >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * k;
  }
  return result;
});

}  // namespace ptx

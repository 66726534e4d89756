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

template <class T>
using Bits = std::make_unsigned_t<T>;
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
using MulHi =
    decltype([]<class T>(T a, T b) { return T(WideOf<T>(a) * WideOf<T>(b) >> 8 * sizeof(T)); });
using MadLo =
    decltype([]<class T>(T a, T b, T c) { return T(Wide<T>(a) * Wide<T>(b) + Wide<T>(c)); });
using MadHi = decltype([]<class T>(T a, T b, T c) { return Add()(MulHi()(a, b), c); });
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
using Abs = decltype([]<class T>(T a) { return a < 0 ? T(-Wide<T>(a)) : a; });
using Neg = decltype([]<class T>(T a) { return T(-Wide<T>(a)); });
using And = decltype([]<class T>(T a, T b) { return T(a & b); });
using Or = decltype([]<class T>(T a, T b) { return T(a | b); });
using Xor = decltype([]<class T>(T a, T b) { return T(a ^ b); });
using Not = decltype([]<class T>(T a) { return T(~a); });
using Copied = decltype([]<class T>(T a) { return a; });
using Shl = decltype([]<class T>(T a, uint32_t by) {
  return by >= 8 * sizeof(T) ? T(0) : T(Wide<T>(a) << by);
});
using Shr = decltype([]<class T>(T a, uint32_t by) {
  const uint32_t most = 8 * sizeof(T) - 1;
  if (by > most) return std::is_signed_v<T> ? T(a >> most) : T(0);
  return T(a >> by);
});
using Popc = decltype([]<class T>(T a) { return uint32_t(__builtin_popcountll(Bits<T>(a))); });
using Clz = decltype([]<class T>(T a) -> uint32_t {
  return a == 0 ? 8 * sizeof(T) : uint32_t(__builtin_clzll(a)) - (64 - 8 * sizeof(T));
});
using Brev = decltype([]<class T>(T a) {
  T b = 0;
  for (size_t k = 0; k < 8 * sizeof(T); ++k) b = T(b << 1 | (a >> k & 1));
  return b;
});
// bfi d, a, b, position, length: a's low bits into b.
using Bfi = decltype([]<class T>(T a, T b, uint32_t c, uint32_t d) {
  const uint32_t at = c & 255, length = d & 255, bits = 8 * sizeof(T);
  if (at >= bits || length == 0) return b;
  const T ones = length >= bits ? T(~T(0)) : T((T(1) << length) - 1);
  return T((b & T(~(ones << at))) | ((a & ones) << at));
});
using Bfe = decltype([]<class T>(T a, uint32_t b, uint32_t c) {
  const uint32_t at = b & 255, length = c & 255, bits = 8 * sizeof(T);
  T result = 0;
  const uint32_t top = at + length - 1 < bits - 1 ? at + length - 1 : bits - 1;
  const bool sign = std::is_signed_v<T> && length > 0 && (Bits<T>(a) >> top & 1);
  for (uint32_t k = 0; k < bits; ++k) {
    const bool bit = k < length && at + k < bits ? Bits<T>(a) >> (at + k) & 1 : sign;
    result = T(Bits<T>(result) | Bits<T>(bit) << k);
  }
  return result;
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
// lop3: the table's bit a b c.
inline void lop3(Warp& w, const Instr& i, Mask mask) {
  uint32_t* d = w.of<uint32_t>(i.o[0]);
  each(mask, [&](int l) {
    const uint32_t a = w.of<uint32_t>(i.o[1])[l], b = w.of<uint32_t>(i.o[2])[l];
    const uint32_t c = w.of<uint32_t>(i.o[3])[l], table = w.of<uint32_t>(i.o[4])[l];
    uint32_t result = 0;
    for (int k = 0; k < 8; ++k)
      if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    d[l] = result;
  });
}
// shf.{l,r}.{wrap,clamp}: mode 1 is right, 2 clamps.
inline void funnel(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const uint64_t both = uint64_t(w.of<uint32_t>(i.o[2])[l]) << 32 | w.of<uint32_t>(i.o[1])[l];
    uint32_t by = w.of<uint32_t>(i.o[3])[l];
    by = i.mode & 2 ? (by > 32 ? 32 : by) : by & 31;
    const uint64_t moved = i.mode & 1 ? both >> by : both << by >> 32;
    w.of<uint32_t>(i.o[0])[l] = uint32_t(moved);
  });
}

}  // namespace ptx

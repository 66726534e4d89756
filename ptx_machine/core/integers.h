// Integers, bits, predicates, moves and selections.
#pragma once

#include <type_traits>

#include "state.h"

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

// ---- moves ----

template <class F, int sources>
void on_predicates(Warp& w, const Instr& i, Mask mask) {
  Mask result = w.predicate(i.o[1]);
  if constexpr (sources == 1) result = F()(result);
  if constexpr (sources == 2) result = F()(result, w.predicate(i.o[2]));
  w.set_predicate(i.o[0], mask, result);
}
template <class T>
void select(Warp& w, const Instr& i, Mask mask) {
  const Mask which = w.predicate(i.o[3]);
  T* d = w.of<T>(i.o[0]);
  const T *a = w.of<T>(i.o[1]), *b = w.of<T>(i.o[2]);
  each(mask, [&](int l) { d[l] = which >> l & 1 ? a[l] : b[l]; });
}
// mov between a register and the registers of its parts.
inline void pack(Warp& w, const Instr& i, Mask mask) {
  const int parts = int(i.o.size()) - 1, bits = i.mode / parts;
  each(mask, [&](int l) {
    uint64_t all = 0;
    for (int k = 0; k < parts; ++k)
      all |= (w.bits(i.o[1 + k], l) & ((uint64_t(1) << bits) - 1)) << k * bits;
    w.set_bits(i.o[0], l, all);
  });
}
inline void unpack(Warp& w, const Instr& i, Mask mask) {
  const int parts = int(i.o.size()) - 1, bits = i.mode / parts;
  each(mask, [&](int l) {
    const uint64_t all = w.bits(i.o[parts], l);
    for (int k = 0; k < parts; ++k) w.set_bits(i.o[k], l, all >> k * bits);
  });
}

// ---- opcodes ----

template <class F>
bool integer_binary(const std::string& type, Instr& i) {
  return with_integer(type, [&](auto t) { i.run = binary<F, decltype(t)>; });
}

// mul and mad: the low half of the product, or all of it.
template <int sources>
void product(Form& f, Instr& i) {
  const bool wide = f.take("wide");
  if (!wide && !f.take("lo")) f.unknown();
  const bool known = with_integer(f.last(), [&](auto t) {
    using T = decltype(t);
    if constexpr (sources == 2)
      i.run = binary<MulLo, T>;
    else
      i.run = ternary<MadLo, T>;
    if (!wide) return;
    if constexpr (sizeof(T) != 4)
      f.unknown();
    else if constexpr (sources == 2)
      i.run = map<WideOf<T>, MulWide, T, T>;
    else
      i.run = map<WideOf<T>, MadWide, T, T, WideOf<T>>;
  });
  if (!known) f.unknown();
}

template <class F>
void logical(Form& f, Instr& i) {
  const std::string type = f.last();
  if (type == "pred")
    i.run = on_predicates<F, 2>;
  else if (!integer_binary<F>(type, i))
    f.unknown();
}
template <class F>
void shift(Form& f, Instr& i) {
  const bool known = with_integer(f.last(), [&](auto t) {
    using T = decltype(t);
    i.run = map<T, F, T, uint32_t>;
  });
  if (!known) f.unknown();
}
inline int bits_of(const std::string& type) { return std::stoi(type.substr(1)); }

inline void resolve_mov(Form& f, Instr& i) {
  const std::string type = f.last();
  if (type == "pred") {
    i.run = on_predicates<Copied, 1>;
    return;
  }
  if (type.size() < 2 || std::string("busf").find(type[0]) == std::string::npos) f.unknown();
  i.mode = bits_of(type);
  if (i.o.size() > 2)
    i.run = i.splits ? unpack : pack;
  else if (i.mode == 16)
    i.run = unary<Copied, uint16_t>;
  else if (i.mode == 32)
    i.run = unary<Copied, uint32_t>;
  else if (i.mode == 64)
    i.run = unary<Copied, uint64_t>;
}

inline void resolve_selp(Form& f, Instr& i) {
  const int bits = bits_of(f.last());
  i.run = bits == 16 ? select<uint16_t> : bits == 32 ? select<uint32_t> : select<uint64_t>;
}

inline void add_integer_opcodes() {
  auto& all = opcodes();
  all["and"] = logical<And>;
  all["or"] = logical<Or>;
  all["xor"] = logical<Xor>;
  all["shl"] = shift<Shl>;
  all["shr"] = shift<Shr>;
  all["mov"] = resolve_mov;
  all["selp"] = resolve_selp;
  all["popc"] = [](Form& f, Instr& i) {
    if (f.last() == "b32") i.run = map<uint32_t, Popc, uint32_t>;
  };
  all["not"] = [](Form& f, Instr& i) {
    const std::string type = f.last();
    if (type == "pred")
      i.run = on_predicates<Not, 1>;
    else
      with_integer(type, [&](auto t) { i.run = unary<Not, decltype(t)>; });
  };
  all["rem"] = [](Form& f, Instr& i) { integer_binary<Rem>(f.last(), i); };
  all["bfi"] = [](Form& f, Instr& i) {
    if (f.last() == "b32") i.run = map<uint32_t, Bfi, uint32_t, uint32_t, uint32_t, uint32_t>;
  };
  all["bfe"] = [](Form& f, Instr& i) {
    with_integer(f.last(), [&](auto t) {
      using T = decltype(t);
      i.run = map<T, Bfe, T, uint32_t, uint32_t>;
    });
  };
  all["prmt"] = [](Form& f, Instr& i) {
    if (f.last() == "b32") i.run = ternary<Prmt, uint32_t>;
  };
}

}  // namespace ptx

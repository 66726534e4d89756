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
void unary(Warp& w, const Instr& i, Mask mask) { map<T, F, T>(w, i, mask); }
template <class F, class T>
void binary(Warp& w, const Instr& i, Mask mask) { map<T, F, T, T>(w, i, mask); }
template <class F, class T>
void ternary(Warp& w, const Instr& i, Mask mask) { map<T, F, T, T, T>(w, i, mask); }

template <class T>
using Bits = std::make_unsigned_t<T>;
// As wide as it takes to compute modulo 2^n without promotion to int.
template <class T>
using Wide = std::conditional_t<(sizeof(T) < 8), uint64_t, unsigned __int128>;
template <class T>
using WideOf = std::conditional_t<std::is_signed_v<T>,
                                  std::conditional_t<(sizeof(T) < 8), int64_t, __int128>, Wide<T>>;

// ---- operations ----------------------------------------------------------------------------------

struct Add { template <class T> T operator()(T a, T b) const { return T(Wide<T>(a) + Wide<T>(b)); } };
struct Sub { template <class T> T operator()(T a, T b) const { return T(Wide<T>(a) - Wide<T>(b)); } };
struct MulLo { template <class T> T operator()(T a, T b) const { return T(Wide<T>(a) * Wide<T>(b)); } };
struct MulHi {
  template <class T> T operator()(T a, T b) const {
    return T(WideOf<T>(a) * WideOf<T>(b) >> 8 * sizeof(T));
  }
};
struct MadLo {
  template <class T> T operator()(T a, T b, T c) const { return T(Wide<T>(a) * Wide<T>(b) + Wide<T>(c)); }
};
struct MadHi { template <class T> T operator()(T a, T b, T c) const { return Add()(MulHi()(a, b), c); } };
struct MulWide { template <class T> WideOf<T> operator()(T a, T b) const { return WideOf<T>(a) * WideOf<T>(b); } };
struct MadWide {
  template <class T, class R> R operator()(T a, T b, R c) const { return Add()(R(WideOf<T>(a) * WideOf<T>(b)), c); }
};
// Division by zero gives all ones on the machines there are; PTX leaves it open.
struct Div { template <class T> T operator()(T a, T b) const { return b == 0 ? T(-1) : T(WideOf<T>(a) / WideOf<T>(b)); } };
struct Rem { template <class T> T operator()(T a, T b) const { return b == 0 ? a : T(WideOf<T>(a) % WideOf<T>(b)); } };
struct Min { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <class T> T operator()(T a, T b) const { return b > a ? b : a; } };
struct Abs { template <class T> T operator()(T a) const { return a < 0 ? T(-Wide<T>(a)) : a; } };
struct Neg { template <class T> T operator()(T a) const { return T(-Wide<T>(a)); } };
struct And { template <class T> T operator()(T a, T b) const { return T(a & b); } };
struct Or { template <class T> T operator()(T a, T b) const { return T(a | b); } };
struct Xor { template <class T> T operator()(T a, T b) const { return T(a ^ b); } };
struct Not { template <class T> T operator()(T a) const { return T(~a); } };
struct Copied { template <class T> T operator()(T a) const { return a; } };
struct Shl {
  template <class T> T operator()(T a, uint32_t by) const { return by >= 8 * sizeof(T) ? T(0) : T(Wide<T>(a) << by); }
};
struct Shr {
  template <class T> T operator()(T a, uint32_t by) const {
    const uint32_t most = 8 * sizeof(T) - 1;
    if (by > most) return std::is_signed_v<T> ? T(a >> most) : T(0);
    return T(a >> by);
  }
};
struct Popc { template <class T> uint32_t operator()(T a) const { return uint32_t(__builtin_popcountll(Bits<T>(a))); } };
struct Clz {
  template <class T> uint32_t operator()(T a) const {
    return a == 0 ? 8 * sizeof(T) : uint32_t(__builtin_clzll(a)) - (64 - 8 * sizeof(T));
  }
};
struct Brev {
  template <class T> T operator()(T a) const {
    T b = 0;
    for (size_t k = 0; k < 8 * sizeof(T); ++k) b = T(b << 1 | (a >> k & 1));
    return b;
  }
};
// bfi d, a, b, position, length: a's low bits into b.
struct Bfi {
  template <class T> T operator()(T a, T b, uint32_t c, uint32_t d) const {
    const uint32_t at = c & 255, length = d & 255, bits = 8 * sizeof(T);
    if (at >= bits || length == 0) return b;
    const T ones = length >= bits ? T(~T(0)) : T((T(1) << length) - 1);
    return T((b & T(~(ones << at))) | ((a & ones) << at));
  }
};
struct Bfe {
  template <class T> T operator()(T a, uint32_t b, uint32_t c) const {
    const uint32_t at = b & 255, length = c & 255, bits = 8 * sizeof(T);
    T result = 0;
    const uint32_t top = at + length - 1 < bits - 1 ? at + length - 1 : bits - 1;
    const bool sign = std::is_signed_v<T> && length > 0 && (Bits<T>(a) >> top & 1);
    for (uint32_t k = 0; k < bits; ++k) {
      const bool bit = k < length && at + k < bits ? Bits<T>(a) >> (at + k) & 1 : sign;
      result = T(Bits<T>(result) | Bits<T>(bit) << k);
    }
    return result;
  }
};
struct Prmt {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t select) const {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int k = 0; k < 4; ++k) {
      const uint32_t nibble = select >> 4 * k & 15;
      uint32_t byte = bytes >> 8 * (nibble & 7) & 255;
      if (nibble & 8) byte = byte & 128 ? 255 : 0;
      result |= byte << 8 * k;
    }
    return result;
  }
};
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

// ---- predicates and moves ------------------------------------------------------------------------

template <class F, int sources>
void on_predicates(Warp& w, const Instr& i, Mask mask) {
  Mask result = w.predicate(i.o[1]);
  if constexpr (sources == 1) result = F()(result);
  if constexpr (sources == 2) result = F()(result, w.predicate(i.o[2]));
  Mask& d = w.predicate(i.o[0]);
  d = (d & ~mask) | (result & mask);
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
    for (int k = 0; k < parts; ++k) {
      const uint64_t part = w.bits(i.o[1 + k], l);
      all |= (bits == 64 ? part : part & ((uint64_t(1) << bits) - 1)) << k * bits;
    }
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

// ---- opcodes -------------------------------------------------------------------------------------

template <class F>
bool integer_binary(const std::string& type, Instr& i) {
  return with_integer(type, [&](auto t) { i.run = binary<F, decltype(t)>; });
}

// mul and mad: the low or high half of the product, or all of it.
template <int sources>
void product(Form& f, Instr& i) {
  const bool wide = f.take("wide"), hi = f.take("hi");
  if (!wide && !hi && !f.take("lo")) f.unknown();
  const bool known = with_integer(f.last(), [&](auto t) {
    using T = decltype(t);
    using Result = std::conditional_t<
        sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>, WideOf<T>>;
    if constexpr (sources == 2)
      i.run = hi ? binary<MulHi, T> : binary<MulLo, T>;
    else
      i.run = hi ? ternary<MadHi, T> : ternary<MadLo, T>;
    if (!wide) return;
    if constexpr (sizeof(T) == 8)
      f.unknown();
    else if constexpr (sources == 2)
      i.run = map<Result, MulWide, T, T>;
    else
      i.run = map<Result, MadWide, T, T, Result>;
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
  if (type != "b128" && (type.size() < 2 || std::string("busf").find(type[0]) == std::string::npos))
    f.unknown();
  i.mode = bits_of(type);
  if (i.o.size() > 2)
    i.run = i.o[0].size * 8 == i.mode ? pack : unpack;
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

template <class F>
void counting(Form& f, Instr& i) {
  const std::string type = f.last();
  if (type == "b32") i.run = map<uint32_t, F, uint32_t>;
  if (type == "b64") i.run = map<uint32_t, F, uint64_t>;
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
  all["popc"] = counting<Popc>;
  all["clz"] = counting<Clz>;
  all["not"] = [](Form& f, Instr& i) {
    const std::string type = f.last();
    if (type == "pred")
      i.run = on_predicates<Not, 1>;
    else
      with_integer(type, [&](auto t) { i.run = unary<Not, decltype(t)>; });
  };
  all["rem"] = [](Form& f, Instr& i) { integer_binary<Rem>(f.last(), i); };
  all["brev"] = [](Form& f, Instr& i) {
    const std::string type = f.last();
    i.run = type == "b32" ? unary<Brev, uint32_t> : unary<Brev, uint64_t>;
  };
  all["bfi"] = [](Form& f, Instr& i) {
    const bool wide = f.last() == "b64";
    i.run = wide ? map<uint64_t, Bfi, uint64_t, uint64_t, uint32_t, uint32_t>
                 : map<uint32_t, Bfi, uint32_t, uint32_t, uint32_t, uint32_t>;
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
  all["lop3"] = [](Form& f, Instr& i) {
    if (f.last() == "b32") i.run = lop3;
  };
  all["shf"] = [](Form& f, Instr& i) {
    i.mode = f.take("r") ? 1 : f.take("l") ? 0 : 4;
    if (f.take("clamp")) i.mode |= 2;
    f.take("wrap");
    if (f.last() == "b32" && i.mode < 4) i.run = funnel;
  };
}

}  // namespace ptx

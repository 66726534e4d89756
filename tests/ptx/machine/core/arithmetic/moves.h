// Predicates, moves, selections, and the opcodes of integers.
#pragma once

#include "integer.h"

namespace ptx {

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

// ---- opcodes ----

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
    using Result =
        std::conditional_t<sizeof(T) == 2,
                           std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>, WideOf<T>>;
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

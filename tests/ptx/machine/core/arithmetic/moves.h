// Predicates, moves, selections, and the opcodes of integers.
#pragma once

#include "integer.h"

namespace ptx {

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
}

}  // namespace ptx

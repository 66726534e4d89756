// cvt.
#pragma once

#include "compare.h"

namespace ptx {

// Reads the low bits of a register of any size as S.
template <class S>
S read(Warp& w, const Operand& o, int lane) {
  const uint64_t bits = w.bits(o, lane);
  S x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// Writes D's bits, extended as D is signed, into a register of any size.
template <class D>
void write(Warp& w, const Operand& o, int lane, D x) {
  if constexpr (std::is_integral_v<D>) {
    w.set_bits(o, lane, uint64_t(int64_t(x)));
  } else {
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    w.set_bits(o, lane, bits);
  }
}

// What an instruction has to know about a conversion, in Instr::mode.
enum Conversion { kRounding = 0xffff, kFlush = 1 << 16, kSaturate = 1 << 17, kToInteger = 1 << 18 };

template <class D>
D clamped(double x) {
  if (x != x) return sizeof(D) == 8 ? D(uint64_t(1) << 63) : D(0);
  const double lowest = double(std::numeric_limits<D>::min());
  const double past = std::ldexp(1.0, 8 * int(sizeof(D)) - std::is_signed_v<D>);
  if (x <= lowest) return std::numeric_limits<D>::min();
  return x >= past ? std::numeric_limits<D>::max() : D(x);
}

// What a conversion starts from: an integer, or a floating number, which double holds exactly.
struct Number {
  bool whole;
  __int128 integer;
  double floating;
};
template <class S>
Number number_of(uint64_t bits) {
  S x;
  std::memcpy(&x, &bits, sizeof x);
  if constexpr (std::is_integral_v<S>)
    return {true, x, 0};
  else if constexpr (is_half<S>)
    return {false, 0, double(float(x))};
  else
    return {false, 0, double(x)};
}

template <class D>
D converted(Number x, int mode) {
  if (mode & kFlush) x.floating = double(flushed(float(x.floating)));
  if (std::is_integral_v<D> || mode & kToInteger) x.floating = std::nearbyint(x.floating);
  if (mode & kSaturate) x.floating = x.floating > 0 ? (x.floating < 1 ? x.floating : 1) : 0;
  if constexpr (std::is_integral_v<D>)
    return x.whole ? D(x.integer) : clamped<D>(x.floating);
  else if constexpr (is_half<D>)
    return D(float(x.floating));
  else if (!x.whole)
    return D(x.floating);
  else
    return x.integer < 0 ? D(int64_t(x.integer)) : D(uint64_t(x.integer));
}

template <class D>
void convert(Warp& w, const Instr& i, Mask mask) {
  const int mode = i.mode;
  std::fesetround(mode & kRounding);
  each(mask, [&](int l) { write<D>(w, i.o[0], l, converted<D>(i.from(w.bits(i.o[1], l)), mode)); });
  std::fesetround(FE_TONEAREST);
}
// Two floats into a pair: the first source is the upper half.
template <class H>
void convert_pair(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const H y = converted<H>({false, 0, w.of<float>(i.o[1])[l]}, i.mode);
    const H x = converted<H>({false, 0, w.of<float>(i.o[2])[l]}, i.mode);
    w.of<uint32_t>(i.o[0])[l] = uint32_t(y.bits) << 16 | x.bits;
  });
}
template <class F>
bool with_any(const std::string& type, F f) {
  if (type == "u8" || type == "b8") return f(uint8_t{}), true;
  if (type == "s8") return f(int8_t{}), true;
  if (type == "f16") return f(f16{}), true;
  if (type == "bf16") return f(bf16{}), true;
  return with_integer(type, f) || with_float(type, f);
}

inline void resolve_cvt(Form& f, Instr& i) {
  const std::string from = f.last(), to = f.last();
  const int whole = f.one_of({"rni", "rzi", "rmi", "rpi"});
  static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  i.mode = whole < 0 ? rounding(f) : modes[whole] | kToInteger;
  if (f.take("ftz")) i.mode |= kFlush;
  if (from[0] == 'f' && f.take("sat")) i.mode |= kSaturate;
  const bool halves = to.find("f16") != std::string::npos;
  if (halves && (from != "f32" || (i.mode & kRounding) != FE_TONEAREST)) f.unknown();
  if (to == "bf16x2") i.run = convert_pair<bf16>;
  if (to == "f16x2") i.run = convert_pair<f16>;
  if (i.run != nullptr) return;
  with_any(from, [&](auto x) { i.from = number_of<decltype(x)>; });
  if (i.from != nullptr) with_any(to, [&](auto d) { i.run = convert<decltype(d)>; });
}

}  // namespace ptx

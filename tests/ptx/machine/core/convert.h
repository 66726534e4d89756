// cvt and cvta.
#pragma once

#include "floating.h"

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
enum Conversion { kRounding = 0xffff, kFlush = 1 << 16, kSaturate = 1 << 17, kToInteger = 1 << 18, kRelu = 1 << 19 };

template <class D>
D clamped(double x) {
  if (x != x) return sizeof(D) == 8 ? D(uint64_t(1) << 63) : D(0);
  const double lowest = double(std::numeric_limits<D>::min());
  const double past = std::ldexp(1.0, 8 * int(sizeof(D)) - std::is_signed_v<D>);
  if (x <= lowest) return std::numeric_limits<D>::min();
  return x >= past ? std::numeric_limits<D>::max() : D(x);
}

template <class S>
auto float_or_double(S x) {
  if constexpr (is_half<S>)
    return float(x);
  else
    return x;
}

template <class D, class S>
D converted(S x, int mode) {
  if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
    if (!(mode & kSaturate)) return D(x);
    using Both = __int128;
    const Both low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
    return D(Both(x) < low ? low : Both(x) > high ? high : Both(x));
  } else if constexpr (std::is_integral_v<D>) {
    double y = double(float_or_double(x));
    if (mode & kFlush && std::is_same_v<S, float>) y = flushed(float(x));
    return clamped<D>(std::nearbyint(y));
  } else if constexpr (std::is_integral_v<S>) {
    if constexpr (is_half<D>)
      return D(double(x));
    else
      return D(x);
  } else {
    auto y = float_or_double(x);
    if (mode & kFlush && std::is_same_v<S, float>) y = flushed(float(y));
    if (mode & kToInteger) y = std::nearbyint(y);
    if (mode & kSaturate) y = y > 0 ? (y < 1 ? y : decltype(y)(1)) : decltype(y)(0);
    if (mode & kRelu) y = y > 0 || y != y ? y : decltype(y)(0);
    const D z = D(y);
    if constexpr (std::is_same_v<D, float>)
      return mode & kFlush ? flushed(z) : z;
    else
      return z;
  }
}

template <class D, class S>
void convert(Warp& w, const Instr& i, Mask mask) {
  const int mode = i.mode;
  std::fesetround(mode & kRounding);
  each(mask, [&](int l) { write<D>(w, i.o[0], l, converted<D>(read<S>(w, i.o[1], l), mode)); });
  std::fesetround(FE_TONEAREST);
}
// Two floats into a pair: the first source is the upper half.
template <class H>
void convert_pair(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const H y = converted<H>(w.of<float>(i.o[1])[l], i.mode & ~kRounding);
    const H x = converted<H>(w.of<float>(i.o[2])[l], i.mode & ~kRounding);
    w.of<uint32_t>(i.o[0])[l] = uint32_t(y.bits) << 16 | x.bits;
  });
}
// To tf32, 10 bits of mantissa; mode 1 rounds halves away from zero, 0 to even.
inline void convert_tf32(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const float x = w.of<float>(i.o[1])[l];
    uint32_t bits = cast<uint32_t>(x);
    if (std::isfinite(x)) bits += i.mode == 1 ? 0x1000 : 0xfff + (bits >> 13 & 1);
    w.of<uint32_t>(i.o[0])[l] = bits & ~0x1fffu;
  });
}

template <class F>
bool with_any(const std::string& type, F f) {
  if (type == "u8" || type == "b8") return f(uint8_t{}), true;
  if (type == "s8") return f(int8_t{}), true;
  return with_integer(type, f) || with_float(type, f);
}

inline void resolve_cvt(Form& f, Instr& i) {
  const std::string from = f.last(), to = f.last();
  if (to == "tf32" && from == "f32") {
    const bool away = f.take("rna");
    if (!away) f.take("rn");
    i.mode = away;
    i.run = convert_tf32;
    return;
  }
  const int whole = f.one_of({"rni", "rzi", "rmi", "rpi"});
  static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  i.mode = whole < 0 ? rounding(f) : modes[whole];
  if (whole >= 0) i.mode |= kToInteger;
  if (f.take("ftz")) i.mode |= kFlush;
  if (f.take("sat")) i.mode |= kSaturate;
  if (f.take("relu")) i.mode |= kRelu;
  const bool nearest = (i.mode & kRounding) == FE_TONEAREST;
  if (to == "bf16x2" && nearest) i.run = convert_pair<bf16>;
  if (to == "f16x2" && nearest) i.run = convert_pair<f16>;
  if (i.run != nullptr) return;
  const bool halves = to == "bf16" || to == "f16";
  if (halves && !nearest && from[0] == 'f') f.unknown();
  with_any(to, [&](auto d) {
    using D = decltype(d);
    if constexpr (!is_pair<D>)
      with_any(from, [&](auto s) {
        using S = decltype(s);
        if constexpr (!is_pair<S>) i.run = convert<D, S>;
      });
  });
}

}  // namespace ptx

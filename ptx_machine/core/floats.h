// Floating point: operations that round exactly, approximations, comparisons and conversions.
#pragma once

#include <cfenv>
#include <limits>

#include "integers.h"

namespace ptx {

// Calls f with a number of the floating type that kernels compute in.
template <class F>
bool with_float(const std::string& type, F f) {
  if (type == "f32") return f(float{}), true;
  if (type == "f64") return f(double{}), true;
  return false;
}

inline float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

using FAdd = decltype([]<class T>(T a, T b) { return a + b; });
using FSub = decltype([]<class T>(T a, T b) { return a - b; });
using FMul = decltype([]<class T>(T a, T b) { return a * b; });
using FDiv = decltype([]<class T>(T a, T b) { return a / b; });
using FFma = decltype([]<class T>(T a, T b, T c) { return std::fma(a, b, c); });
using FNeg = decltype([]<class T>(T a) { return -a; });
using FAbs = decltype([]<class T>(T a) { return std::fabs(a); });
using HalfAbs = decltype([]<class T>(T bits) { return T(bits & T(0x7fff7fff)); });
// The number of the two where one is NaN; -0 is below +0.
using FMin = decltype([]<class T>(T a, T b) {
  if (a != a) return b;
  return b < a || (a == b && std::signbit(b)) ? b : a;
});
using FMax = decltype([]<class T>(T a, T b) {
  if (a != a) return b;
  return b > a || (a == b && std::signbit(a)) ? b : a;
});
using FMinNaN = decltype([]<class T>(T a, T b) {
  return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : FMin()(a, b);
});
using FMaxNaN = decltype([]<class T>(T a, T b) {
  return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : FMax()(a, b);
});

// ---- rounding modes ----

inline int rounding(Form& f) {
  static const int modes[] = {FE_TONEAREST, FE_DOWNWARD};
  const int at = f.one_of({"rn", "rm"});
  return at < 0 ? FE_TONEAREST : modes[at];
}
inline void run_rounded(Warp& w, const Instr& i, Mask mask) {
  std::fesetround(i.mode);
  i.inner(w, i, mask);
  std::fesetround(FE_TONEAREST);
}

template <class F, int sources>
void resolve_floating(Form& f, Instr& i) {
  i.mode = rounding(f);
  const bool known = with_float(f.last(), [&](auto t) {
    using T = decltype(t);
    if constexpr (sources == 1) i.run = unary<F, T>;
    if constexpr (sources == 2) i.run = binary<F, T>;
    if constexpr (sources == 3) i.run = ternary<F, T>;
  });
  if (!known) f.unknown();
  if (i.mode == FE_TONEAREST) return;
  i.inner = i.run;
  i.run = run_rounded;
}
// An opcode that integers have, too.
template <class Integer, class Floating, int sources>
void resolve_either(Form& f, Instr& i) {
  const std::string& type = f.parts.back();
  if (type[0] == 'f') return resolve_floating<Floating, sources>(f, i);
  const bool known = with_integer(f.last(), [&](auto t) {
    using T = decltype(t);
    if constexpr (sources == 1)
      i.run = unary<Integer, T>;
    else
      i.run = binary<Integer, T>;
  });
  if (!known) f.unknown();
}
template <class Integer, class Plain, class WithNaN>
void resolve_extreme(Form& f, Instr& i) {
  if (f.take("NaN")) return resolve_floating<WithNaN, 2>(f, i);
  resolve_either<Integer, Plain, 2>(f, i);
}

// ---- approximations: anywhere inside the error that PTX gives them ----

// A number in [-1, 1) that an operand and a launch's seed decide. Hardware, too, gives the same
// result for the same operand.
inline uint64_t random_seed = 1;
inline double random_step(double operand) {
  uint64_t x = cast<uint64_t>(operand) * 0x9e3779b97f4a7c15u + random_seed;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return double(int64_t(x ^ x >> 31)) * 0x1p-63;
}

// Somewhere within `room` of x, in single precision: the error that PTX gives, without the half ulp
// that rounding takes, at most 2^-24.
inline float anywhere(double operand, double x, double room) {
  return std::isfinite(x) && x != 0 ? float(x + room * random_step(operand)) : float(x);
}

// Errors from the PTX ISA 9.0: relative to the result, but that of rcp is an ulp.
template <bool ftz>
void exponential(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const float x = w.of<float>(i.o[1])[l], from = ftz ? flushed(x) : x;
    const double y = std::exp2(double(from));
    // NVIDIA's own tanh in fp64 relies on exact powers of two.
    const bool exact = std::trunc(from) == from;
    const float near = exact ? float(y) : anywhere(from, y, y * (0x1p-22 - 0x1p-24));
    w.of<float>(i.o[0])[l] = ftz ? flushed(near) : near;
  });
}
inline void reciprocal(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const double x = flushed(w.of<float>(i.o[1])[l]), y = 1 / x;
    w.of<float>(i.o[0])[l] = flushed(anywhere(x, y, std::ldexp(1.0, std::ilogb(y) - 24)));
  });
}
// div.full: two ulp.
inline void divide_approximately(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const double a = w.of<float>(i.o[1])[l], b = w.of<float>(i.o[2])[l], y = a / b;
    w.of<float>(i.o[0])[l] = anywhere(a * 3 + b, y, std::fabs(y) * (0x1p-22 - 0x1p-24));
  });
}

inline void resolve_ex2(Form& f, Instr& i) {
  const bool ftz = f.take("ftz");
  if (f.take("approx") && f.last() == "f32") i.run = ftz ? exponential<true> : exponential<false>;
}
inline void resolve_rcp(Form& f, Instr& i) {
  if (f.take("approx") && f.take("ftz") && f.last() == "f32") i.run = reciprocal;
}
inline void resolve_div(Form& f, Instr& i) {
  if (!f.take("full")) return resolve_either<Div, FDiv, 2>(f, i);
  if (f.last() == "f32") i.run = divide_approximately;
}

// ---- setp ----

constexpr int kNum = 12, kNaN = 13;

// Of resolve_setp, where those from the seventh to the twelfth are also true of what is unordered.
template <class T>
bool compare(int which, T a, T b) {
  const bool nan = a != a || b != b;
  if (which >= kNum) return nan == (which == kNaN);
  if (nan) return which >= 6;
  const bool all[] = {a == b, a != b, (a < b), (a <= b), (a > b), (a >= b)};
  return all[which % 6];
}

template <class T>
void compared(Warp& w, const Instr& i, Mask mask) {
  using Read = std::conditional_t<is_half<T>, float, T>;
  const T *a = w.of<T>(i.o[1]), *b = w.of<T>(i.o[2]);
  Mask yes = 0;
  each(mask, [&](int l) { yes |= Mask(compare(i.mode, Read(a[l]), Read(b[l]))) << l; });
  w.set_predicate(i.o[0], mask, yes);
}

// Of the lower halves into the first predicate, of the upper ones into the second.
template <class H>
void compared_pairs(Warp& w, const Instr& i, Mask mask) {
  const uint32_t *a = w.of<uint32_t>(i.o[2]), *b = w.of<uint32_t>(i.o[3]);
  for (int half : {0, 1}) {
    Mask yes = 0;
    each(mask, [&](int l) {
      H x, y;
      x.bits = uint16_t(a[l] >> 16 * half), y.bits = uint16_t(b[l] >> 16 * half);
      yes |= Mask(compare(i.mode, float(x), float(y))) << l;
    });
    w.set_predicate(i.o[half], mask, yes);
  }
}

inline void resolve_setp(Form& f, Instr& i) {
  i.mode = f.one_of(
      {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
  const bool pairs = f.parts.back().find("x2") != std::string::npos;
  if (i.mode < 0 || i.o.size() != (pairs ? 4 : 3)) f.unknown();
  const std::string type = f.last();
  if (pairs) i.run = type == "bf16x2" ? compared_pairs<bf16> : compared_pairs<f16>;
  const auto pick = [&](auto t) { i.run = compared<decltype(t)>; };
  if (type == "f16") pick(f16{});
  if (type == "bf16") pick(bf16{});
  if (!with_integer(type, pick)) with_float(type, pick);
}

// ---- cvt ----

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
// The products of two pairs.
inline void multiply_pairs(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    uint32_t result = 0;
    for (int at : {0, 16}) {
      f16 x, y;
      x.bits = uint16_t(w.of<uint32_t>(i.o[1])[l] >> at);
      y.bits = uint16_t(w.of<uint32_t>(i.o[2])[l] >> at);
      result |= uint32_t(f16(float(x) * float(y)).bits) << at;
    }
    w.of<uint32_t>(i.o[0])[l] = result;
  });
}
template <class F>
bool with_any(const std::string& type, F f) {
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

// ---- opcodes ----

inline void add_floating_opcodes() {
  auto& all = opcodes();
  all["add"] = resolve_either<Add, FAdd, 2>;
  all["sub"] = resolve_either<Sub, FSub, 2>;
  all["neg"] = resolve_either<Neg, FNeg, 1>;
  all["abs"] = [](Form& f, Instr& i) {
    if (f.take("bf16") || f.take("f16"))
      i.run = unary<HalfAbs, uint16_t>;
    else if (f.take("bf16x2") || f.take("f16x2"))
      i.run = unary<HalfAbs, uint32_t>;
    else
      resolve_floating<FAbs, 1>(f, i);
  };
  all["min"] = resolve_extreme<Min, FMin, FMinNaN>;
  all["max"] = resolve_extreme<Max, FMax, FMaxNaN>;
  all["setp"] = resolve_setp;
  all["mul"] = [](Form& f, Instr& i) {
    if (f.take("f16x2"))
      i.run = multiply_pairs;
    else
      f.parts.back()[0] == 'f' ? resolve_floating<FMul, 2>(f, i) : product<2>(f, i);
  };
  all["mad"] = product<3>;
  all["fma"] = resolve_floating<FFma, 3>;
  all["div"] = resolve_div;
  all["rcp"] = resolve_rcp;
  all["ex2"] = resolve_ex2;
}

}  // namespace ptx

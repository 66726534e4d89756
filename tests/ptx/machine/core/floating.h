// Floating point: exactly rounded operations, and approximations inside the error PTX gives them.
#pragma once

#include <cfenv>
#include <limits>

#include "integer.h"

namespace ptx {

// Calls f with a number of a floating type; half types compute in float, the pairs part by part.
template <class F>
bool with_float(const std::string& type, F f) {
  if (type == "f32") return f(float{}), true;
  if (type == "f64") return f(double{}), true;
  if (type == "f16") return f(f16{}), true;
  if (type == "bf16") return f(bf16{}), true;
  if (type == "f16x2") return f(Pair<f16>{}), true;
  if (type == "bf16x2") return f(Pair<bf16>{}), true;
  return false;
}

// Operations on half types round once: float (for a product and a sum double) holds them exactly,
// or so much longer that the second rounding is the right one.
template <class F, class T, class... S>
T operate(T a, S... more) {
  if constexpr (is_pair<T>)
    return {operate<F>(a.x, more.x...), operate<F>(a.y, more.y...)};
  else if constexpr (is_half<T>)
    return T(F()(double(float(a)), double(float(more))...));
  else
    return F()(a, more...);
}
template <class F>
struct Lifted {
  template <class T, class... S>
  T operator()(T a, S... more) const {
    return operate<F>(a, more...);
  }
};

inline float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
template <class F>
struct Flushed {
  template <class T, class... S>
  T operator()(T a, S... more) const {
    if constexpr (std::is_same_v<T, float>)
      return flushed(F()(flushed(a), flushed(more)...));
    else
      return operate<F>(a, more...);
  }
};
template <class F>
struct Saturated {
  template <class T, class... S>
  T operator()(T a, S... more) const {
    const T x = F()(a, more...);
    if constexpr (is_pair<T> || is_half<T>)
      return x;
    else
      return x > 0 ? (x < 1 ? x : T(1)) : T(0);  // NaN gives 0
  }
};

struct FAdd { template <class T> T operator()(T a, T b) const { return a + b; } };
struct FSub { template <class T> T operator()(T a, T b) const { return a - b; } };
struct FMul { template <class T> T operator()(T a, T b) const { return a * b; } };
struct FDiv { template <class T> T operator()(T a, T b) const { return a / b; } };
struct FRcp { template <class T> T operator()(T a) const { return T(1) / a; } };
struct FSqrt { template <class T> T operator()(T a) const { return std::sqrt(a); } };
struct FFma { template <class T> T operator()(T a, T b, T c) const { return std::fma(a, b, c); } };
struct FNeg { template <class T> T operator()(T a) const { return -a; } };
struct FAbs { template <class T> T operator()(T a) const { return std::fabs(a); } };
struct FRelu { template <class T> T operator()(T a, T b, T c) const { const T x = std::fma(a, b, c); return x != x ? x : x > 0 ? x : T(0); } };
// The number of the two where one is NaN; -0 is below +0.
struct FMin {
  template <class T> T operator()(T a, T b) const {
    if (a != a) return b;
    return b < a || (a == b && std::signbit(b)) ? b : a;
  }
};
struct FMax {
  template <class T> T operator()(T a, T b) const {
    if (a != a) return b;
    return b > a || (a == b && std::signbit(a)) ? b : a;
  }
};
struct FMinNaN { template <class T> T operator()(T a, T b) const { return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : FMin()(a, b); } };
struct FMaxNaN { template <class T> T operator()(T a, T b) const { return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : FMax()(a, b); } };
// PTX: the sign of the first, the rest of the second.
struct FCopysign { template <class T> T operator()(T a, T b) const { return std::copysign(b, a); } };

// ---- rounding modes ------------------------------------------------------------------------------

inline int rounding(Form& f) {
  static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  const int at = f.one_of({"rn", "rz", "rm", "rp"});
  return at < 0 ? FE_TONEAREST : modes[at];
}
inline void run_rounded(Warp& w, const Instr& i, Mask mask) {
  std::fesetround(i.mode);
  i.inner(w, i, mask);
  std::fesetround(FE_TONEAREST);
}
inline void with_rounding(Instr& i, int mode) {
  if (mode == FE_TONEAREST) return;
  i.inner = i.run;
  i.mode = mode;
  i.run = run_rounded;
}

template <class F, int sources>
void resolve_floating(Form& f, Instr& i) {
  const int mode = rounding(f);
  const bool ftz = f.take("ftz"), sat = f.take("sat");
  const std::string type = f.last();
  const bool known = with_float(type, [&](auto t) {
    using T = decltype(t);
    const auto pick = [&](auto op) {
      using Op = decltype(op);
      if constexpr (sources == 1) i.run = unary<Op, T>;
      if constexpr (sources == 2) i.run = binary<Op, T>;
      if constexpr (sources == 3) i.run = ternary<Op, T>;
    };
    if (sat)
      ftz ? pick(Saturated<Flushed<F>>()) : pick(Saturated<Lifted<F>>());
    else
      ftz ? pick(Flushed<F>()) : pick(Lifted<F>());
  });
  if (!known || (sat && type != "f32") || (mode != FE_TONEAREST && type[0] != 'f'))
    throw std::runtime_error("unknown opcode or modifier: " + f.whole);
  with_rounding(i, mode);
}
// An opcode that integers have, too.
template <class Integer, class Floating, int sources>
void resolve_either(Form& f, Instr& i) {
  const std::string& type = f.parts.back();
  if (type.find('f') != std::string::npos) return resolve_floating<Floating, sources>(f, i);
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

// ---- approximations ------------------------------------------------------------------------------

// A number in [-1, 1) that an operand and a launch's seed decide, times the share of the documented
// error that the launch uses. Hardware, too, gives the same result for the same operand.
inline uint64_t random_seed = 1;
inline double random_share = 1;
inline double random_step(double operand) {
  uint64_t x = cast<uint64_t>(operand) * 0x9e3779b97f4a7c15u + random_seed;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return double(int64_t(x ^ x >> 31)) * 0x1p-63 * random_share;
}

// Somewhere within `relative` of x (or `absolute`, if that is more), in single precision. Rounding
// takes its half ulp, at most 2^-24, out of the room.
inline float anywhere(double operand, double x, double relative, double absolute = 0) {
  if (!std::isfinite(x) || x == 0) return float(x);
  const double room = std::fmax(std::fabs(x) * (relative - 0x1p-24), absolute);
  return float(x + room * random_step(operand));
}

// Errors from the PTX ISA 9.0: relative; but that of rcp is an ulp, hence half of one before it is
// rounded, and that of lg2 2^-22 absolute in [0.5, 2].
struct Ex2 { static double of(double x) { return std::exp2(x); } static constexpr double error = 0x1p-22; };
struct Rcp { static double of(double x) { return 1 / x; } static constexpr double error = 0; };
struct Rsqrt { static double of(double x) { return 1 / std::sqrt(x); } static constexpr double error = 0x1.13p-23; };
struct Sqrt { static double of(double x) { return std::sqrt(x); } static constexpr double error = 0x1p-23; };
struct Tanh { static double of(double x) { return std::tanh(x); } static constexpr double error = 0x1p-11; };
struct Lg2 { static double of(double x) { return std::log2(x); } static constexpr double error = 0x1p-22, absolute = 0x1p-22; };

template <class F, bool ftz>
void approximate(Warp& w, const Instr& i, Mask mask) {
  float* d = w.of<float>(i.o[0]);
  const float* a = w.of<float>(i.o[1]);
  each(mask, [&](int l) {
    const float x = ftz ? flushed(a[l]) : a[l];
    double absolute = 0;
    if constexpr (std::is_same_v<F, Rcp>) absolute = std::ldexp(1.0, std::ilogb(F::of(x)) - 24);
    if constexpr (std::is_same_v<F, Lg2>) absolute = x >= 0.5f && x <= 2 ? F::absolute : 0;
    // NVIDIA's own tanh in fp64 relies on exact powers of two.
    const bool exact = std::is_same_v<F, Ex2> && std::trunc(x) == x;
    const float y = exact ? float(F::of(x)) : anywhere(x, F::of(x), F::error, absolute);
    d[l] = ftz ? flushed(y) : y;
  });
}
// Half precision: 2^-9.9 for ex2 of f16, 2^-7 of bf16; 2^-10.987 and 2^-8 for tanh.
template <class F, class T>
void approximate_half(Warp& w, const Instr& i, Mask mask) {
  constexpr bool brain = std::is_same_v<T, bf16> || std::is_same_v<T, Pair<bf16>>;
  constexpr bool exponential = std::is_same_v<F, Ex2>;
  constexpr double error = exponential ? (brain ? 0x1p-7 : 0x1.1p-10) : (brain ? 0x1p-8 : 0x1p-11);
  const auto one = [&](auto x) {
    using H = decltype(x);
    const double y = F::of(float(x));
    return std::isfinite(y) ? H(y * (1 + error * random_step(double(float(x))))) : H(y);
  };
  T* d = w.of<T>(i.o[0]);
  const T* a = w.of<T>(i.o[1]);
  each(mask, [&](int l) {
    if constexpr (is_pair<T>)
      d[l] = {one(a[l].x), one(a[l].y)};
    else
      d[l] = one(a[l]);
  });
}
// rcp.approx.ftz.f64: the upper half of an approximation, the lower one zero.
inline void reciprocal_start(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    double x = w.of<double>(i.o[1])[l];
    if (std::fabs(x) < std::numeric_limits<double>::min()) x = std::copysign(0.0, x);
    const uint64_t up = random_step(x) < 0 ? uint64_t(1) << 32 : 0;
    const uint64_t bits = cast<uint64_t>(1 / x);
    const bool finite = x != 0 && std::isfinite(x);
    w.of<double>(i.o[0])[l] = finite ? cast<double>((bits + up) & ~uint64_t(0xffffffff)) : 1 / x;
  });
}

template <class F>
void resolve_approximation(Form& f, Instr& i) {
  const bool ftz = f.take("ftz");
  if (!f.take("approx")) f.unknown();
  const std::string type = f.last();
  if (type == "f32")
    i.run = ftz ? approximate<F, true> : approximate<F, false>;
  else if (type == "f64" && std::is_same_v<F, Rcp> && ftz)
    i.run = reciprocal_start;
  else if constexpr (std::is_same_v<F, Ex2> || std::is_same_v<F, Tanh>)
    with_float(type, [&](auto t) {
      using T = decltype(t);
      if constexpr (is_half<T> || is_pair<T>) i.run = approximate_half<F, T>;
    });
}
template <class Approximate, class Exact>
void resolve_approximate_or_exact(Form& f, Instr& i) {
  for (const std::string& part : f.parts)
    if (part == "approx") return resolve_approximation<Approximate>(f, i);
  resolve_floating<Exact, 1>(f, i);
}

// div.approx and div.full: two ulp.
template <bool ftz>
void divide_approximately(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    float a = w.of<float>(i.o[1])[l], b = w.of<float>(i.o[2])[l];
    if (ftz) a = flushed(a), b = flushed(b);
    const float y = anywhere(double(a) * 3 + double(b), double(a) / double(b), 0x1p-22);
    w.of<float>(i.o[0])[l] = ftz ? flushed(y) : y;
  });
}
inline void resolve_div(Form& f, Instr& i) {
  if (!f.take("approx") && !f.take("full")) return resolve_either<Div, FDiv, 2>(f, i);
  const bool ftz = f.take("ftz");
  if (f.last() == "f32") i.run = ftz ? divide_approximately<true> : divide_approximately<false>;
}

// ---- comparisons ---------------------------------------------------------------------------------

template <class T>
bool compare(int which, T a, T b) {
  const bool unordered = a != a || b != b;
  switch (which % 6) {
    case 0:
      return which < 6 ? a == b : unordered || a == b;
    case 1:
      return which < 6 ? a != b && !unordered : unordered || a != b;
    case 2:
      return (a < b) || (which >= 6 && unordered);
    case 3:
      return (a <= b) || (which >= 6 && unordered);
    case 4:
      return (a > b) || (which >= 6 && unordered);
    default:
      return (a >= b) || (which >= 6 && unordered);
  }
}
enum Compare { kNum = 12, kNaN = 13 };
inline const std::vector<std::string>& comparisons() {
  static const std::vector<std::string> all = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                               "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
                                               "lo",  "ls",  "hi",  "hs"};
  return all;
}

template <class T, bool ftz>
void compared(Warp& w, const Instr& i, Mask mask) {
  const int which = i.mode & 31, join = i.mode >> 5;
  const size_t first = i.o.size() - (join == 0 ? 2 : 3);  // of the sources; two results or one
  const T *a = w.of<T>(i.o[first]), *b = w.of<T>(i.o[first + 1]);
  const auto read = [](T x) {
    if constexpr (is_half<T>)
      return float(x);
    else if constexpr (ftz)
      return flushed(x);
    else
      return x;
  };
  Mask yes = 0;
  each(mask, [&](int l) {
    const auto x = read(a[l]), y = read(b[l]);
    const bool nan = x != x || y != y;
    const bool is = which == kNum ? !nan : which == kNaN ? nan : compare(which, x, y);
    yes |= Mask(is) << l;
  });
  Mask no = ~yes;
  if (join > 0) {
    const Mask other = w.predicate(i.o[first + 2]);
    const auto joined = [&](Mask x) { return join == 1 ? x & other : join == 2 ? x | other : x ^ other; };
    yes = joined(yes), no = joined(no);
  }
  const auto put = [&](const Operand& o, Mask x) {
    Mask& d = w.predicate(o);
    d = (d & ~mask) | (x & mask);
  };
  put(i.o[0], yes);
  if (first == 2) put(i.o[1], no);
}

inline void resolve_setp(Form& f, Instr& i) {
  int which = f.one_of(comparisons());
  if (which < 0) f.unknown();
  if (which > kNaN) which = (which - kNaN - 1) + 2;  // lo, ls, hi, hs are lt, le, gt, ge
  const int join = f.one_of({"and", "or", "xor"}) + 1;
  const bool ftz = f.take("ftz");
  i.mode = which | join << 5;
  const std::string type = f.last();
  if (type == "f32" && ftz) {
    i.run = compared<float, true>;
    return;
  }
  if (with_integer(type, [&](auto t) { i.run = compared<decltype(t), false>; })) return;
  with_float(type, [&](auto t) {
    using T = decltype(t);
    if constexpr (!is_pair<T>) i.run = compared<T, false>;
  });
}

inline void add_floating_opcodes() {
  auto& all = opcodes();
  all["add"] = resolve_either<Add, FAdd, 2>;
  all["sub"] = resolve_either<Sub, FSub, 2>;
  all["neg"] = resolve_either<Neg, FNeg, 1>;
  all["abs"] = resolve_either<Abs, FAbs, 1>;
  all["min"] = resolve_extreme<Min, FMin, FMinNaN>;
  all["max"] = resolve_extreme<Max, FMax, FMaxNaN>;
  all["copysign"] = resolve_floating<FCopysign, 2>;
  all["div"] = resolve_div;
  all["setp"] = resolve_setp;
  all["mul"] = [](Form& f, Instr& i) {
    const bool floating = f.parts.back().find('f') != std::string::npos;
    floating ? resolve_floating<FMul, 2>(f, i) : product<2>(f, i);
  };
  all["mad"] = [](Form& f, Instr& i) {
    const bool floating = f.parts.back().find('f') != std::string::npos;
    floating ? resolve_floating<FFma, 3>(f, i) : product<3>(f, i);
  };
  all["fma"] = [](Form& f, Instr& i) {
    f.take("relu") ? resolve_floating<FRelu, 3>(f, i) : resolve_floating<FFma, 3>(f, i);
  };
  all["rcp"] = resolve_approximate_or_exact<Rcp, FRcp>;
  all["sqrt"] = resolve_approximate_or_exact<Sqrt, FSqrt>;
  all["ex2"] = resolve_approximation<Ex2>;
  all["lg2"] = resolve_approximation<Lg2>;
  all["rsqrt"] = resolve_approximation<Rsqrt>;
  all["tanh"] = resolve_approximation<Tanh>;
}

}  // namespace ptx

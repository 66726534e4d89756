// Floating point: operations that round exactly.
#pragma once

#include <cfenv>
#include <limits>

#include "moves.h"

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

using FAdd = decltype([]<class T>(T a, T b) { return a + b; });
using FSub = decltype([]<class T>(T a, T b) { return a - b; });
using FMul = decltype([]<class T>(T a, T b) { return a * b; });
using FDiv = decltype([]<class T>(T a, T b) { return a / b; });
using FRcp = decltype([]<class T>(T a) { return T(1) / a; });
using FSqrt = decltype([]<class T>(T a) { return std::sqrt(a); });
using FFma = decltype([]<class T>(T a, T b, T c) { return std::fma(a, b, c); });
using FNeg = decltype([]<class T>(T a) { return -a; });
using FAbs = decltype([]<class T>(T a) { return std::fabs(a); });
using FRelu = decltype([]<class T>(T a, T b, T c) {
  const T x = std::fma(a, b, c);
  return x != x ? x : x > 0 ? x : T(0);
});
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
// PTX: the sign of the first, the rest of the second.
using FCopysign = decltype([]<class T>(T a, T b) { return std::copysign(b, a); });

// ---- rounding modes ----

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

}  // namespace ptx

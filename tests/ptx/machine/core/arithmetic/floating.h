// Floating point: operations that round exactly.
#pragma once

#include <cfenv>
#include <limits>

#include "moves.h"

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
using FRcp = decltype([]<class T>(T a) { return T(1) / a; });
using FFma = decltype([]<class T>(T a, T b, T c) { return std::fma(a, b, c); });
using FNeg = decltype([]<class T>(T a) { return -a; });
using FAbs = decltype([]<class T>(T a) { return std::fabs(a); });
using FAbsFlushed = decltype([](float a) { return std::fabs(flushed(a)); });
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

}  // namespace ptx

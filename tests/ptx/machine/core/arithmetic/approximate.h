// Approximations, anywhere inside the error that PTX gives them.
#pragma once

#include "floating.h"

namespace ptx {

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
struct Ex2 {
  static double of(double x) { return std::exp2(x); }
  static constexpr double error = 0x1p-22;
};
struct Rcp {
  static double of(double x) { return 1 / x; }
  static constexpr double error = 0;
};
struct Rsqrt {
  static double of(double x) { return 1 / std::sqrt(x); }
  static constexpr double error = 0x1.13p-23;
};
struct Sqrt {
  static double of(double x) { return std::sqrt(x); }
  static constexpr double error = 0x1p-23;
};
struct Tanh {
  static double of(double x) { return std::tanh(x); }
  static constexpr double error = 0x1p-11;
};
struct Lg2 {
  static double of(double x) { return std::log2(x); }
  static constexpr double error = 0x1p-22, absolute = 0x1p-22;
};

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

}  // namespace ptx

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
  if (!f.take("approx")) return resolve_floating<FRcp, 1>(f, i);
  if (f.take("ftz")) i.run = f.last() == "f64" ? reciprocal_start : reciprocal;
}
inline void resolve_div(Form& f, Instr& i) {
  if (!f.take("full")) return resolve_either<Div, FDiv, 2>(f, i);
  if (f.last() == "f32") i.run = divide_approximately;
}

}  // namespace ptx

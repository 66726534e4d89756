// setp, and the opcodes of floating point.
#pragma once

#include "approximate.h"

namespace ptx {

// The first twelve of comparisons(): the latter six are also true of what is unordered.
template <class T>
bool compare(int which, T a, T b) {
  if (a != a || b != b) return which >= 6;
  const bool all[] = {a == b, a != b, (a < b), (a <= b), (a > b), (a >= b)};
  return all[which % 6];
}
enum Compare { kNum = 12, kNaN = 13 };
inline const std::vector<std::string>& comparisons() {
  static const std::vector<std::string> all = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",
                                               "equ", "neu", "ltu", "leu", "gtu", "geu",
                                               "num", "nan", "lo",  "ls",  "hi",  "hs"};
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
    const auto joined = [&](Mask x) {
      return join == 1 ? x & other : join == 2 ? x | other : x ^ other;
    };
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

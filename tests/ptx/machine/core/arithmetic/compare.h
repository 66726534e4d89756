// setp, and the opcodes of floating point.
#pragma once

#include "approximate.h"

namespace ptx {

// The first twelve of resolve_setp: the latter six are also true of what is unordered.
template <class T>
bool compare(int which, T a, T b) {
  if (a != a || b != b) return which >= 6;
  const bool all[] = {a == b, a != b, (a < b), (a <= b), (a > b), (a >= b)};
  return all[which % 6];
}
constexpr int kNum = 12, kNaN = 13;

template <class T>
void compared(Warp& w, const Instr& i, Mask mask) {
  using Read = std::conditional_t<is_half<T>, float, T>;
  const T *a = w.of<T>(i.o[1]), *b = w.of<T>(i.o[2]);
  Mask yes = 0;
  each(mask, [&](int l) {
    const auto x = Read(a[l]), y = Read(b[l]);
    const bool nan = x != x || y != y;
    const bool is = i.mode == kNum ? !nan : i.mode == kNaN ? nan : compare(i.mode, x, y);
    yes |= Mask(is) << l;
  });
  w.set_predicate(i.o[0], mask, yes);
}

inline void resolve_setp(Form& f, Instr& i) {
  i.mode = f.one_of(
      {"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
  if (i.mode < 0 || i.o.size() != 3) f.unknown();
  const std::string type = f.last();
  const auto pick = [&](auto t) { i.run = compared<decltype(t)>; };
  if (type == "f16") pick(f16{});
  if (type == "bf16") pick(bf16{});
  if (!with_integer(type, pick)) with_float(type, pick);
}

inline void add_floating_opcodes() {
  auto& all = opcodes();
  all["add"] = resolve_either<Add, FAdd, 2>;
  all["sub"] = resolve_either<Sub, FSub, 2>;
  all["neg"] = resolve_either<Neg, FNeg, 1>;
  all["abs"] = [](Form& f, Instr& i) {
    if (!f.take("ftz")) return resolve_floating<FAbs, 1>(f, i);
    if (f.last() == "f32") i.run = unary<FAbsFlushed, float>;
  };
  all["min"] = resolve_extreme<Min, FMin, FMinNaN>;
  all["max"] = resolve_extreme<Max, FMax, FMaxNaN>;
  all["copysign"] = resolve_floating<FCopysign, 2>;
  all["setp"] = resolve_setp;
  all["mul"] = [](Form& f, Instr& i) {
    f.parts.back()[0] == 'f' ? resolve_floating<FMul, 2>(f, i) : product<2>(f, i);
  };
  all["mad"] = product<3>;
  all["fma"] = resolve_floating<FFma, 3>;
  all["div"] = resolve_div;
  all["rcp"] = resolve_rcp;
  all["ex2"] = resolve_ex2;
}

}  // namespace ptx

// Scores of pooling without a query, of heads i and keys j:
//
//   score[i,j] = w[i] . hidden[j],  hidden[j] = tanh(x[j]) sigmoid(y[j])
//
//   x, y   (Tk,H)    keys through the two layers; without a gate its factor is 1
//   w      (Tq,H)    a vector for each head
//
// Rows of hidden are made in the first-level cache, a few keys at a time.
#pragma once

#include "scores.h"

namespace bahdanau_fast {
namespace {

// Hidden units from h on of keys [j, j + kInnerRows), and what they are made of; past `count` keys
// the last one again, and zero past H. `Rows` gives the row of a key.
template <class A, bool gated>
struct Hidden {
  static constexpr int kKeys = kInnerRows;
  Vec<A> x[kKeys], tanh[kKeys], y[gated ? kKeys : 1], sigmoid[gated ? kKeys : 1];

  template <class Rows>
  BF_INLINE Hidden(const Rows& inner, const Rows& gate, int64_t j, int64_t count, int64_t h,
                   int64_t H) {
    const auto key = [&](int l) { return j + (l < count ? l : count - 1); };
    for (int l = 0; l < kKeys; ++l) x[l] = load_row<A>(inner[key(l)], h, H);
    activated<A, Activation::tanh, kKeys>(x, A(0), tanh);
    if constexpr (gated) {
      for (int l = 0; l < kKeys; ++l) y[l] = load_row<A>(gate[key(l)], h, H);
      activated<A, Activation::sigmoid, kKeys>(y, A(0), sigmoid);
    }
  }

  BF_INLINE Vec<A> product(int l) const {
    if constexpr (gated) return tanh[l] * sigmoid[l];
    return tanh[l];
  }
};

// Rows of `width` numbers, kInnerRows of them.
template <class A, bool gated, class Rows>
void hidden_rows(const Rows& inner, const Rows& gate, int64_t j, int64_t count, int64_t H,
                 int64_t width, A* out) {
  for (int64_t h = 0; h < width; h += kLanes<A>) {
    const Hidden<A, gated> units(inner, gate, j, count, h, H);
    for (int l = 0; l < kInnerRows; ++l) store(out + l * width + h, units.product(l));
  }
}

}  // namespace
}  // namespace bahdanau_fast

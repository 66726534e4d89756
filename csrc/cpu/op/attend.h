// The forward and backward that several operators are made of.
#pragma once

#include "run.h"

namespace bahdanau_fast {

// Context (B,Tq,Dv), and weights (B,Tq,Tk) or none, (0), in no less than fp32 or `narrow` as the
// context.
inline std::tuple<Tensor, Tensor> attend_to(const Inputs& in, bool need_weights,
                                            bool narrow = false) {
  const Problem& p = in.problem;
  Tensor context = new_tensor({p.B, p.Tq, p.Dv}, in.storage);
  const std::vector<int64_t> shape = {p.B, p.Tq, p.Tk}, none = {0};
  Tensor weights = new_tensor(need_weights ? shape : none, weights_dtype(in.kind));
  if (p.Tk == 0) torch::stable::zero_(context);
  if (!p.empty())
    run_forward(in, context.mutable_data_ptr(),
                need_weights ? weights.mutable_data_ptr() : nullptr);
  return {context, narrow ? cast(weights, in.storage) : weights};
}

// The gradients that are sums over the queries.
struct KeyGradients {
  KeyGradients(const Tensor& keys_, const Tensor& values_, const Tensor& w_v, int64_t needs_)
      : needs(needs_),
        keys(gradient(keys_, needs & need_keys)),
        values(gradient(values_, needs & need_values)),
        w(gradient(w_v, needs & need_w)) {}

  void zero() {
    for (Tensor* t : {&keys, &values, &w}) torch::stable::zero_(*t);
  }

  // What of `g` they are; w_v's is apart.
  void name_in(Backward* g) {
    g->grad_keys = data_or_null(keys, needs & need_keys);
    g->grad_values = data_or_null(values, needs & need_values);
  }
  void* w_data() { return data_or_null(w, needs & need_w); }

  int64_t needs;
  Tensor keys, values, w;
};

}  // namespace bahdanau_fast

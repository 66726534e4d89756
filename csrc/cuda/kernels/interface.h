// What the operator file and the kernels agree on. No torch, no CUDA in here.
//
// Sizes: B batch, Tq queries, Tk keys, H hidden units, Dv value features.
// T is the type tensors are stored in, A the one sums are taken in, W that of the weights.
#pragma once

#include "common/kinds.h"

namespace bahdanau_fast::gpu {

// A (B, rows, columns) tensor whose columns lie next to each other; strides in elements.
struct View {
  const void* data = nullptr;
  int64_t batch = 0, row = 0;
};

// valid_lens as they came: any real dtype, (B,) (row 0) or (B,Tq), any strides.
enum class LenType : int { none, i64, i32, i16, i8, u8, u16, u32, u64, f32, f64, bf16, f16 };
struct Lens {
  const void* data = nullptr;
  LenType type = LenType::none;
  int64_t batch = 0, row = 0;
};

struct Problem {
  int64_t B = 0, Tq = 0, Tk = 0, H = 0, Dv = 0;
  View queries, keys, values;  // (B,Tq,H), (B,Tk,H), (B,Tk,Dv)
  const void* w = nullptr;     // (H) of T
  Lens lens;
  const int64_t* seed = nullptr;  // one number on the device; null: no dropout
  double dropout_p = 0.0;
};

// What a launch may count on.
struct Device {
  int multiprocessors = 0;
  void* stream = nullptr;
  int cluster = 1;  // blocks of the largest cluster
  // Numbers that are zero before a launch and after it, and its alone until then; maybe none.
  unsigned* counters = nullptr;
};

struct Forward {
  Problem p;
  // A decoder step from queries (B,Tq,Dq) that are not projected yet: W_q (H,Dq), contiguous, of T.
  // Null: they are.
  const void* w_q = nullptr;
  int64_t Dq = 0;
  // From keys (B,Tk,Dk) that are not projected yet: W_k (H,Dk), contiguous, and maybe a bias (H),
  // of T. Null: they are.
  const void* w_k = nullptr;
  const void* bias = nullptr;
  int64_t Dk = 0;
  void* context = nullptr;  // (B,Tq,Dv) of T, contiguous
  void* weights = nullptr;  // (B,Tq,Tk) of W, contiguous; null: not wanted
};

struct Backward {
  Problem p;
  const void* weights = nullptr;  // (B,Tq,Tk) of W, contiguous
  View grad_context;              // (B,Tq,Dv) of T; data may be null
  View grad_weights;              // (B,Tq,Tk) of W; data may be null
  void* grad_queries = nullptr;   // (B,Tq,H) of T, contiguous; null: not asked for
  void* grad_keys = nullptr;      // (B,Tk,H), likewise
  void* grad_values = nullptr;    // (B,Tk,Dv), likewise
  void* grad_w = nullptr;         // (H), likewise
};

// The launches of one kind. The workspace needs no preparation and is free again when they are
// done. B, Tq and Tk are at least one.
struct Kernels {
  // Whether forward can be one launch, which alone projects what is not projected.
  bool (*is_one_launch)(const Forward&, const Device&);
  // How many of the device's counters forward would use: without them it clears its own first,
  // which is a launch more.
  int64_t (*counters)(const Forward&, const Device&);
  int64_t (*forward_workspace)(const Forward&, const Device&);
  void (*forward)(const Forward&, const Device&, void* workspace);
  int64_t (*backward_workspace)(const Backward&, const Device&);
  void (*backward)(const Backward&, const Device&, void* workspace);
  int (*largest_cluster)();  // on the current GPU
};

// One table per Kind, each compiled in a file of its own.
extern const Kernels kernels_f32, kernels_f64, kernels_bf16, kernels_f16, kernels_f32_in_f64;

}  // namespace bahdanau_fast::gpu

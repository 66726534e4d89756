// The interface between op/ and the kernels. No torch, no CUDA in here.
//
// T is the storage type of the tensors. Sums, and the attention weights, are fp32.
#pragma once

#include <functional>

#include "common/problem.h"

// A constant that the build of `make gpu-bundle` has as a variable, for benchmarks/gpu to set;
// in every other build it is one.
#ifdef BAHDANAU_FAST_LAB
#define LAB_CONSTEXPR __attribute__((visibility("default"))) inline
#else
#define LAB_CONSTEXPR constexpr
#endif

namespace bahdanau_fast::gpu {

// The dtypes of valid_lens: F(name, type) for each.
// clang-format off
#define BAHDANAU_FAST_LEN_TYPES(F)                                                  \
  F(i64, int64_t) F(i32, int32_t) F(i16, int16_t) F(i8, int8_t)                     \
  F(u64, uint64_t) F(u32, uint32_t) F(u16, uint16_t) F(u8, uint8_t)                 \
  F(f64, double) F(f32, float) F(bf16, bahdanau_fast::bf16) F(f16, bahdanau_fast::f16)
// clang-format on
#define BAHDANAU_FAST_NAME(name, type) name,
enum class LenType : int { none, BAHDANAU_FAST_LEN_TYPES(BAHDANAU_FAST_NAME) };
#undef BAHDANAU_FAST_NAME

// (B,) (with row_stride 0) or (B,Tq), any strides.
struct Lens {
  const void* data = nullptr;
  LenType type = LenType::none;
  int64_t batch_stride = 0, row_stride = 0;
};

// True where a query may look: bool (B,1,Tk), with row_stride 0, or (B,Tq,Tk), any strides.
struct Mask {
  const bool* data = nullptr;  // null: everywhere
  int64_t batch_stride = 0, row_stride = 0, key_stride = 0;
};

// w is (H) of T here.
struct Problem : Operands {
  Lens lens;
  Mask mask;
  const int64_t* seed = nullptr;  // one number on the device; null: no dropout
  uint64_t threshold = 0;         // dropout_threshold() and dropout_scale() of dropout_p
  float scale = 1.0f;
};

// The current GPU, as far as a launch depends on it.
struct Device {
  int index = 0;
  int multiprocessors = 0;
  int shared = 0;   // bytes of shared memory that a block can ask for
  int cluster = 1;  // blocks of the largest cluster
  void* stream = nullptr;
};

// Whether blocks may meet in clusters. Set before a GPU is first asked for its Device, if at all.
inline bool clusters_on = true;

// So many bytes, which may hold anything, for what is queued on the stream until the call ends.
using Memory = std::function<void*(int64_t bytes)>;

struct Forward {
  Problem p;
  // To project queries (B,Tq,Dq): W_q (H,Dq), contiguous, of T. Null: they are projected already.
  const void* w_q = nullptr;
  int64_t Dq = 0;
  void* context = nullptr;  // (B,Tq,Dv) of T, contiguous
  void* weights = nullptr;  // (B,Tq,Tk) of fp32, contiguous; null: not wanted
  bool narrow = false;      // weights are of T
  // (B,counts_row): how many keys the lengths leave, of the first queries; null: not wanted.
  int32_t* counts = nullptr;
  int64_t counts_row = 0;
};

struct Backward : Gradients {
  Problem p;
  int64_t splits = 1, split = 1;  // parts of the keys, and keys in each
  bool narrow = false;            // weights and grad_weights are of T instead of fp32
  // What launches leave to the next ones; null: not wanted, or of products zero.
  const void* products = nullptr;  // (B,Tq,Tk) of T: grad_context . value
  void* grad_scores = nullptr;     // (B,Tq,Tk) of fp32; with moments, gradients of the weights
  void* moments = nullptr;         // (B,Tq,splits,2) of Sum (decode_backward.h)
  void* dropped = nullptr;         // (B,Tq,Tk) of T: weights after dropout
  void *queries_parts = nullptr, *w_parts = nullptr;  // (splits,B,Tq,H), (splits,B,H) of fp32
};

// All steps of a recurrent decoder of one layer; p.H are the hidden units of the attention, F, and
// p.queries is not used. Gates are in the order of the CPU's operator: GRU n r z on the side of the
// inputs, r z n on that of the states; LSTM i f g o. Tensors are of T, contiguous, and begin at
// multiples of 16 bytes, unless something else is said.
struct Decoder {
  Problem p;  // B, Tk, F, Dv; Tq is one
  bool lstm = false, backward = false;
  int64_t T = 0, H = 0;  // steps, units
  // Tokens, a multiple of 16, where each step's input is the one that the last step wrote; 0: the
  // inputs are given.
  int64_t V = 0;
  const void *w_query = nullptr, *w_hidden = nullptr;  // (F,H), (G,H)
  View w_context;                                      // (G,Dv)
  const void *hidden = nullptr, *cell = nullptr;       // (B,H); an LSTM has cells, here and below
  const void* bias = nullptr;                          // (H) of a GRU's n, after W_h

  int64_t gates() const { return lstm ? 4 : 3; }
};

// Each step's input is the likeliest token of the step before, until every row has ended.
struct Greedy {
  int64_t first = 0, last = 0, blank = 0;  // the first input, what ends a row, what follows that
  const void* table = nullptr;             // (V,G): the gates of every token
  const void *w_dense = nullptr, *bias = nullptr;  // (V,H), (V): -inf is never chosen
  int64_t* tokens = nullptr;                       // (B,T)
  int64_t* steps = nullptr;                        // how many were taken
  unsigned long long* best = nullptr;              // (2,B), zero before
  bool whole = false;                              // all T steps are taken
};

struct DecoderForward : Decoder {
  const void* input_gates = nullptr;  // (T,B,G)
  Greedy greedy;                      // instead of inputs
  // (T+1,B,H); greedily two states, in turn, and no cells.
  void *states = nullptr, *cells = nullptr;
  void* weights = nullptr;  // (T,B,Tk) of fp32
  // What backward takes. Contexts and queries have one step unless there are gates.
  void *contexts = nullptr, *queries = nullptr;  // (T,B,Dv), (T,B,F)
  void* saved_gates = nullptr;                   // (T,B,4H), or null: n r z, n after W_h; i f g o
};

struct DecoderBackward : Decoder {
  explicit DecoderBackward(const Decoder& decoder) : Decoder(decoder) { backward = true; }

  const void *states = nullptr, *cells = nullptr, *queries = nullptr;  // of forward
  const void *weights = nullptr, *saved_gates = nullptr;
  // Of the results: (T,B,H), (B,H), (B,H), (T,B,Tk) of fp32; null: zero.
  const void *grad_states = nullptr, *grad_hidden = nullptr;
  const void *grad_cell = nullptr, *grad_weights = nullptr;
  // (T,B,4H): n r z of the inputs, n of the states; i f g o. The first G belong to the inputs, the
  // last G to the states.
  void* grad_gates = nullptr;
  void *grad_first = nullptr, *grad_first_cell = nullptr;  // (B,H)
  void *grad_queries = nullptr, *grad_contexts = nullptr;  // (T,B,F), (T,B,Dv)
  void* grad_scores = nullptr;                             // (B,T,Tk) of fp32
  void* dropped = nullptr;                                 // (T,B,Tk) of T, with dropout
};

// The launches of one kind. B, Tq and Tk must be at least one, and serves() true.
struct Kernels {
  bool (*serves)(const Problem&);
  // Whether forward can project the queries, and it pays.
  bool (*projects)(const Forward&, const Device&);
  void (*forward)(const Forward&, const Device&, const Memory&);
  // In three launches at most; false where that is left to those below and to products.
  bool (*backward)(const Backward&, const Device&, const Memory&);
  void (*grad_rows)(const Backward&, const Device&);                 // to the scores,
  void (*grad_keys)(const Backward&, const Device&, const Memory&);  // and from there
  int (*largest_cluster)();                                          // on the current GPU
  // All steps in one launch, on 16 bits alone: what is against it, or null, and the launches.
  const char* (*why_not_decode)(const Decoder&, const Device&) = nullptr;
  void (*decode)(const DecoderForward&, const Device&, const Memory&) = nullptr;
  void (*decode_backward)(const DecoderBackward&, const Device&, const Memory&) = nullptr;
  // What keeps them from running on the current GPU; null if nothing does.
  const char* (*why_not)() = nullptr;
};

// One table per storage type, compiled in a file per type.
extern const Kernels kernels_f32, kernels_bf16, kernels_f16;

// Why all steps of such a decoder are not one launch on the current GPU, in 16 bits; null if they
// can be (op/decoder.cpp). Of V tokens at most T steps are written.
const char* why_not_decode(const Decoder& d);

}  // namespace bahdanau_fast::gpu

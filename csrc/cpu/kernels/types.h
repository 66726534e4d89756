// The interface between op/ and the kernels. No torch, no instruction set in here.
#pragma once

#include "common/problem.h"

namespace bahdanau_fast {

// Largest |c| of a key: up to `exponent`, exp(2c) is a normal number; up to `shared`, so are
// products of four such numbers or of their inverses, times w, which one division can then serve.
template <class A>
struct Range;
template <>
struct Range<float> {
  static constexpr float exponent = 43.0f;  // exp(+-86)
  static constexpr float shared = 9.0f;     // exp(+-18 * 4) within 2^+-104
};
template <>
struct Range<double> {
  static constexpr double exponent = 354.0;
  static constexpr double shared = 80.0;  // exp(+-160 * 4) within 2^+-924
};
// A batch row whose every |c| is below this keeps expm1(2c) in its table, else exp(2c).
constexpr double kShiftLimit = 0.5;

// What is applied to the sum inside a score; the numbers are those of checks.ACTIVATIONS.
enum class Activation : int { tanh = 0, relu = 1, leaky_relu = 2, sigmoid = 3 };

// What a score has inside beside query and key; sums/scores.h computes it.
struct Inside {
  Activation activation = Activation::tanh;
  double negative_slope = 0.0;
  int64_t C = 0;              // features of a key
  View features;              // (B,Tk,C) in the sum type
  int64_t feature_step = 1;   // from one feature of a key to the next
  const void* w_f = nullptr;  // (C,width) in the sum type, zero past H
};

struct Problem : Operands {
  // w has `width` elements in the sum type: w_v / w_scale, zero past H.
  int64_t width = 0;                    // of a table row: H rounded up to whole 64-byte lines
  const void* table = nullptr;          // (B,Tk,width) in the sum type; null: none was given
  const void* keys_max = nullptr;       // (B) in the sum type, max |c|
  double w_scale = 1.0;                 // power of two that brings every |w| below 2
  const int64_t* key_counts = nullptr;  // (B,Tq), from keys_within(); 0: uniform over all keys
  // (B,Tq,Tk) bool, true where a query may look; null where key_counts say it all. A count is then
  // that of the keys up to the last true one.
  View mask;
  bool dropout = false;
  uint64_t seed = 0;
  Inside inside;
  // Scores are activations of sums; else tanh by products of exponentials, without features.
  bool from_sums = false;
  // Scores are halves of what sigmoid has, of tanh of halved sums: their gradients are halved, too.
  bool halved = false;
  // Pooling without a query (sums/heads.h): its heads stand where queries do, and `queries` has one
  // row of weights for each, the same for the whole batch. `keys` are the sums inside tanh.
  bool pools = false;
  View gate;  // (B,Tk,H), the sums inside the sigmoid, storage type; data may be null
  const void* head_bias = nullptr;  // (Tq) in the sum type; may be null
};

// How the forward is cut into tasks. It depends on the sizes only: results are the same for any
// number of threads.
constexpr int64_t kQueryBlock = 16;  // most queries of a task

struct ForwardPlan {
  int64_t query_block = 1;  // queries per task
  int64_t query_blocks = 1;
  int64_t chunk = 1;  // keys per task
  int64_t chunks = 1;
};

struct ForwardOut {
  // (B,Tq,Tk), contiguous, WeightOf: if not null, the scores are the only result.
  void* logits = nullptr;
  void* context = nullptr;  // (B,Tq,Dv), contiguous, storage type
  void* weights = nullptr;  // (B,Tq,Tk), contiguous, WeightOf; may be null
  // In the sum type, if a row is cut into several chunks: the scores, and for each chunk their
  // maximum, the sum of exp(score - maximum), and the values weighted by that.
  void* scores = nullptr;    // (B,Tq,Tk)
  void* maxima = nullptr;    // (B,Tq,chunks)
  void* sums = nullptr;      // (B,Tq,chunks)
  void* contexts = nullptr;  // (B,Tq,chunks,Dv)
};

// grad_w is (B,width) in the sum type here: one part per batch row; of pooling (B,Tq,width).
struct Backward : Gradients {
  void* grad_gate = nullptr;  // (B,Tk,H), storage type; may be null
  // Gradients of the scores and dropped-out weights, (B,Tq,Tk), contiguous, WeightOf. One call can
  // store both, and a later one start from the gradients in the place of grad_context; all may be
  // null.
  const void* grad_scores_in = nullptr;
  void* grad_scores_out = nullptr;
  void* dropped_weights = nullptr;
  bool adds_to_keys = false;  // grad_keys holds a sum, which this call's are added to (from_sums)
  // Parts of the gradients of features and W_f, in the sum type; may be null.
  void* grad_features = nullptr;  // (B,C,Tk): of a slice of hidden units
  const void* w_f = nullptr;      // (H,C) in the sum type; with grad_features
  void* grad_w_f = nullptr;       // (B,C,width): of a batch row
};

// Rows (B,R,D) times a weight (H,D), plus a bias (H) that may be null.
struct Projection {
  View rows;
  int64_t B = 0, R = 0, D = 0, H = 0;
  const void* w = nullptr;
  const void* bias = nullptr;
};

// Rows of a projection's weight that are taken at a time: they stay in the first-level cache.
constexpr int64_t kProjectUnits = 4;

// A convolution along the keys (sums/convolution.h).
struct Convolution {
  View location;  // (B,inputs,Tk), storage type
  int64_t B = 0, inputs = 0, Tk = 0, C = 0, taps = 0;
  const void* w = nullptr;     // (C,inputs,taps), sum type
  const void* bias = nullptr;  // (C), sum type; may be null
  void* out = nullptr;         // (B,C,Tk), storage type
};

struct ConvolutionGrads {
  View features;             // of `out`
  void* location = nullptr;  // (B,inputs,Tk), contiguous, storage type; may be null
  // (B,C,inputs,taps) in the sum type, batch rows `w_stride` apart: of a batch row; may be null.
  void* w = nullptr;
  int64_t w_stride = 0;
};

// The block that a fingerprint hashes at a time (hash.h).
constexpr int64_t kHashBytes = 4096, kHashWords = kHashBytes / 4;

// One row of a recurrent cell (recurrent.h); all in the sum type.
struct CellStep {
  int64_t H = 0;
  void* gates = nullptr;  // (4H)
  const void* hidden_before = nullptr;
  const void* cell_before = nullptr;  // LSTM only, as is cell
  void* hidden = nullptr;
  void* cell = nullptr;
};

struct CellGrads {
  void* gates = nullptr;  // (4H)
  void* hidden = nullptr;
  void* cell = nullptr;
};

// The kernels of one instruction set. Sizes of workspaces are in elements of the sum type.
struct Kernels {
  // max |c| and the table of batch row b, keys [j0, j1). Two steps, because the form of the table
  // depends on the maximum over the whole row.
  void (*keys_max)(const View& keys, int64_t H, int64_t b, int64_t j0, int64_t j1, void* out);
  void (*exp_keys)(const View& keys, int64_t H, int64_t width, int64_t b, int64_t Tk, int64_t j0,
                   int64_t j1, const void* keys_max, void* table);
  int64_t (*forward_workspace)(const Problem&, const ForwardPlan&);
  void (*forward)(const Problem&, const ForwardPlan&, const ForwardOut&, int64_t task, void* work);
  void (*combine)(const Problem&, const ForwardPlan&, const ForwardOut&, int64_t row);
  void (*grad_scores)(const Problem&, const Backward&, int64_t b, int64_t j0, int64_t j1,
                      void* scores);
  void (*grad_softmax)(const Problem&, const Backward&, int64_t b, void* scores);
  int64_t (*grad_tanh_workspace)(const Problem&, int64_t hidden);
  void (*grad_tanh)(const Problem&, const Backward&, int64_t b, int64_t h0, int64_t h1,
                    const void* scores, void* work);
  // The same from sums.
  int64_t (*grad_of_sums_workspace)(const Problem&, int64_t hidden);
  void (*grad_of_sums)(const Problem&, const Backward&, int64_t b, int64_t h0, int64_t h1,
                       const void* scores, void* work);
  // The same of pooling.
  int64_t (*grad_of_heads_workspace)(const Problem&, int64_t hidden);
  void (*grad_of_heads)(const Problem&, const Backward&, int64_t b, int64_t h0, int64_t h1,
                        const void* scores, void* work);
  // Channels [c0, c1) of batch row b.
  int64_t (*convolve_workspace)(const Convolution&, int64_t channels);
  void (*convolve)(const Convolution&, int64_t b, int64_t c0, int64_t c1, void* work);
  int64_t (*convolve_backward_workspace)(const Convolution&);
  void (*convolve_backward)(const Convolution&, const ConvolutionGrads&, int64_t b, void* work);
  // out[h] = sum over `rows` rows of (rows, width) sums, in their order, in the storage type.
  void (*sum_rows)(const void* parts, int64_t rows, int64_t width, int64_t H, void* out);
  void (*project)(const Projection&, void* out, int64_t stride, void* work);
  void (*project_grad_rows)(const Projection&, const void* grad, int64_t d0, int64_t d1,
                            void* grad_rows, void* work);
  void (*project_grad_weight)(const Projection&, const void* grad, int64_t h0, int64_t h1,
                              void* grad_w, void* grad_bias, void* work);
  int64_t (*panel_columns)();
  void (*pack_panel)(const void* from, int64_t k_stride, int64_t n_stride, int64_t K, int64_t N,
                     int64_t index, void* out);
  void (*multiply_panel)(const void* left, int64_t left_stride, int64_t rows, const void* packed,
                         int64_t K, int64_t N, int64_t index, void* out, int64_t out_stride);
  void (*gru_row)(const CellStep&);
  void (*lstm_row)(const CellStep&);
  void (*gru_row_back)(const CellStep&, const CellGrads&);
  void (*lstm_row_back)(const CellStep&, const CellGrads&);
  // Two numbers per block of kHashBytes; the key has 2 * kHashWords words.
  void (*hash_blocks)(const void* from, int64_t blocks, const uint32_t* key, uint64_t* out);
};

// Tables by instruction set, one entry per Kind.
extern const Kernels kernels_baseline[kKinds];
#ifdef __x86_64__
extern const Kernels kernels_avx2[kKinds];
extern const Kernels kernels_avx512[kKinds];
#endif

}  // namespace bahdanau_fast

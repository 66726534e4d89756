// Scores of many queries, tile by tile; and the softmax of their rows.
//
//   score[b,i,j] = w . tanh(query[b,i] + key[b,j]) for j < key_count[b,i]; the other places are not
//   written
//
//   queries (B,Tq,H), keys (B,Tk,H), w (H): T; scores (B,Tq,Tk): fp32
//
// A block is (batch row, 64 queries, 64 keys), a thread 4 x 4 of them. Hidden units pass through
// shared memory in slices of 32 and are exponentiated once there: for each element, 1/32 of an
// exponential, 1/4 of a reciprocal and loads that four elements share. Tiles of masked keys are
// skipped. Reads (64 + 64) H numbers for each tile, all but the first time from the caches.
#pragma once

#include "tanh.h"

namespace bahdanau_fast::gpu {

constexpr int kTile = 64, kTileThreads = 256, kPitch = kTile + 4;  // padded, still whole vectors
constexpr int kSlice = 32;

struct Scores {
  Problem p;
  void* scores = nullptr;
};

struct ScoresShared {
  float *queries, *keys, *w;  // (kSlice, kPitch) twice, (kSlice)
  unsigned* largest;          // bits of max |query|, |key| and |w| of the slice, twice
  int64_t* key_counts;
  int64_t bytes;

  __host__ __device__ explicit ScoresShared(char* base) {
    Carver from{base};
    queries = from.take<float>(kSlice * kPitch);
    keys = from.take<float>(kSlice * kPitch);
    w = from.take<float>(kSlice);
    largest = from.take<unsigned>(2 * 3);
    key_counts = from.take<int64_t>(kTile);
    bytes = from.used;
  }
};

template <class T>
struct ScoresTask {
  const Problem& p;
  ScoresShared mine;
  int64_t b, i0, j0;
  int ti, tj;  // the thread's place among 16 x 16
  float sums[4][4] = {}, lost[4][4] = {}, sum_w = 0;

  __device__ explicit ScoresTask(const Scores& all) : p(all.p), mine(shared_memory()) {
    const int64_t across = ceil_div(p.Tk, kTile), down = ceil_div(p.Tq, kTile);
    j0 = blockIdx.x % across * kTile;
    i0 = blockIdx.x / across % down * kTile;
    b = blockIdx.x / across / down;
    ti = threadIdx.x / 16;
    tj = threadIdx.x % 16;
  }

  // True if any query uses any key of the tile. Leaves the key counts in shared memory.
  __device__ bool any_key() {
    if (threadIdx.x < kTile)
      mine.key_counts[threadIdx.x] =
          i0 + threadIdx.x < p.Tq ? key_count(p, b, i0 + threadIdx.x) : 0;
    if (threadIdx.x < 6) mine.largest[threadIdx.x] = 0;
    return __syncthreads_or(threadIdx.x < kTile && mine.key_counts[threadIdx.x] > j0);
  }

  static constexpr int kRows = kTile / (kTileThreads / kSlice);
  // The thread's part of a slice of rows [first, first + kTile) of a view; past the end anything.
  __device__ void fetch_rows(const View& view, int64_t first, int64_t rows, int64_t h0, float* x) {
    const int64_t h = smaller(h0 + threadIdx.x % kSlice, p.H - 1);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int r = threadIdx.x / kSlice + k * (kTileThreads / kSlice);
      x[k] = widen(row_at<T>(view, b, smaller(first + r, rows - 1))[h]);
    }
  }
  // Writes it transposed, zero past the end; returns the thread's max |x|.
  __device__ float load_rows(int64_t first, int64_t rows, int64_t h0, const float* x, float* out) {
    const int h = threadIdx.x % kSlice;
    float largest = 0;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int r = threadIdx.x / kSlice + k * (kTileThreads / kSlice);
      const float y = first + r < rows && h0 + h < p.H ? x[k] : 0.0f;
      out[h * kPitch + r] = y;
      const float size = fabsf(y);
      largest = size > largest || size != size ? size : largest;
    }
    return largest;
  }

  // In place, each thread the elements it loaded.
  __device__ void exponentiate(float* slice, Form form) {
    const int h = threadIdx.x % kSlice;
#pragma unroll
    for (int r = threadIdx.x / kSlice; r < kTile; r += kTileThreads / kSlice)
      slice[h * kPitch + r] = exp_of_key<T>(slice[h * kPitch + r], form);
  }

  // Floats that are not negative have the order of their bits, NaN above all.
  __device__ void note(unsigned* largest, float x) {
    const unsigned most = __reduce_max_sync(kAllLanes, to_bits(x));
    if (threadIdx.x % kWarp == 0) atomicMax(largest, most);
  }

  __device__ Form load_slice(int64_t h0, int turn) {
    float rows[2][kRows];
    fetch_rows(p.queries, i0, p.Tq, h0, rows[0]);
    fetch_rows(p.keys, j0, p.Tk, h0, rows[1]);
    const float a = load_rows(i0, p.Tq, h0, rows[0], mine.queries);
    const float c = load_rows(j0, p.Tk, h0, rows[1], mine.keys);
    float x = 0;
    if (threadIdx.x < kSlice) {
      if (h0 + threadIdx.x < p.H) x = widen(static_cast<const T*>(p.w)[h0 + threadIdx.x]);
      mine.w[threadIdx.x] = x;
    }
    unsigned* largest = mine.largest + 3 * turn;
    note(largest, a);
    note(largest + 1, c);
    note(largest + 2, fabsf(x));
    __syncthreads();
    const Form form =
        choose_form<T>(from_bits(largest[0]), from_bits(largest[1]), from_bits(largest[2]));
    if (form != Form::direct) {
      exponentiate(mine.queries, Form::factored);
      exponentiate(mine.keys, form);
    }
    __syncthreads();
    if (threadIdx.x < 3) largest[threadIdx.x] = 0;  // the next slice uses the other three
    return form;
  }

  __device__ static void load_four(const float* from, float* out) {
    struct alignas(16) Four {
      float x[4];
    };
    const Four four = *reinterpret_cast<const Four*>(from);
#pragma unroll
    for (int k = 0; k < 4; ++k) out[k] = four.x[k];
  }

  template <Form form>
  __device__ __forceinline__ void add_slice(float (&sums)[4][4]) {
    for (int h = 0; h < kSlice; h += 4) {
      float query[4][4], key[4][4], w[4];  // [unit][row]
      load_four(mine.w + h, w);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_four(mine.queries + (h + k) * kPitch + 4 * ti, query[k]);
        load_four(mine.keys + (h + k) * kPitch + 4 * tj, key[k]);
      }
      if (form != Form::direct) sum_w += (w[0] + w[1]) + (w[2] + w[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (form == Form::direct) {
            const float x[4] = {query[0][i] + key[0][j], query[1][i] + key[1][j],
                                query[2][i] + key[2][j], query[3][i] + key[3][j]};
            const float sum = sum_of_four_tanh<T>(x, w);
            sums[i][j] += sizeof(T) == 2 ? -0.5f * sum : sum;
          } else {
            const float a[4] = {query[0][i], query[1][i], query[2][i], query[3][i]};
            const float c[4] = {key[0][j], key[1][j], key[2][j], key[3][j]};
            sums[i][j] += sum_of_four_fractions<T, form>(a, c, w);
          }
        }
    }
  }

  // In fp32 a slice is added up by itself, and added to those before with what was lost (Kahan).
  template <Form form>
  __device__ __forceinline__ void slice() {
    if constexpr (sizeof(T) == 4) {
      float part[4][4] = {};
      add_slice<form>(part);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float x = part[i][j] - lost[i][j], sum = sums[i][j] + x;
          lost[i][j] = (sum - sums[i][j]) - x;
          sums[i][j] = sum;
        }
    } else {
      add_slice<form>(sums);
    }
  }

  __device__ void run(float* scores) {
    if (!any_key()) return;
    int turn = 0;
    for (int64_t h0 = 0; h0 < p.H; h0 += kSlice, turn ^= 1) {
      const Form form = load_slice(h0, turn);
      if (form == Form::factored) {
        slice<Form::factored>();
      } else if (form == Form::clamped) {
        if constexpr (sizeof(T) == 2) slice<Form::clamped>();
      } else {
        slice<Form::direct>();
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t row = i0 + 4 * ti + i, column = j0 + 4 * tj + j;
        if (row >= p.Tq || column >= mine.key_counts[4 * ti + i]) continue;
        scores[(b * p.Tq + row) * p.Tk + column] =
            sizeof(T) == 2 ? score_of_fractions<T>(sums[i][j], sum_w) : sums[i][j];
      }
  }
};

template <class T>
__global__ void __launch_bounds__(kTileThreads, 2) tile_scores(const Scores s) {
  ScoresTask<T>(s).run(static_cast<float*>(s.scores));
}

// A block per row: scores become normalised weights, zero for masked keys.
//
//   scores (B,Tq,Tk): fp32, in place
struct Softmax {
  Problem p;
  void* scores = nullptr;
};

constexpr int kRowThreads = 128;

template <class T>
__global__ void __launch_bounds__(kRowThreads) row_softmax(const Softmax s) {
  Carver from{shared_memory()};
  float* scratch = from.take<float>(kRowThreads / kWarp);
  const Problem& p = s.p;
  const int64_t row = blockIdx.x, valid = key_count(p, row / p.Tq, row % p.Tq);
  const int64_t keys = valid == 0 ? p.Tk : valid;
  float* scores = static_cast<float*>(s.scores) + row * p.Tk;
  float best = valid == 0 ? 0.0f : -INFINITY, total = 0;
  for (int64_t j = threadIdx.x; j < valid; j += kRowThreads)
    best = scores[j] > best || scores[j] != scores[j] ? scores[j] : best;
  best = block_max(best, scratch);
  for (int64_t j = threadIdx.x; j < keys; j += kRowThreads) {
    const float x = valid == 0 ? 1.0f : expf(scores[j] - best);
    scores[j] = x;
    total += x;
  }
  total = block_sum(total, scratch);
  for (int64_t j = threadIdx.x; j < p.Tk; j += kRowThreads)
    scores[j] = j < keys ? scores[j] / total : 0.0f;
}

}  // namespace bahdanau_fast::gpu

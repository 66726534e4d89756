// What both directions of a whole decoder have: all steps in one launch, whose blocks stay on their
// multiprocessors with the weights of their units in shared memory (persistent_plan.h).
//
//   query[t] = W_q h[t],  context[t] = attention(query[t]),
//   gates[t] = input_gates[t] + W_c context[t] + W_h h[t],  h[t+1] = cell(gates[t], h[t])
#pragma once

#include "persistent_plan.h"
#include "tanh.h"

namespace bahdanau_fast::gpu {

// A launch: Of is a Decoder.
template <class Of>
struct Persistent {
  Of of;
  PersistentPlan plan;
  unsigned* arrived = nullptr;  // a counter for each group, kCounterStride apart, zero before
};
constexpr int kCounterStride = 32;  // in other lines of memory

template <class T>
struct PersistentBlock {
  static constexpr int U = kVector<T>;
  const Decoder& d;
  const Problem& p;
  const PersistentPlan& plan;
  char* const shared;
  // Of the block in its group, of the group's first batch row; how many rows the group has.
  const int rank, row0, rows;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  T *first, *second;  // the weights
  float *own, *query, *w, *grad_context, *scores, *weights, *parts;
  float half_w = 0;  // half the sum of w
  Meeting group;

  template <class Of>
  __device__ explicit PersistentBlock(const Persistent<Of>& all)
      : d(all.of),
        p(all.of.p),
        plan(all.plan),
        shared(shared_memory()),
        rank(int(blockIdx.x) % plan.blocks),
        row0(int(blockIdx.x) / plan.blocks * plan.rows),
        rows(int(smaller(plan.rows, p.B - row0))),
        first(reinterpret_cast<T*>(shared)),
        second(reinterpret_cast<T*>(shared + plan.second)),
        own(floats_at(plan.own)),
        query(floats_at(plan.vectors)),
        w(query + p.H),
        grad_context(w + p.H),
        scores(floats_at(plan.keys)),
        weights(scores + p.Tk),
        parts(floats_at(plan.parts)),
        group{all.arrived + int(blockIdx.x) / plan.blocks * kCounterStride, unsigned(plan.blocks)} {
  }

  __device__ float* floats_at(int offset) const {
    return reinterpret_cast<float*>(shared + offset);
  }

  // Number `kind` of the block's unit u in batch row b of the group.
  __device__ __forceinline__ float& own_at(int kind, int u, int b) const {
    return own[(kind * plan.units + u) * plan.own_stride() + b];
  }
  // Calls f(u, b, h) for the block's units, h of all, in each batch row.
  template <class F>
  __device__ __forceinline__ void each_unit(const F& f) const {
    for (int at = threadIdx.x; at < rows * plan.units; at += kPersistentThreads) {
      const int b = at / plan.units, u = at - b * plan.units;
      const int64_t h = int64_t(rank) * plan.units + u;
      if (h < d.H) f(u, b, h);
    }
  }

  // ---- once ----

  // Rows of a weight whose rows are columns in global memory, one number after another; from(row,
  // column) is the address of one, null for zero. Eight loads are in flight.
  template <class From>
  __device__ void load_transposed(T* to, int count, int columns, const From& from) const {
    constexpr int W = 8;
    const int padded = int(ceil_div(count, 16) * 16), pitch = int(pitch_of(columns));
    const int all = padded * columns;
#pragma unroll 1
    for (int first = threadIdx.x; first < all; first += W * kPersistentThreads) {
      T x[W];
      int offsets[W];
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const int at = int(smaller(first + k * kPersistentThreads, all - 1));
        const int column = at / padded, row = at - column * padded;
        const T* const address = row < count ? from(row, column) : nullptr;
        // A load without a branch: branches would put one load after another.
        x[k] = read_only(address != nullptr ? address : static_cast<const T*>(p.w));
        if (address == nullptr) x[k] = T{};
        offsets[k] = row * pitch + column;
      }
#pragma unroll
      for (int k = 0; k < W; ++k)
        if (first + k * kPersistentThreads < all) to[offsets[k]] = x[k];
    }
  }
  // Rows of a weight, by asynchronous copies; from(row) is the address of one, null for zeros.
  template <class From>
  __device__ void copy_rows(T* to, int count, int columns, const From& from) const {
    const int padded = int(ceil_div(count, 16) * 16), pitch = int(pitch_of(columns));
#pragma unroll 1
    for (int row = warp; row < padded; row += kPersistentWarps) {
      const T* const address = row < count ? from(row) : nullptr;
      if (address != nullptr)
        copy_row(to + row * pitch, address, columns);
      else
        for (int c = lane * U; c < columns; c += kWarp * U)
          *reinterpret_cast<Bytes16*>(to + row * pitch + c) = Bytes16{};
    }
  }

  // Zero for so many kinds of own numbers, w as the scores take it, or as it is, and keys and
  // values if they stay.
  __device__ void load_memory(int kinds, bool scaled) {
    float sum = 0;
    for (int at = threadIdx.x; at < kinds * plan.units * plan.own_stride();
         at += kPersistentThreads)
      own[at] = 0;
    for (int h = threadIdx.x; h < p.H; h += kPersistentThreads) {
      const float x = widen(read_only(static_cast<const T*>(p.w) + h));
      w[h] = scaled ? kSmallW * x : x;
    }
    for (int h = lane; h < p.H; h += kWarp) sum += widen(read_only(static_cast<const T*>(p.w) + h));
    half_w = 0.5f * warp_sum(sum);
    for (int s = 0; plan.resident && s < plan.sentences; ++s) {
      const int b = row_of_sentence(s);
      if (b >= rows) break;
      for (int64_t j = warp; j < p.Tk; j += kPersistentWarps) {
        copy_row(kept(s) + j * p.H, row_at<T>(p.keys, row0 + b, j), p.H);
        copy_row(kept(s) + p.Tk * p.H + j * p.Dv, row_at<T>(p.values, row0 + b, j), p.Dv);
      }
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
  }
  __device__ void copy_row(T* to, const T* from, int64_t columns) const {
    for (int64_t c = lane * U; c < columns; c += kWarp * U) copy16(to + c, from + c);
  }

  // ---- products ----

  // The weights in shared memory, as multiply() below.
  template <int W, class Store>
  __device__ void multiply_first(const T* x, const Store& store) const {
    multiply<kTileRows, W>(first, plan.first_rows, int(pitch_of(plan.first_columns)),
                           plan.first_columns, x, plan.first_columns, store);
  }
  template <class Store>
  __device__ void multiply_second(const T* x, const Store& store) const {
    multiply<kTileRows, 8>(second, plan.second_rows, int(pitch_of(plan.second_columns)),
                           plan.second_columns, x, plan.second_columns, store);
  }
  // Rows of a weight, in shared memory or not, times the group's rows x: store(row, b, sum) for
  // each, a thread's of one b after those of another. Warps share the batch rows, and where there
  // are few of those the columns, whose sums are added in their order.
  template <int rows_of_tile, int W, class Store>
  __device__ void multiply(const T* weight, int count, int pitch, int columns, const T* x,
                           int64_t stride, const Store& store) const {
    // Tiles of batch rows at a time; 1 << shift rows in all: a division takes long.
    int across = 1, shift = 3;
    static_assert(kTileBatch == 1 << 3);
    while (across < kPersistentWarps && across * kTileBatch < rows) across *= 2, ++shift;
    const int shares = kPersistentWarps / across, share = warp / across;
    const int depth = columns / kDepth;
    const int begin = share * depth / shares, end = (share + 1) * depth / shares;
    const T* const of_lane = weight + lane / 4 * pitch + lane % 4 * U;
    float* const part = parts + warp * kTileStride;
#pragma unroll 1
    for (int b0 = 0; b0 < rows; b0 += across * kTileBatch) {
      const int mine = int(smaller(b0 + warp % across * kTileBatch + lane / 4, rows - 1));
      const T* const row = x + mine * stride + lane % 4 * U;
#pragma unroll 1
      for (int r0 = 0; r0 < count; r0 += rows_of_tile) {
        const int count_here = int(smaller(rows_of_tile, count - r0));
        const T* const from = of_lane + r0 * pitch;
        if (rows_of_tile > 48 && count_here > 48)
          add_products<4, W>(from, pitch, row, begin, end, part);
        else if (rows_of_tile > 32 && count_here > 32)
          add_products<3, W>(from, pitch, row, begin, end, part);
        else if (count_here > 16)
          add_products<2, W>(from, pitch, row, begin, end, part);
        else
          add_products<1, W>(from, pitch, row, begin, end, part);
        __syncthreads();
        const int wide = across * kTileBatch;
        for (int at = threadIdx.x; at < count_here * wide; at += kPersistentThreads) {
          const int r = at >> shift, n = at & (wide - 1);
          if (b0 + n >= rows) continue;
          float sum = 0;
#pragma unroll 2
          for (int k = 0; k < shares; ++k)
            sum += parts[(k * across + n / kTileBatch) * kTileStride + r * kTileBatch +
                         n % kTileBatch];
          store(r0 + r, b0 + n, sum);
        }
        __syncthreads();
      }
    }
  }

  // The warp's tile of 16 `tiles` rows, from piece `begin` of the columns to `end`, into its part.
  // W loads are in flight while W pieces are multiplied.
  template <int tiles, int W>
  static __device__ __forceinline__ void add_products(const T* weight, int pitch, const T* row,
                                                      int begin, int end, float* part) {
    float sums[tiles][4] = {};
    Bytes16 x[W], next[W];
    const auto load = [&](int from, Bytes16* to) {
#pragma unroll
      for (int k = 0; k < W; ++k)
        to[k] = from + k < end ? load16_of_others(row + (from + k) * kDepth) : Bytes16{};
    };
    load(begin, next);
#pragma unroll 1
    for (int from = begin; from < end; from += W) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = next[k];
      load(from + W, next);
#pragma unroll
      for (int k = 0; k < W; ++k) {  // past the last piece that again, times zero
        const T* const piece = weight + smaller(from + k, end - 1) * kDepth;
#pragma unroll
        for (int m = 0; m < tiles; ++m) {
          const Bytes16 a = bytes_at(piece + m * 16 * pitch),
                        b = bytes_at(piece + (m * 16 + 8) * pitch);
#pragma unroll
          for (int c = 0; c < 4; c += 2)
            multiply_add<T>(sums[m], a.word[c], b.word[c], a.word[c + 1], b.word[c + 1],
                            x[k].word[c], x[k].word[c + 1]);
        }
      }
    }
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int m = 0; m < tiles; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        part[(m * 16 + lane / 4 + k / 2 * 8) * kTileBatch + lane % 4 * 2 + k % 2] = sums[m][k];
  }

  // ---- attention ----

  static __device__ __forceinline__ Bytes16 bytes_at(const T* x) {
    return *reinterpret_cast<const Bytes16*>(x);
  }
  // The batch row, in the group, that the block attends for.
  __device__ int row_of_sentence(int s) const { return s * plan.blocks + rank; }
  __device__ T* kept(int s) const {
    return reinterpret_cast<T*>(shared + plan.kept) + s * p.Tk * (p.H + p.Dv);
  }
  // Keys and values of a sentence, in shared memory or where they are.
  __device__ View keys_of(int s, int64_t b) const {
    if (plan.resident) return {kept(s), 0, p.H};
    return {row_at<T>(p.keys, b, 0), 0, p.keys.row_stride};
  }
  __device__ View values_of(int s, int64_t b) const {
    if (plan.resident) return {kept(s) + p.Tk * p.H, 0, p.Dv};
    return {row_at<T>(p.values, b, 0), 0, p.values.row_stride};
  }

  // Columns of T that others wrote, as fp32 times a factor.
  __device__ __forceinline__ void load_vector(const T* from, int64_t columns, float factor,
                                              float* to) const {
    for (int64_t c = threadIdx.x * U; c < columns; c += kPersistentThreads * U) {
      float x[U];
      unpack<T>(load16_of_others(from + c), x);
#pragma unroll
      for (int u = 0; u < U; ++u) x[u] *= factor;
#pragma unroll
      for (int u = 0; u < U; u += 4) store_four(x + u, to + c + u);
    }
  }

  // 16 bytes of row j from column c on, by a load of one kind of memory: one that finds out which
  // it is takes longer.
  template <bool resident>
  __device__ __forceinline__ Bytes16 bytes_of_row(const View& view, int j, int c) const {
    if constexpr (resident) {
      const auto offset = static_cast<const char*>(view.data) - shared;
      const auto rows = reinterpret_cast<const T*>(shared_memory() + int(offset));
      return bytes_at(rows + j * int(view.row_stride) + c);
    } else {
      return load16(row_at<T>(view, 0, j) + c);
    }
  }

  // Calls meet(j, sum) in one lane for each of n rows: the sum of add(number of the row, column,
  // &sum) over four columns at a time. A warp takes four rows in turn.
  template <class Add, class Meet>
  __device__ __forceinline__ void each_row(const View& view, int64_t columns, int n, const Add& add,
                                           const Meet& meet) const {
    if (plan.resident)
      each_row_of<true>(view, int(columns), n, add, meet);
    else
      each_row_of<false>(view, int(columns), n, add, meet);
  }
  template <bool resident, class Add, class Meet>
  __device__ __forceinline__ void each_row_of(const View& view, int columns, int n, const Add& add,
                                              const Meet& meet) const {
    constexpr int KU = 4, each = kWarp / KU;
#pragma unroll 1
    for (int j = warp * KU; j < n; j += kPersistentWarps * KU) {
      float sums[KU] = {};
#pragma unroll 1
      for (int c = lane * U; c < columns; c += kWarp * U) {
        Bytes16 bytes[KU];
#pragma unroll
        for (int k = 0; k < KU; ++k)
          bytes[k] = bytes_of_row<resident>(view, j + k < n ? j + k : n - 1, c);
#pragma unroll
        for (int u = 0; u < U; u += 4)
#pragma unroll
          for (int k = 0; k < KU; ++k) {
            float x[U];
            unpack<T>(bytes[k], x);
            add(x + u, c + u, &sums[k]);
          }
      }
      const float sum = warp_sums<KU>(sums, lane);
      if (lane % each == 0 && j + lane / each < n) meet(j + lane / each, sum);
    }
  }

  // Sums over n rows of add(number of the row, column, row, sums) for each column: store(c, sum).
  // Threads share the columns, eight each, and the rows, whose sums are added in their order.
  template <class Add, class Store>
  __device__ __forceinline__ void each_column(const View& view, int64_t columns, int n,
                                              const Add& add, const Store& store) const {
    if (plan.resident)
      each_column_of<true>(view, columns, n, add, store);
    else
      each_column_of<false>(view, columns, n, add, store);
  }
  template <bool resident, class Add, class Store>
  __device__ __forceinline__ void each_column_of(const View& view, int64_t columns, int n,
                                                 const Add& add, const Store& store) const {
    const int across = int(columns / U), shares = int(larger(1, kPersistentThreads / across));
    for (int at = threadIdx.x; at < across * shares; at += kPersistentThreads) {
      const int share = at / across, c = (at - share * across) * U;
      float sums[U] = {};
#pragma unroll 2
      for (int j = share; j < n; j += shares) {
        float x[U];
        unpack<T>(bytes_of_row<resident>(view, j, c), x);
        add(x, c, j, sums);
      }
#pragma unroll
      for (int u = 0; u < U; u += 4) store_four(sums + u, parts + share * columns + c + u);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += kPersistentThreads) {
      float sum = 0;
      for (int k = 0; k < shares; ++k) sum += parts[k * columns + c];
      store(c, sum);
    }
  }
};

__device__ __forceinline__ float sigmoid(float x) {
  return reciprocal(1.0f + exp2_approx(-kLog2e * x));
}

}  // namespace bahdanau_fast::gpu

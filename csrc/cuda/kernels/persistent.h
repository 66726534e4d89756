// What both directions of a whole decoder have: all steps in one launch, whose blocks stay on their
// multiprocessors with the weights of their units in shared memory (persistent_plan.h).
//
//   query[t] = W_q h[t],  context[t] = attention(query[t]),
//   gates[t] = input_gates[t] + W_c context[t] + W_h h[t],  h[t+1] = cell(gates[t], h[t])
#pragma once

#include "persistent_plan.h"
#include "tanh.h"

namespace bahdanau_fast::gpu {

// The parameters of a launch: a DecoderForward or DecoderBackward, and how it is cut.
template <class Direction>
struct Persistent {
  Direction d;
  PersistentPlan plan;
  unsigned* arrived = nullptr;  // a counter per group, kCounterStride apart, zero before
};
constexpr int kCounterStride = 32;  // in other lines of memory

template <class T>
struct PersistentBlock {
  static constexpr int U = kVector<T>;
  const Decoder& d;
  const Problem& p = d.p;
  const PersistentPlan& plan;
  char* const shared = shared_memory();
  // The block's rank in its group, and the group's first batch row and how many it has.
  const int group_index = int(blockIdx.x) / plan.blocks;
  const int rank = int(blockIdx.x) % plan.blocks, row0 = group_index * plan.rows;
  const int rows = int(smaller(plan.rows, p.B - row0));
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float *const unit_values = floats_at(plan.unit_values), *const parts = floats_at(plan.parts);
  float *const query = floats_at(plan.vectors), *const w = query + p.H;
  float *const grad_context = w + p.H, *const scores = floats_at(plan.scores);
  float* const weights = scores + p.Tk;
  float half_w = 0;  // half the sum of w, scaled as the scores take it
  GroupBarrier group;

  template <class Direction>
  __device__ explicit PersistentBlock(const Persistent<Direction>& all)
      : d(all.d),
        plan(all.plan),
        group{all.arrived + group_index * kCounterStride, unsigned(plan.blocks)} {}

  static __device__ const T* in(const void* x) { return static_cast<const T*>(x); }
  __device__ float* floats_at(int offset) const {
    return reinterpret_cast<float*>(shared + offset);
  }
  __device__ T* rows_of(const SharedWeight& weight) const {
    return reinterpret_cast<T*>(shared + weight.offset);
  }
  // Where row b of the group in step t of a (T,B,columns) tensor begins.
  __device__ int64_t index(int64_t t, int b, int64_t columns) const {
    return (t * p.B + row0 + b) * columns;
  }

  // Number `kind` of the block's unit u in batch row b of the group.
  __device__ __forceinline__ float& unit_value(int kind, int u, int b) const {
    return unit_values[(kind * plan.units + u) * plan.unit_stride() + b];
  }
  // Calls f(u, b, h) for the block's units, h of all, in all batch rows.
  template <class F>
  __device__ __forceinline__ void for_units(const F& f) const {
    for (int index = threadIdx.x; index < rows * plan.units; index += kPersistentThreads) {
      const int b = index / plan.units, u = index - b * plan.units;
      const int64_t h = int64_t(rank) * plan.units + u;
      if (h < d.H) f(u, b, h);
    }
  }

  // ---- once ----

  // A weight whose rows are columns in global memory, one number after another; from(row, column)
  // is the address of one, null for zero. Eight loads are in flight.
  template <class From>
  __device__ void load_transposed(const SharedWeight& weight, const From& from) const {
    constexpr int W = 8;
    const int padded = int(ceil_div(weight.rows, 16) * 16), pitch = int(pitch_of(weight.columns));
    const int count = padded * weight.columns;
    T* const to = rows_of(weight);
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += W * kPersistentThreads) {
      T x[W];
      int offsets[W];
      unrolled<W>([&](int k) {
        const int index = int(smaller(first + k * kPersistentThreads, count - 1));
        const int column = index / padded, row = index - column * padded;
        const T* const address = row < weight.rows ? from(row, column) : nullptr;
        // A load without a branch: branches would put one load after another.
        x[k] = read_only(address != nullptr ? address : in(p.w));
        if (address == nullptr) x[k] = T{};
        offsets[k] = row * pitch + column;
      });
      unrolled<W>([&](int k) {
        if (first + k * kPersistentThreads < count) to[offsets[k]] = x[k];
      });
    }
  }
  // A weight's rows, by asynchronous copies; from(row) is the address of one, null for zeros.
  template <class From>
  __device__ void copy_rows(const SharedWeight& weight, const From& from) const {
    const int padded = int(ceil_div(weight.rows, 16) * 16), pitch = int(pitch_of(weight.columns));
#pragma unroll 1
    for (int row = warp; row < padded; row += kPersistentWarps) {
      const T* const address = row < weight.rows ? from(row) : nullptr;
      T* const to = rows_of(weight) + row * pitch;
      if (address != nullptr)
        copy_row(to, address, weight.columns);
      else
        for (int c = lane * U; c < weight.columns; c += kWarp * U)
          *reinterpret_cast<Bytes16*>(to + c) = Bytes16{};
    }
  }
  __device__ void copy_row(T* to, const T* from, int64_t columns) const {
    for (int64_t c = lane * U; c < columns; c += kWarp * U) copy16(to + c, from + c);
  }

  // Zeroes so many kinds of unit_values; loads w, scaled as the scores take it or as it is, and
  // keys and values if they stay.
  __device__ void load_memory(int kinds, bool scaled) {
    float sum = 0;
    for (int index = threadIdx.x; index < kinds * plan.units * plan.unit_stride();
         index += kPersistentThreads)
      unit_values[index] = 0;
    for (int h = threadIdx.x; h < p.H; h += kPersistentThreads) {
      const float x = widen(read_only(in(p.w) + h));
      w[h] = scaled ? kSmallW * x : x;
    }
    for (int h = lane; h < p.H; h += kWarp) sum += kSmallW * widen(read_only(in(p.w) + h));
    half_w = 0.5f * warp_sum(sum);
    for (int s = 0; plan.resident && s < plan.sentences; ++s) {
      const int b = row_of_sentence(s);
      if (b >= rows) break;
      for (int64_t j = warp; j < p.Tk; j += kPersistentWarps) {
        copy_row(resident_rows(s) + j * p.H, row_at<T>(p.keys, row0 + b, j), p.H);
        copy_row(resident_rows(s) + p.Tk * p.H + j * p.Dv, row_at<T>(p.values, row0 + b, j), p.Dv);
      }
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
  }

  // ---- products ----

  // A weight in shared memory, as multiply() below.
  template <int W, class Store>
  __device__ void multiply_shared(const SharedWeight& weight, const T* x,
                                  const Store& store) const {
    multiply<kTileRows, W>(rows_of(weight), weight.rows, int(pitch_of(weight.columns)),
                           weight.columns, x, weight.columns, store);
  }
  // Rows of a weight, in shared memory or not, times the group's rows x: store(row, b, sum) for
  // all, a thread's of one b after those of another. Warps share the batch rows, and where there
  // are few of those the columns, whose sums are added in their order.
  template <int tile_rows, int W, class Store>
  __device__ void multiply(const T* weight, int count, int pitch, int columns, const T* x,
                           int64_t stride, const Store& store) const {
    // Tiles of batch rows at a time; 1 << shift rows in all: a division takes long.
    int across = 1, shift = 3;
    static_assert(kTileBatch == 1 << 3);
    while (across < kPersistentWarps && across * kTileBatch < rows) across *= 2, ++shift;
    const int shares = kPersistentWarps / across, share = warp / across;
    const int depth = columns / kDepth;
    const int begin = share * depth / shares, end = (share + 1) * depth / shares;
    const T* const lane_weight = weight + lane / 4 * pitch + lane % 4 * U;
    float* const part = parts + warp * kTileStride;
#pragma unroll 1
    for (int b0 = 0; b0 < rows; b0 += across * kTileBatch) {
      const int b = int(smaller(b0 + warp % across * kTileBatch + lane / 4, rows - 1));
      const T* const row = x + b * stride + lane % 4 * U;
#pragma unroll 1
      for (int r0 = 0; r0 < count; r0 += tile_rows) {
        const int tile = int(smaller(tile_rows, count - r0));
        add_products<tile_rows / 16, W>(tile, lane_weight + r0 * pitch, pitch, row, begin, end,
                                        part);
        __syncthreads();
        const int wide = across * kTileBatch;
        for (int index = threadIdx.x; index < tile * wide; index += kPersistentThreads) {
          const int r = index >> shift, n = index & (wide - 1);
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

  // The warp's tile of `count` rows, at most 16 `tiles`, from piece `begin` of the columns to
  // `end`, into its part. W loads are in flight while W pieces are multiplied.
  template <int tiles, int W>
  static __device__ __forceinline__ void add_products(int count, const T* weight, int pitch,
                                                      const T* row, int begin, int end,
                                                      float* part) {
    if constexpr (tiles > 1)
      if (count <= 16 * (tiles - 1))
        return add_products<tiles - 1, W>(count, weight, pitch, row, begin, end, part);
    float sums[tiles][4] = {};
    Bytes16 x[W], next[W];
    const auto load = [&](int from) {
      unrolled<W>([&](int k) {
        next[k] = from + k < end ? load16_of_others(row + (from + k) * kDepth) : Bytes16{};
      });
    };
    load(begin);
#pragma unroll 1
    for (int from = begin; from < end; from += W) {
      unrolled<W>([&](int k) { x[k] = next[k]; });
      load(from + W);
      unrolled<W>([&](int k) {  // past the last piece that again, times zero
        const T* const piece = weight + smaller(from + k, end - 1) * kDepth;
        unrolled<tiles>([&](int m) {
          const Bytes16 a = bytes_at(piece + m * 16 * pitch),
                        b = bytes_at(piece + (m * 16 + 8) * pitch);
#pragma unroll
          for (int c = 0; c < 4; c += 2)
            multiply_add<T>(sums[m], a.word[c], b.word[c], a.word[c + 1], b.word[c + 1],
                            x[k].word[c], x[k].word[c + 1]);
        });
      });
    }
    const int lane = threadIdx.x % kWarp;
    unrolled<tiles, 4>([&](int m, int k) {
      part[(m * 16 + lane / 4 + k / 2 * 8) * kTileBatch + lane % 4 * 2 + k % 2] = sums[m][k];
    });
  }

  // ---- attention ----

  // The batch row, in the group, that the block attends for.
  __device__ int row_of_sentence(int s) const { return s * plan.blocks + rank; }
  __device__ T* resident_rows(int s) const {
    return reinterpret_cast<T*>(shared + plan.resident_rows) + s * p.Tk * (p.H + p.Dv);
  }
  // Keys and values of a sentence, in shared memory or where they are.
  __device__ View keys_of(int s, int64_t b) const {
    if (plan.resident) return {resident_rows(s), 0, p.H};
    return {row_at<T>(p.keys, b, 0), 0, p.keys.row_stride};
  }
  __device__ View values_of(int s, int64_t b) const {
    if (plan.resident) return {resident_rows(s) + p.Tk * p.H, 0, p.Dv};
    return {row_at<T>(p.values, b, 0), 0, p.values.row_stride};
  }

  // Columns of T that others wrote, as fp32 times a factor.
  __device__ __forceinline__ void load_vector(const T* from, int64_t columns, float factor,
                                              float* to) const {
    for (int64_t c = threadIdx.x * U; c < columns; c += kPersistentThreads * U) {
      float x[U];
      unpack<T>(load16_of_others(from + c), x);
      unrolled<U>([&](int u) { x[u] *= factor; });
      unrolled<U / 4>([&](int u) { store_four(x + 4 * u, to + c + 4 * u); });
    }
  }

  // 16 bytes of row j from column c on, by a load of one kind of memory: one that finds out which
  // it is takes longer. For that reason loops over rows are compiled for both kinds.
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

  // Calls store(j, sum) in one lane for every one of n rows: the sum of add(number of the row,
  // column, &sum) over four columns at a time. A warp takes four rows in turn.
  template <bool resident = false, class Add, class Store>
  __device__ __forceinline__ void sum_rows(const View& view, int columns, int n, const Add& add,
                                           const Store& store) const {
    if constexpr (!resident)
      if (plan.resident) return sum_rows<true>(view, columns, n, add, store);
    constexpr int KU = 4, lanes = kWarp / KU;
#pragma unroll 1
    for (int j = warp * KU; j < n; j += kPersistentWarps * KU) {
      float sums[KU] = {};
#pragma unroll 1
      for (int c = lane * U; c < columns; c += kWarp * U) {
        Bytes16 bytes[KU];
        unrolled<KU>(
            [&](int k) { bytes[k] = bytes_of_row<resident>(view, j + k < n ? j + k : n - 1, c); });
        unrolled<U / 4, KU>([&](int u, int k) {
          float x[U];
          unpack<T>(bytes[k], x);
          add(x + 4 * u, c + 4 * u, &sums[k]);
        });
      }
      const float sum = warp_sums<KU>(sums, lane);
      if (lane % lanes == 0 && j + lane / lanes < n) store(j + lane / lanes, sum);
    }
  }

  // Sums over n rows of add(number of the row, column, row, sums), per column: store(c, sum).
  // Threads share the columns, eight per thread, and the rows, whose sums are added in their order.
  template <bool resident = false, class Add, class Store>
  __device__ __forceinline__ void sum_columns(const View& view, int64_t columns, int n,
                                              const Add& add, const Store& store) const {
    if constexpr (!resident)
      if (plan.resident) return sum_columns<true>(view, columns, n, add, store);
    const int across = int(columns / U), shares = int(larger(1, kPersistentThreads / across));
    for (int index = threadIdx.x; index < across * shares; index += kPersistentThreads) {
      const int share = index / across, c = (index - share * across) * U;
      float sums[U] = {};
#pragma unroll 2
      for (int j = share; j < n; j += shares) {
        float x[U];
        unpack<T>(bytes_of_row<resident>(view, j, c), x);
        add(x, c, j, sums);
      }
      unrolled<U / 4>(
          [&](int u) { store_four(sums + 4 * u, parts + share * columns + c + 4 * u); });
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

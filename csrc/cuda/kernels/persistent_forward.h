// All steps of a decoder forward; persistent.h says what they are. Three barriers a step: past the
// products with the state, the attention, and the products with the context. Where each step's
// input is the token that the last one wrote, a fourth, past the logits.
#pragma once

#include "persistent.h"

namespace bahdanau_fast::gpu {

template <class T, bool lstm>
struct PersistentForwardTask : PersistentBlock<T> {
  using Base = PersistentBlock<T>;
  using Base::in, Base::p, Base::plan, Base::rank, Base::row0, Base::rows, Base::unit_value;
  static constexpr int G = lstm ? 4 : 3, kState = 4, kCell = 5;
  const DecoderForward& f;

  __device__ explicit PersistentForwardTask(const Persistent<DecoderForward>& all)
      : Base(all), f(all.d) {}

  // Row b of the group in step t of a (T,B,columns) tensor.
  __device__ T* at(void* x, int64_t t, int b, int64_t columns) const {
    return static_cast<T*>(x) + this->index(t, b, columns);
  }
  __device__ int64_t saved_step(int64_t t) const { return f.saved_gates != nullptr ? t : 0; }
  __device__ bool greedy() const { return f.V > 0; }
  // The states before step t.
  __device__ T* states_at(int64_t t, int b) const {
    return at(f.states, greedy() ? t % 2 : t, b, f.H);
  }

  __device__ void begin() {
    const int64_t units = int64_t(rank) * plan.units, hidden = int64_t(rank) * plan.hidden;
    const auto gate_weight = [&](const void* weight, int row, int64_t stride) {
      const int64_t gate = row / plan.units, h = units + row % plan.units;
      return h < f.H ? in(weight) + (gate * f.H + h) * stride : nullptr;
    };
    this->copy_rows(plan.first, [&](int r) {
      if (r >= plan.hidden) return gate_weight(f.w_hidden, r - plan.hidden, f.H);
      return hidden + r < p.H ? in(f.w_query) + (hidden + r) * f.H : nullptr;
    });
    this->copy_rows(plan.second, [&](int r) {
      return gate_weight(f.w_context.data, r, f.w_context.row_stride);
    });
    for (int b = threadIdx.x; greedy() && b < rows; b += kPersistentThreads)
      tokens()[b] = int(f.greedy.first);
    this->load_memory(4 + (lstm ? 2 : 1), true);
    this->for_units([&](int u, int b, int64_t h) {
      const T state = in(f.hidden)[(row0 + b) * f.H + h];
      states_at(0, b)[h] = state;
      unit_value(kState, u, b) = widen(state);
      if constexpr (lstm) {
        const T cell = in(f.cell)[(row0 + b) * f.H + h];
        if (f.cells != nullptr) at(f.cells, 0, b, f.H)[h] = cell;
        unit_value(kCell, u, b) = widen(cell);
      }
    });
  }

  // Queries, and the state's part of the gates.
  __device__ void multiply_states(int64_t t) {
    const T* states = t == 0 ? in(f.hidden) + row0 * f.H : states_at(t, 0);
    const int64_t first = int64_t(rank) * plan.hidden;
    T* const queries = at(f.queries, saved_step(t), 0, p.H);
    this->template multiply_shared<8>(plan.first, states, [&](int row, int b, float sum) {
      if (row >= plan.hidden) {
        const int gate_row = row - plan.hidden, gate = gate_row / plan.units;
        unit_value(gate + (lstm ? 0 : 1), gate_row - gate * plan.units, b) = sum;
      } else if (first + row < p.H) {
        narrow(sum, queries + b * p.H + first + row);
      }
    });
  }

  __device__ const T* input_gates(int64_t t, int b) const {
    if (!greedy()) return in(f.input_gates) + (t * p.B + row0 + b) * G * f.H;
    const int token = tokens()[b];
    return in(f.greedy.table) + int64_t(token < 0 ? ~token : token) * G * f.H;
  }
  __device__ void add_inputs(int64_t t) {
    this->for_units([&](int u, int b, int64_t h) {
      const T* const gates = input_gates(t, b) + h;
      float x[4];
      unrolled<G>([&](int g) { x[g] = widen(read_only(gates + g * f.H)); });
      if constexpr (!lstm) x[3] = widen(read_only(in(f.bias) + h));
      unrolled<4>([&](int g) {
        unit_value(g, u, b) = !lstm && g == 0 ? x[g] : unit_value(g, u, b) + x[g];
      });
    });
  }

  __device__ void attend(int64_t t, int s) {
    const int local = this->row_of_sentence(s);
    if (local >= rows) return;
    const int64_t b = row0 + local, valid_len = key_count(p, b, 0);
    const int n = int(valid_len > 0 ? valid_len : p.Tk);
    __syncthreads();  // the last row's parts and weights have been read
    this->load_vector(at(f.queries, saved_step(t), local, p.H), p.H, 2.0f * kLog2e, this->query);
    __syncthreads();
    this->sum_rows(
        this->keys_of(s, b), int(p.H), n,
        [&](const float* key, int64_t h, float* sum) {
          float query[4], w[4];
          load_four(this->query + h, query);
          load_four(this->w + h, w);
          add_four<T, false>(query, key, w, sum);
        },
        [&](int j, float sum) {
          const float score = 2.0f / kSmallW * (this->half_w - kShrunk * sum);
          this->scores[j] = valid_len == 0 ? 0.0f : sees(p, b, 0, j) ? score : -INFINITY;
        });
    __syncthreads();
    float top = kLowest, total = 0;
    for (int j = this->lane; j < n; j += kWarp) top = larger_or_nan(top, this->scores[j]);
    top = warp_max(top);
    for (int j = this->lane; j < n; j += kWarp) total += exp_of<T>(this->scores[j] - top);
    total = warp_sum(total);
    Dropout dropout(p);
    dropout.seed = seed_of_step(dropout.seed, t);
    float* const weights = static_cast<float*>(f.weights) + (t * p.B + b) * p.Tk;
    for (int j = threadIdx.x; j < p.Tk; j += kPersistentThreads) {
      const float x = j < n ? over<T>(exp_of<T>(this->scores[j] - top), total) : 0.0f;
      weights[j] = x;
      this->weights[j] = x * dropout.factor(b, j);
    }
    __syncthreads();
    T* const context = at(f.contexts, saved_step(t), local, p.Dv);
    this->sum_columns(
        this->values_of(s, b), p.Dv, n,
        [&](const float* value, int, int j, float* sums) {
          unrolled<Base::U>([&](int u) { sums[u] += this->weights[j] * value[u]; });
        },
        [&](int c, float sum) { narrow(sum, context + c); });
  }

  // The context's part of the gates.
  __device__ void multiply_contexts(int64_t t) {
    this->template multiply_shared<8>(plan.second, at(f.contexts, saved_step(t), 0, p.Dv),
                                      [&](int row, int b, float sum) {
                                        const int gate = row / plan.units;
                                        unit_value(gate, row - gate * plan.units, b) += sum;
                                      });
  }

  __device__ void step_cells(int64_t t) {
    this->for_units([&](int u, int b, int64_t h) {
      float x[4], state;
      unrolled<4>([&](int g) { x[g] = unit_value(g, u, b); });
      if constexpr (lstm) {
        x[0] = sigmoid(x[0]), x[1] = sigmoid(x[1]), x[2] = tanh_of(x[2]), x[3] = sigmoid(x[3]);
        const float cell = x[1] * unit_value(kCell, u, b) + x[0] * x[2];
        unit_value(kCell, u, b) = cell;
        if (f.cells != nullptr) narrow(cell, at(f.cells, t + 1, b, f.H) + h);
        state = x[3] * tanh_of(cell);
      } else {
        x[1] = sigmoid(x[1]), x[2] = sigmoid(x[2]);
        x[0] = tanh_of(x[0] + x[1] * x[3]);
        state = x[0] + x[2] * (unit_value(kState, u, b) - x[0]);
      }
      unit_value(kState, u, b) = state;
      narrow(state, states_at(t + 1, b) + h);
      if (f.saved_gates == nullptr) return;
      T* const gates = at(f.saved_gates, t, b, 4 * f.H) + h;
      unrolled<4>([&](int g) { narrow(x[g], gates + g * f.H); });
    });
  }

  // ---- tokens ----

  // The inputs of the group's rows, ~ once these have ended.
  __device__ int* tokens() const { return reinterpret_cast<int*>(this->shared + plan.tokens); }

  // A logit and its token as one number: the larger logit, NaN above all, then the lower token.
  static __device__ __forceinline__ uint64_t rank_of(float logit, int64_t token) {
    const uint32_t bits = to_bits(logit);
    const uint32_t order = logit != logit ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
    return uint64_t(order) << 32 | uint32_t(~token);
  }

  // The block's share of the logits, rounded to T, whose maximum goes into `best`.
  __device__ void multiply_dense(int64_t t) {
    const int64_t share = ceil_div(f.V / 16, plan.blocks) * 16, first = rank * share;
    if (first >= f.V) return;
    unsigned long long* const best = f.greedy.best + t % 2 * p.B + row0;
    uint64_t row_best = 0;
    int row_b = -1;
    const auto store_best = [&] {
      if (row_b >= 0) atomicMax(best + row_b, row_best);
    };
    this->template multiply<kTileRows / 2, 8>(
        in(f.greedy.w_dense) + first * f.H, int(smaller(share, f.V - first)), int(f.H), int(f.H),
        states_at(t + 1, 0), f.H, [&](int row, int b, float sum) {
          if (b != row_b) store_best(), row_b = b, row_best = 0;
          T logit;
          narrow(sum + widen(read_only(in(f.greedy.bias) + first + row)), &logit);
          const uint64_t ranked = rank_of(widen(logit), first + row);
          row_best = ranked > row_best ? ranked : row_best;
        });
    store_best();
  }

  // Writes the tokens of a step; true if a row goes on.
  __device__ bool write_tokens(int64_t t) {
    const Greedy& g = f.greedy;
    for (int b = threadIdx.x; b < rows; b += kPersistentThreads) {
      const bool ended = tokens()[b] < 0;
      const uint64_t best = __ldcg(g.best + t % 2 * p.B + row0 + b);
      const int64_t token = ended ? g.blank : ~uint32_t(best);
      tokens()[b] = int(ended || token == g.last ? ~token : token);
      if (rank == 0) g.tokens[(row0 + b) * f.T + t] = token;
    }
    if (rank == 0 && threadIdx.x == 0) *g.steps = t + 1;
    __syncthreads();
    bool runs = false;
    for (int b = this->lane; b < rows; b += kWarp) runs = runs || tokens()[b] >= 0;
    return any_lane(runs);
  }

  // Of the step before, for the next one: all have read it, and nobody has begun to write there.
  __device__ void clear_best(int64_t t) {
    for (int b = threadIdx.x; rank == 0 && b < rows; b += kPersistentThreads)
      f.greedy.best[(t + 1) % 2 * p.B + row0 + b] = 0;
  }

  __device__ void run() {
    begin();
#pragma unroll 1
    for (int64_t t = 0; t < f.T; ++t) {
      multiply_states(t);
      this->group.arrive();
      add_inputs(t);
      this->group.wait();
#pragma unroll 1
      for (int s = 0; s < plan.sentences; ++s) attend(t, s);
      this->group.arrive();
      this->group.wait();
      multiply_contexts(t);
      step_cells(t);
      if (greedy()) clear_best(t);
      if (t + 1 == f.T && !greedy()) break;
      this->group.arrive();
      this->group.wait();
      if (!greedy()) continue;
      multiply_dense(t);
      this->group.arrive();
      this->group.wait();
      if (!write_tokens(t) && !f.greedy.whole) break;
    }
  }
};

template <class T, bool lstm>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    persistent_forward(const Persistent<DecoderForward> all) {
  PersistentForwardTask<T, lstm>(all).run();
}

}  // namespace bahdanau_fast::gpu

// Backward through all steps of a decoder; persistent.h says what they are. In the launch is what
// the step before waits for: cells, W_c^T and W_h^T, the attention, W_q^T; all other gradients are
// products over all steps afterwards. Three barriers a step: past the cells, the products with
// the gates' gradients, and the attention.
#pragma once

#include "persistent.h"

namespace bahdanau_fast::gpu {

template <class T, bool lstm>
struct PersistentBackwardTask : PersistentBlock<T> {
  using Base = PersistentBlock<T>;
  using Base::in, Base::index, Base::p, Base::plan, Base::rank, Base::row0, Base::rows,
      Base::unit_value;
  static constexpr int kState = 0, kCell = 1;  // gradients
  const DecoderBackward& g;

  __device__ explicit PersistentBackwardTask(const Persistent<DecoderBackward>& all)
      : Base(all), g(all.d) {}

  __device__ float value_or_zero(const void* x, int64_t at) const {
    return x == nullptr ? 0.0f : widen(read_only(in(x) + at));
  }

  __device__ void begin() {
    const int64_t units = int64_t(rank) * plan.units, features = int64_t(rank) * plan.features;
    this->load_transposed(plan.first, [&](int r, int k) {
      const bool of_context = r < plan.features;
      const int64_t c = of_context ? features + r : units + r - plan.features;
      const int64_t row = of_context || lstm ? k : k - g.H;
      const bool in_bounds =
          c < (of_context ? p.Dv : g.H) && (of_context ? lstm || k < 3 * g.H : row >= 0);
      const T* const weight = in(of_context ? g.w_context.data : g.w_hidden);
      const int64_t stride = of_context ? g.w_context.row_stride : g.H;
      return in_bounds ? weight + row * stride + c : nullptr;
    });
    this->load_transposed(plan.second, [&](int r, int k) {
      return units + r < g.H ? in(g.w_query) + k * g.H + units + r : nullptr;
    });
    this->load_memory(lstm ? 2 : 1, false);
    this->for_units([&](int u, int b, int64_t h) {
      unit_value(kState, u, b) = value_or_zero(g.grad_hidden, (row0 + b) * g.H + h);
      if constexpr (lstm)
        unit_value(kCell, u, b) = value_or_zero(g.grad_cell, (row0 + b) * g.H + h);
    });
  }

  __device__ void step_cells(int64_t t) {
    this->for_units([&](int u, int b, int64_t h) {
      const int64_t at = index(t, b, g.H) + h, next = index(t + 1, b, g.H) + h;
      const int64_t gates = index(t, b, 4 * g.H) + h;
      float x[4], grad[4], state = unit_value(kState, u, b) + value_or_zero(g.grad_states, at);
      unrolled<4>([&](int k) { x[k] = value_or_zero(g.saved_gates, gates + k * g.H); });
      if constexpr (lstm) {
        const float tanh_cell = tanh_of(value_or_zero(g.cells, next));
        const float cell = unit_value(kCell, u, b) + state * x[3] * (1.0f - tanh_cell * tanh_cell);
        grad[0] = cell * x[2] * x[0] * (1.0f - x[0]);
        grad[1] = cell * value_or_zero(g.cells, at) * x[1] * (1.0f - x[1]);
        grad[2] = cell * x[0] * (1.0f - x[2] * x[2]);
        grad[3] = state * tanh_cell * x[3] * (1.0f - x[3]);
        unit_value(kCell, u, b) = cell * x[1];
        unit_value(kState, u, b) = 0;
      } else {
        grad[0] = state * (1.0f - x[2]) * (1.0f - x[0] * x[0]);
        grad[1] = grad[0] * x[3] * x[1] * (1.0f - x[1]);
        grad[2] = state * (value_or_zero(g.states, at) - x[0]) * x[2] * (1.0f - x[2]);
        grad[3] = grad[0] * x[1];
        unit_value(kState, u, b) = state * x[2];
      }
      T* const grad_gates = static_cast<T*>(g.grad_gates) + gates;
      unrolled<4>([&](int k) { narrow(grad[k], grad_gates + k * g.H); });
    });
  }

  // Gradients of the contexts, and the states' through their gates.
  __device__ void multiply_gates(int64_t t) {
    const int64_t first = int64_t(rank) * plan.features;
    T* const contexts = static_cast<T*>(g.grad_contexts) + index(t, 0, p.Dv);
    const T* const gates = in(g.grad_gates) + index(t, 0, 4 * g.H);
    this->template multiply_shared<16>(plan.first, gates, [&](int row, int b, float sum) {
      if (row >= plan.features)
        unit_value(kState, row - plan.features, b) += sum;
      else if (first + row < p.Dv)
        narrow(sum, contexts + b * p.Dv + first + row);
    });
  }

  __device__ void attend(int64_t t, int s) {
    const int local = this->row_of_sentence(s);
    if (local >= rows) return;
    const int64_t b = row0 + local, valid_len = key_count(p, b, 0), at = index(t, local, p.Tk);
    const int n = int(valid_len > 0 ? valid_len : p.Tk);
    Dropout dropout(p);
    dropout.seed = seed_of_step(dropout.seed, t);
    __syncthreads();  // the last row's parts and scores have been read
    this->load_vector(in(g.queries) + index(t, local, p.H), p.H, 1.0f, this->query);
    this->load_vector(in(g.grad_contexts) + index(t, local, p.Dv), p.Dv, 1.0f, this->grad_context);
    for (int j = threadIdx.x; j < p.Tk; j += kPersistentThreads) {
      const float weight = read_only(static_cast<const float*>(g.weights) + at + j);
      this->weights[j] = weight;
      if (g.dropped != nullptr)
        narrow(weight * dropout.factor(b, j), static_cast<T*>(g.dropped) + at + j);
    }
    __syncthreads();
    const float* const grad_weights = static_cast<const float*>(g.grad_weights);
    this->sum_rows(
        this->values_of(s, b), int(p.Dv), n,
        [&](const float* value, int64_t c, float* sum) {
          float grad[4];
          load_four(this->grad_context + c, grad);
          unrolled<4>([&](int u) { *sum += grad[u] * value[u]; });
        },
        [&](int j, float sum) {
          const float others = grad_weights == nullptr ? 0.0f : read_only(grad_weights + at + j);
          this->scores[j] = sum * dropout.factor(b, j) + others;
        });
    __syncthreads();
    Sum total, dot;  // as in grad_rows
    for (int j = this->lane; j < n; j += kWarp) {
      total.add(this->weights[j]);
      dot.add_product(this->weights[j], this->scores[j]);
    }
    total = warp_sum(total);
    const Sum mean = warp_sum(dot).over(total);
    __syncthreads();
    for (int j = threadIdx.x; j < p.Tk; j += kPersistentThreads) {
      const bool counts = valid_len > 0 && j < n;
      const float score =
          counts ? weigh_difference(this->weights[j] / total.high, this->scores[j], mean) : 0.0f;
      static_cast<float*>(g.grad_scores)[(b * g.T + t) * p.Tk + j] = score;
      this->scores[j] = score;
    }
    __syncthreads();
    T* const grad_query = static_cast<T*>(g.grad_queries) + index(t, local, p.H);
    this->sum_columns(
        this->keys_of(s, b), p.H, n,
        [&](const float* key, int h, int j, float* sums) {
          const float score = this->scores[j];
          unrolled<Base::U / 4>([&](int quarter) {
            const int u = 4 * quarter;
            float x[4], tanh[4], slope[4];
            load_four(this->query + h + u, x);
            unrolled<4>([&](int k) { x[k] += key[u + k]; });
            four_tanh_of<T>(x, tanh, slope);
            unrolled<4>([&](int k) { sums[u + k] += score * slope[k]; });
          });
        },
        [&](int h, float sum) { narrow(sum * this->w[h], grad_query + h); });
  }

  // The states' gradients through the queries.
  __device__ void multiply_queries(int64_t t) {
    const T* const queries = in(g.grad_queries) + index(t, 0, p.H);
    this->template multiply_shared<8>(plan.second, queries, [&](int row, int b, float sum) {
      unit_value(kState, row, b) += sum;
    });
  }

  __device__ void run() {
    begin();
#pragma unroll 1
    for (int64_t t = g.T - 1; t >= 0; --t) {
      step_cells(t);
      this->group.sync();
      multiply_gates(t);
      this->group.sync();
#pragma unroll 1
      for (int s = 0; s < plan.sentences; ++s) attend(t, s);
      this->group.sync();
      multiply_queries(t);
    }
    this->for_units([&](int u, int b, int64_t h) {
      const int64_t at = (row0 + b) * g.H + h;
      narrow(unit_value(kState, u, b), static_cast<T*>(g.grad_first) + at);
      if constexpr (lstm) narrow(unit_value(kCell, u, b), static_cast<T*>(g.grad_first_cell) + at);
    });
  }
};

template <class T, bool lstm>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    persistent_backward(const Persistent<DecoderBackward> all) {
  PersistentBackwardTask<T, lstm>(all).run();
}

}  // namespace bahdanau_fast::gpu

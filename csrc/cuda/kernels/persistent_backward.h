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
  using Base::own_at, Base::p, Base::plan, Base::rank, Base::row0, Base::rows;
  static constexpr int kState = 0, kCell = 1;  // gradients
  const DecoderBackward& g;

  __device__ explicit PersistentBackwardTask(const Persistent<DecoderBackward>& all)
      : Base(all), g(all.of) {}

  static __device__ const T* in(const void* x) { return static_cast<const T*>(x); }
  // Where row b of the group in step t of a (T,B,columns) tensor begins.
  __device__ int64_t place(int64_t t, int b, int64_t columns) const {
    return (t * p.B + row0 + b) * columns;
  }
  __device__ float given(const void* x, int64_t at) const {
    return x == nullptr ? 0.0f : widen(read_only(in(x) + at));
  }

  __device__ void begin() {
    const int64_t units = int64_t(rank) * plan.units, features = int64_t(rank) * plan.features;
    this->load_transposed(this->first, plan.first_rows, plan.first_columns, [&](int r, int k) {
      const bool of_context = r < plan.features;
      const int64_t c = of_context ? features + r : units + r - plan.features;
      const int64_t row = of_context || lstm ? k : k - g.H;
      const bool there =
          c < (of_context ? p.Dv : g.H) && (of_context ? lstm || k < 3 * g.H : row >= 0);
      const T* const weight = in(of_context ? g.w_context.data : g.w_hidden);
      const int64_t stride = of_context ? g.w_context.row_stride : g.H;
      return there ? weight + row * stride + c : nullptr;
    });
    this->load_transposed(this->second, plan.second_rows, plan.second_columns, [&](int r, int k) {
      return units + r < g.H ? in(g.w_query) + k * g.H + units + r : nullptr;
    });
    this->load_memory(lstm ? 2 : 1, false);
    this->each_unit([&](int u, int b, int64_t h) {
      own_at(kState, u, b) = given(g.grad_hidden, (row0 + b) * g.H + h);
      if constexpr (lstm) own_at(kCell, u, b) = given(g.grad_cell, (row0 + b) * g.H + h);
    });
  }

  __device__ void step_cells(int64_t t) {
    this->each_unit([&](int u, int b, int64_t h) {
      const int64_t at = place(t, b, g.H) + h, next = place(t + 1, b, g.H) + h;
      const int64_t gates = place(t, b, 4 * g.H) + h;
      float x[4], grad[4], state = own_at(kState, u, b) + given(g.grad_states, at);
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] = given(g.saved_gates, gates + k * g.H);
      if constexpr (lstm) {
        const float tanh_cell = tanh_of(given(g.cells, next));
        const float cell = own_at(kCell, u, b) + state * x[3] * (1.0f - tanh_cell * tanh_cell);
        grad[0] = cell * x[2] * x[0] * (1.0f - x[0]);
        grad[1] = cell * given(g.cells, at) * x[1] * (1.0f - x[1]);
        grad[2] = cell * x[0] * (1.0f - x[2] * x[2]);
        grad[3] = state * tanh_cell * x[3] * (1.0f - x[3]);
        own_at(kCell, u, b) = cell * x[1];
        own_at(kState, u, b) = 0;
      } else {
        grad[0] = state * (1.0f - x[2]) * (1.0f - x[0] * x[0]);
        grad[1] = grad[0] * x[3] * x[1] * (1.0f - x[1]);
        grad[2] = state * (given(g.states, at) - x[0]) * x[2] * (1.0f - x[2]);
        grad[3] = grad[0] * x[1];
        own_at(kState, u, b) = state * x[2];
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) narrow(grad[k], static_cast<T*>(g.grad_gates) + gates + k * g.H);
    });
  }

  // Gradients of the contexts, and the states' through their gates.
  __device__ void multiply_gates(int64_t t) {
    const int64_t first = int64_t(rank) * plan.features;
    T* const contexts = static_cast<T*>(g.grad_contexts) + place(t, 0, p.Dv);
    this->template multiply_first<16>(in(g.grad_gates) + place(t, 0, 4 * g.H),
                                      [&](int row, int b, float sum) {
                                        if (row >= plan.features)
                                          own_at(kState, row - plan.features, b) += sum;
                                        else if (first + row < p.Dv)
                                          narrow(sum, contexts + b * p.Dv + first + row);
                                      });
  }

  __device__ void attend(int64_t t, int s) {
    const int local = this->row_of_sentence(s);
    if (local >= rows) return;
    const int64_t b = row0 + local, seen = key_count(p, b, 0), at = place(t, local, p.Tk);
    const int n = int(seen > 0 ? seen : p.Tk);
    Dropout dropout(p);
    dropout.seed = seed_of_step(dropout.seed, t);
    __syncthreads();  // the last row's parts and scores have been read
    this->load_vector(in(g.queries) + place(t, local, p.H), p.H, 1.0f, this->query);
    this->load_vector(in(g.grad_contexts) + place(t, local, p.Dv), p.Dv, 1.0f, this->grad_context);
    for (int j = threadIdx.x; j < p.Tk; j += kPersistentThreads) {
      const float weight = read_only(static_cast<const float*>(g.weights) + at + j);
      this->weights[j] = weight;
      if (g.dropped != nullptr)
        narrow(weight * dropout.factor(b, j), static_cast<T*>(g.dropped) + at + j);
    }
    __syncthreads();
    const float* const grad_weights = static_cast<const float*>(g.grad_weights);
    this->each_row(
        this->values_of(s, b), p.Dv, n,
        [&](const float* value, int64_t c, float* sum) {
          float grad[4];
          load_four(this->grad_context + c, grad);
#pragma unroll
          for (int u = 0; u < 4; ++u) *sum += grad[u] * value[u];
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
      const bool counts = seen > 0 && j < n;
      const float score =
          counts ? weigh_difference(this->weights[j] / total.high, this->scores[j], mean) : 0.0f;
      static_cast<float*>(g.grad_scores)[(b * g.T + t) * p.Tk + j] = score;
      this->scores[j] = score;
    }
    __syncthreads();
    T* const grad_query = static_cast<T*>(g.grad_queries) + place(t, local, p.H);
    this->each_column(
        this->keys_of(s, b), p.H, n,
        [&](const float* key, int h, int j, float* sums) {
          const float score = this->scores[j];
#pragma unroll
          for (int u = 0; u < Base::U; u += 4) {
            float x[4], tanh[4], slope[4];
            load_four(this->query + h + u, x);
#pragma unroll
            for (int k = 0; k < 4; ++k) x[k] += key[u + k];
            four_tanh_of<T>(x, tanh, slope);
#pragma unroll
            for (int k = 0; k < 4; ++k) sums[u + k] += score * slope[k];
          }
        },
        [&](int h, float sum) { narrow(sum * this->w[h], grad_query + h); });
  }

  // The states' gradients through the queries.
  __device__ void multiply_queries(int64_t t) {
    this->multiply_second(in(g.grad_queries) + place(t, 0, p.H),
                          [&](int row, int b, float sum) { own_at(kState, row, b) += sum; });
  }

  __device__ void meet() {
    this->group.arrive();
    this->group.wait();
  }

  __device__ void run() {
    begin();
#pragma unroll 1
    for (int64_t t = g.T - 1; t >= 0; --t) {
      step_cells(t);
      meet();
      multiply_gates(t);
      meet();
#pragma unroll 1
      for (int s = 0; s < plan.sentences; ++s) attend(t, s);
      meet();
      multiply_queries(t);
    }
    this->each_unit([&](int u, int b, int64_t h) {
      const int64_t at = (row0 + b) * g.H + h;
      narrow(own_at(kState, u, b), static_cast<T*>(g.grad_first) + at);
      if constexpr (lstm) narrow(own_at(kCell, u, b), static_cast<T*>(g.grad_first_cell) + at);
    });
  }
};

template <class T, bool lstm>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    persistent_backward(const Persistent<DecoderBackward> all) {
  PersistentBackwardTask<T, lstm>(all).run();
}

}  // namespace bahdanau_fast::gpu

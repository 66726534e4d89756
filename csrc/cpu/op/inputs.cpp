#include "inputs.h"

#include <algorithm>
#include <cmath>

#include "cpu/kernels/simd.h"

namespace bahdanau_fast {

int64_t size_of(Kind kind) {
  return kind == Kind::f64 || kind == Kind::f32_in_f64 ? sizeof(double) : sizeof(float);
}

int64_t table_width(int64_t H, Kind kind) {
  const int64_t line = 64 / size_of(kind);
  return (H + line - 1) / line * line;
}

Kind storage_kind(const Tensor& tensor, const char* name) {
  check_cpu(tensor, name);
  return kind_of(tensor, name);
}

Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type) {
  return new_tensor(shape, type, aoti_torch_device_type_cpu(), 0);
}

void fill_tables(Kind kind, const View& keys, int64_t B, int64_t Tk, int64_t H, void* keys_max,
                 void* table) {
  const Kernels& k = kernels(kind);
  const int64_t width = table_width(H, kind), bytes = size_of(kind);
  const int64_t chunk = 64, chunks = (Tk + chunk - 1) / chunk;
  const auto end = [&](int64_t c) { return (c + 1) * chunk < Tk ? (c + 1) * chunk : Tk; };
  const auto nothing = [] { return 0; };
  char* maxima = static_cast<char*>(keys_max);
  Buffer parts(B * chunks * bytes);
  parallel(B * chunks, chunk * H / 8, nothing, [&](int64_t task, int) {
    const int64_t b = task / chunks, c = task % chunks;
    k.keys_max(keys, H, b, c * chunk, end(c), static_cast<char*>(parts.get()) + task * bytes);
  });
  const auto reduce = [&](auto zero) {
    using A = decltype(zero);
    for (int64_t b = 0; b < B; ++b) {
      A best = 0;
      for (int64_t c = 0; c < chunks && best == best; ++c) {
        const A m = static_cast<const A*>(parts.get())[b * chunks + c];
        best = m <= best ? best : m;
      }
      reinterpret_cast<A*>(maxima)[b] = best;
    }
  };
  bytes == 8 ? reduce(double{}) : reduce(float{});
  if (table == nullptr) return;
  parallel(B * chunks, chunk * H, nothing, [&](int64_t task, int) {
    const int64_t b = task / chunks, c = task % chunks;
    k.exp_keys(keys, H, width, b, Tk, c * chunk, end(c), keys_max, table);
  });
}

namespace {

struct Norms {
  double length, largest;
};

// Four independent sums: a single chain of additions over w_v would take as long as a small
// problem.
Norms norms(const std::vector<double>& w) {
  double squares[4] = {}, most[4] = {};
  const auto take = [&](size_t lane, double x) {
    squares[lane] += x * x;
    most[lane] = std::fabs(x) > most[lane] ? std::fabs(x) : most[lane];
  };
  size_t h = 0;
  for (; h + 4 <= w.size(); h += 4)
    for (size_t lane = 0; lane < 4; ++lane) take(lane, w[h + lane]);
  for (; h < w.size(); ++h) take(0, w[h]);
  const double sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  return {std::sqrt(sum), *std::max_element(most, most + 4)};
}

}  // namespace

void read(const Tensor& t, const char* name, int64_t offset, int64_t stride, int64_t count,
          double* out) {
  with_type_of(t, name, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(t.const_data_ptr()) + offset;
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (std::is_class<decltype(type)>::value)
        out[i] = widen(from[i * stride]);
      else
        out[i] = static_cast<double>(from[i * stride]);
    }
  });
}

template <class Queries, class Keys>
Inputs::Inputs(const Queries& queries, const Keys& keys, const AttentionArguments& args,
               Exponentials exponentials, bool precise, bool halves) {
  check_cpu(queries, "queries");
  Problem& p = problem;
  kind =
      read_sizes(queries, keys, args.values, args.w_v, args.dropout_p, false, false, check_cpu, &p);
  storage = queries.scalar_type();
  const bool float_table = args.table.has_value() && args.table->scalar_type() == ScalarType::Float;
  const bool in_fp32 = float_table || (!precise && p.B * p.Tk * p.H > kMaxFp64ForwardTableElements);
  kind = computing_kind(kind, p.B * p.Tq * p.Tk * p.H,
                        in_fp32 ? kMaxFp64ForwardTableElements : kMaxFp64CpuElements);
  owned_.reserve(4);  // as many as most calls have; likewise the buffers
  buffers_.reserve(4);
  const std::vector<double> w = to_doubles(args.w_v, "w_v");
  const Norms w_norms = norms(w);
  if (kind == Kind::f32 && w_norms.length > kMaxFp32NormOfW) kind = Kind::f32_in_f64;
  p.width = table_width(p.H, kind);
  p.queries = view_of(queries, owned_);
  p.keys = view_of(keys, owned_);
  p.values = view_of(args.values, owned_);
  set_inside(args);
  set_seen(args.seed, args.valid_lens, args.mask);
  if (p.empty()) return;
  set_w(w, w_norms.largest);
  const bool sigmoid = p.inside.activation == Activation::sigmoid && !args.features.has_value();
  if (halves && sigmoid && p.Tq > 1) halve();
  if (!p.from_sums) set_table(p.halved ? kNone : args.table, args.keys_max, exponentials);
}

#define BF_INPUTS(Queries, Keys)                                                                \
  template Inputs::Inputs(const Queries&, const Keys&, const AttentionArguments&, Exponentials, \
                          bool, bool);
BF_INPUTS(Tensor, Tensor)
BF_INPUTS(OwnRows, Tensor)
BF_INPUTS(OwnRows, OwnRows)
#undef BF_INPUTS

Inputs::Inputs(const PoolingArguments& args) {
  const auto& [inner, w_v, values, b_v, gate, valid_lens, mask, seed, dropout_p] = args;
  Problem& p = problem;
  const Kind stored = storage_kind(inner, "inner");
  storage = inner.scalar_type();
  const auto check = [&](const Tensor& tensor, const char* name, bool fits) {
    STD_TORCH_CHECK(storage_kind(tensor, name) == stored && fits, name,
                    " must have the dtype of inner (B, Tk, H), and sizes that fit it");
  };
  STD_TORCH_CHECK(inner.dim() == 3, "inner must have 3 dimensions");
  p.B = inner.size(0), p.Tk = inner.size(1), p.H = inner.size(2);
  check(w_v, "w_v", w_v.dim() == 2 && w_v.size(1) == p.H);
  check(values, "values", values.dim() == 3 && values.size(0) == p.B && values.size(1) == p.Tk);
  p.Tq = w_v.size(0), p.Dv = values.size(2);
  kind = computing_kind(stored, p.B * p.Tq * p.Tk * p.H, kMaxFp64ForwardTableElements);
  owned_.push_back(packed(w_v));
  p.queries = {owned_.back().const_data_ptr(), 0, p.H};
  std::vector<double> w(p.H);
  for (int64_t i = 0; kind == Kind::f32 && i < p.Tq; ++i) {
    read(owned_.back(), "w_v", i * p.H, 1, p.H, w.data());
    if (norms(w).length > kMaxFp32NormOfW) kind = Kind::f32_in_f64;
  }
  p.width = table_width(p.H, kind);
  p.pools = true;
  p.keys = view_of(inner, owned_);
  p.values = view_of(values, owned_);
  if (gate.has_value()) {
    check(*gate, "gate", gate->dim() == 3 && gate->sizes() == inner.sizes());
    p.gate = view_of(*gate, owned_);
  }
  if (b_v.has_value()) {
    check(*b_v, "b_v", b_v->dim() == 1 && b_v->size(0) == p.Tq);
    buffers_.push_back(in_sum_type(packed(*b_v), kind, "b_v"));
    p.head_bias = buffers_.back().get();
  }
  set_dropout(dropout_p, &p);
  set_seen(seed, valid_lens, mask);
}

std::vector<double> to_doubles(const Tensor& tensor, const char* name) {
  std::vector<double> out(tensor.numel());
  read(tensor, name, 0, tensor.numel() > 1 ? tensor.stride(-1) : 1, tensor.numel(), out.data());
  return out;
}

// All elements of a contiguous tensor, in the sum type.
Buffer in_sum_type(const Tensor& tensor, Kind kind, const char* name) {
  std::vector<double> from(tensor.numel());
  read(tensor, name, 0, 1, tensor.numel(), from.data());  // torch has any stride for one column
  Buffer out(from.size() * size_of(kind));
  if (size_of(kind) == 8)
    std::copy(from.begin(), from.end(), static_cast<double*>(out.get()));
  else
    std::copy(from.begin(), from.end(), static_cast<float*>(out.get()));
  return out;
}

void Inputs::set_w(const std::vector<double>& w, double largest) {
  const Problem& p = problem;
  buffers_.emplace_back(p.width * size_of(kind));
  // A power of two scales without rounding. Subnormal and infinite weights are not scaled, and
  // those of ReLU, whose results have no bound, are not made larger.
  int exponent = 0;
  if (largest > 1e-30 && std::isfinite(largest)) std::frexp(largest, &exponent);
  exponent = std::min(exponent, size_of(kind) == 8 ? 1023 : 127);  // a scale is finite
  const Activation act = p.inside.activation;
  if (act == Activation::relu || act == Activation::leaky_relu) exponent = std::max(exponent, 0);
  problem.w_scale = std::ldexp(1.0, exponent);
  const double inverse = std::ldexp(1.0, -exponent);
  const auto fill = [&](auto zero) {
    using A = decltype(zero);
    A* out = static_cast<A*>(buffers_.back().get());
    for (int64_t h = 0; h < p.width; ++h) out[h] = h < p.H ? static_cast<A>(w[h] * inverse) : zero;
  };
  size_of(kind) == 8 ? fill(double{}) : fill(float{});
  problem.w = buffers_.back().get();
}

// W_f transposed; features as they are where their type is the sum type, else (B,C,Tk).
template <class A>
void Inputs::set_features(const Tensor& features, const Tensor& w_f) {
  const Problem& p = problem;
  Inside& g = problem.inside;
  std::vector<double> row(std::max(p.H, p.Tk));
  buffers_.emplace_back(g.C * p.width * sizeof(A));
  A* weight = static_cast<A*>(buffers_.back().get());
  g.w_f = weight;
  for (int64_t c = 0; c < g.C; ++c, weight += p.width) {
    read(w_f, "w_f", c * w_f.stride(1), w_f.stride(0), p.H, row.data());
    for (int64_t h = 0; h < p.width; ++h) weight[h] = h < p.H ? static_cast<A>(row[h]) : A(0);
  }
  if (features.element_size() == sizeof(A)) {
    owned_.push_back(features);
    g.features = {features.const_data_ptr(), features.stride(0), features.stride(1)};
    g.feature_step = features.stride(2);
    return;
  }
  buffers_.emplace_back(p.B * g.C * p.Tk * sizeof(A));
  A* out = static_cast<A*>(buffers_.back().get());
  g.features = {out, g.C * p.Tk, 1};
  g.feature_step = p.Tk;
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t c = 0; c < g.C; ++c, out += p.Tk) {
      read(features, "features", b * features.stride(0) + c * features.stride(2),
           features.stride(1), p.Tk, row.data());
      for (int64_t j = 0; j < p.Tk; ++j) out[j] = static_cast<A>(row[j]);
    }
  }
}

void Inputs::set_inside(const AttentionArguments& args) {
  Problem& p = problem;
  Inside& g = p.inside;
  STD_TORCH_CHECK(args.activation >= 0 && args.activation <= 3,
                  "activation must be 0 (tanh), 1 (relu), 2 (leaky_relu) or 3 (sigmoid)");
  STD_TORCH_CHECK(args.features.has_value() == args.w_f.has_value(),
                  "features and w_f must be given together");
  g.activation = static_cast<Activation>(args.activation);
  g.negative_slope = args.negative_slope;
  p.from_sums = args.features.has_value() || g.activation != Activation::tanh;
  if (!args.features.has_value()) return;
  const Tensor &features = *args.features, &w_f = *args.w_f;
  for (const auto& [tensor, name] : {std::pair(&features, "features"), std::pair(&w_f, "w_f")}) {
    check_cpu(*tensor, name);
    STD_TORCH_CHECK(tensor->scalar_type() == storage, name, " must have the dtype of queries");
  }
  STD_TORCH_CHECK(features.dim() == 3 && features.size(0) == p.B && features.size(1) == p.Tk,
                  "features must have 3 dimensions, and the batch size and length of keys");
  g.C = features.size(2);
  STD_TORCH_CHECK(w_f.dim() == 2 && w_f.size(0) == p.H && w_f.size(1) == g.C,
                  "w_f must have shape (H, C)");
  size_of(kind) == 8 ? set_features<double>(features, w_f) : set_features<float>(features, w_f);
}

// sigmoid(x) = (1 + tanh(x / 2)) / 2: of several queries tanh, by products of exponentials, takes
// some two thirds of the time, and softmax takes no notice of what all scores have in common.
void Inputs::halve() {
  Problem& p = problem;
  p.halved = true;
  p.from_sums = false;
  p.w_scale /= 2;
  const auto half_of = [&](const View& view, int64_t rows) -> View {
    const auto fill = [&](auto zero) {
      using T = decltype(zero);
      buffers_.emplace_back(p.B * rows * p.H * sizeof(T));
      T* const out = static_cast<T*>(buffers_.back().get());
      parallel(
          p.B, rows * p.H / 8, [] { return 0; },
          [&](int64_t b, int) {
            const T* from = static_cast<const T*>(view.data) + b * view.batch_stride;
            for (int64_t i = 0; i < rows; ++i, from += view.row_stride)
              for (int64_t h = 0; h < p.H; ++h)
                narrow(widen(from[h]) / 2, out + (b * rows + i) * p.H + h);
          });
      return View{out, rows * p.H, p.H};
    };
    switch (storage) {
      case ScalarType::Double:
        return fill(double{});
      case ScalarType::Float:
        return fill(float{});
      case ScalarType::BFloat16:
        return fill(bf16{});
      default:
        return fill(f16{});
    }
  };
  p.queries = half_of(p.queries, p.Tq);
  p.keys = half_of(p.keys, p.Tk);
}

void Inputs::set_table(const MaybeTensor& table, const MaybeTensor& keys_max,
                       Exponentials exponentials) {
  Problem& p = problem;
  const ScalarType type = size_of(kind) == 8 ? ScalarType::Double : ScalarType::Float;
  // A table of the other precision was made for another number of queries; this call ignores it.
  if (table.has_value() && keys_max.has_value() && table->scalar_type() == type) {
    STD_TORCH_CHECK(table->is_cpu() && table->is_contiguous() && table->dim() == 3 &&
                        table->size(0) == p.B && table->size(1) == p.Tk &&
                        table->size(2) == p.width && keys_max->is_cpu() &&
                        keys_max->scalar_type() == type && keys_max->is_contiguous() &&
                        keys_max->numel() == p.B,
                    "table and keys_max must come from exp_keys of the same keys");
    p.table = table->const_data_ptr();
    p.keys_max = keys_max->const_data_ptr();
    return;
  }
  if (exponentials == Exponentials::unused) {
    p.from_sums = true;
    return;
  }
  const bool make_table = exponentials == Exponentials::tabled;
  buffers_.emplace_back(make_table ? p.B * p.Tk * p.width * size_of(kind) : 0);
  buffers_.emplace_back(p.B * size_of(kind));
  void* entries = make_table ? buffers_[buffers_.size() - 2].get() : nullptr;
  void* maxima = buffers_.back().get();
  fill_tables(kind, p.keys, p.B, p.Tk, p.H, maxima, entries);
  p.table = entries;
  p.keys_max = maxima;
}

const void* rows_like(const Tensor& tensor, ScalarType type, const char* name, const Problem& p,
                      std::vector<Tensor>& owned) {
  check_cpu(tensor, name);
  view_like(packed(tensor), type, name, {p.B, p.Tq, p.Tk}, owned);
  return owned.back().const_data_ptr();
}

Backward received(const Inputs& in, const Tensor& weights, const MaybeTensor& grad_context,
                  const MaybeTensor& grad_weights, std::vector<Tensor>& owned) {
  const Problem& p = in.problem;
  const ScalarType weights_type = weights_dtype(in.kind);
  const auto view = [&](const MaybeTensor& grad, ScalarType type, const char* name,
                        int64_t columns) {
    if (!grad.has_value()) return View{};
    check_cpu(*grad, name);
    return view_like(*grad, type, name, {p.B, p.Tq, columns}, owned);
  };
  const auto widened = [&](const Tensor& x) {  // narrow weights have the dtype of the context
    return x.scalar_type() == in.storage ? cast(x, weights_type) : x;
  };
  Backward g;
  g.weights = rows_like(widened(weights), weights_type, "weights", p, owned);
  g.grad_context = view(grad_context, in.storage, "grad_context", p.Dv);
  g.grad_weights =
      view(grad_weights.has_value() ? MaybeTensor(widened(*grad_weights)) : grad_weights,
           weights_type, "grad_weights", p.Tk);
  return g;
}

Tensor gradient(const Tensor& tensor, bool wanted) {
  return new_tensor(gradient_shape(tensor, wanted), tensor.scalar_type());
}

}  // namespace bahdanau_fast

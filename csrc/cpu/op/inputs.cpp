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
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the cpu");
  return kind_of(tensor, name);
}

ScalarType weights_dtype(Kind storage) {
  return storage == Kind::f64 ? ScalarType::Double : ScalarType::Float;
}

Kind computing_kind(Kind storage, int64_t elements, int64_t small) {
  return storage == Kind::f32 && elements <= small ? Kind::f32_in_f64 : storage;
}

Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i)
    strides[i - 1] = strides[i] * (shape[i] > 1 ? shape[i] : 1);
  AtenTensorHandle handle;
  const auto failed = aoti_torch_empty_strided(
      shape.size(), shape.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
      aoti_torch_device_type_cpu(), 0, &handle);
  STD_TORCH_CHECK(failed == 0, "not enough memory for a result of ", shape[0] * strides[0],
                  " elements");
  return Tensor(handle);
}

Tensor packed(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;  // asking torch takes longer than a small problem
  try {
    return torch::stable::contiguous(tensor);
  } catch (...) {  // torch's words for it do not cross its C interface
    STD_TORCH_CHECK(false, "not enough memory for a contiguous copy of ", tensor.numel(),
                    " elements");
  }
}

View view_of(const Tensor& tensor, std::vector<Tensor>& owned) {
  owned.push_back(tensor.size(2) > 1 && tensor.stride(2) != 1 ? packed(tensor) : tensor);
  const Tensor& t = owned.back();
  return {t.const_data_ptr(), t.stride(0), t.stride(1)};
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

// In four chains: one addition after another over w_v would take as long as a small problem.
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

Inputs::Inputs(const Tensor& queries, const Tensor& keys, const MaybeTensor& table,
               const MaybeTensor& keys_max, const Tensor& values, const Tensor& w_v,
               const MaybeTensor& valid_lens, const MaybeTensor& seed, double dropout_p,
               bool make_table) {
  kind = storage_kind(queries, "queries");
  storage = queries.scalar_type();
  STD_TORCH_CHECK(queries.dim() == 3 && keys.dim() == 3 && values.dim() == 3,
                  "queries, keys and values must have 3 dimensions");
  STD_TORCH_CHECK(storage_kind(keys, "keys") == kind, "keys must have the dtype of queries");
  STD_TORCH_CHECK(storage_kind(values, "values") == kind, "values must have the dtype of queries");
  STD_TORCH_CHECK(storage_kind(w_v, "w_v") == kind, "w_v must have the dtype of queries");
  Problem& p = problem;
  p.B = queries.size(0);
  p.Tq = queries.size(1);
  p.H = queries.size(2);
  p.Tk = keys.size(1);
  p.Dv = values.size(2);
  STD_TORCH_CHECK(keys.size(0) == p.B && keys.size(2) == p.H,
                  "keys must have the batch and hidden size of queries");
  STD_TORCH_CHECK(values.size(0) == p.B && values.size(1) == p.Tk,
                  "values must have the batch size and length of keys");
  STD_TORCH_CHECK(w_v.numel() == p.H && w_v.dim() >= 1 && w_v.size(-1) == p.H,
                  "w_v must have shape (1, H) or (H,)");
  STD_TORCH_CHECK(dropout_p >= 0.0 && dropout_p <= 1.0, "dropout_p must be between 0 and 1");
  const bool float_table = table.has_value() && table->scalar_type() == ScalarType::Float;
  kind = computing_kind(kind, p.B * p.Tq * p.Tk * p.H, float_table ? kSmallForward : kSmall);
  const std::vector<double> w = to_doubles(w_v, "w_v");
  const Norms of_w = norms(w);
  if (kind == Kind::f32 && of_w.length > kLongW) kind = Kind::f32_in_f64;
  p.width = table_width(p.H, kind);
  p.queries = view_of(queries, owned_);
  p.keys = view_of(keys, owned_);
  p.values = view_of(values, owned_);
  p.dropout = dropout_p > 0.0;
  p.dropout_p = dropout_p;
  if (p.dropout) {
    STD_TORCH_CHECK(seed.has_value() && seed->is_cpu() && seed->numel() == 1 &&
                        seed->scalar_type() == ScalarType::Long,
                    "seed must be one int64 number on the cpu");
    p.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr()));
  }
  if (p.B == 0 || p.Tq == 0 || p.Tk == 0) return;
  set_w(w, of_w.largest);
  set_kept(valid_lens);
  set_table(table, keys_max, make_table);
}

namespace {

// out[i] of `count` elements `stride` apart, of any real dtype.
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

}  // namespace

std::vector<double> to_doubles(const Tensor& tensor, const char* name) {
  std::vector<double> out(tensor.numel());
  read(tensor, name, 0, tensor.numel() > 1 ? tensor.stride(-1) : 1, tensor.numel(), out.data());
  return out;
}

void Inputs::set_w(const std::vector<double>& w, double largest) {
  const Problem& p = problem;
  buffers_.emplace_back(p.width * size_of(kind));
  // A power of two scales without rounding; subnormal or infinite weights stay as they are.
  int exponent = 0;
  if (largest > 1e-30 && std::isfinite(largest)) std::frexp(largest, &exponent);
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

void Inputs::set_kept(const MaybeTensor& valid_lens) {
  const Problem& p = problem;
  kept_.assign(p.B * p.Tq, p.Tk);
  problem.kept = kept_.data();
  if (!valid_lens.has_value()) return;
  const Tensor& lens = *valid_lens;
  STD_TORCH_CHECK(lens.is_cpu(), "valid_lens must be on the cpu");
  const bool by_query = lens.dim() == 2;
  STD_TORCH_CHECK(
      (lens.dim() == 1 || by_query) && lens.size(0) == p.B && (!by_query || lens.size(1) == p.Tq),
      "valid_lens must have shape (B,) or (B, Tq)");
  std::vector<double> row(by_query ? p.Tq : p.B);
  if (!by_query) read(lens, "valid_lens", 0, lens.stride(0), p.B, row.data());
  for (int64_t b = 0; b < p.B; ++b) {
    if (by_query) read(lens, "valid_lens", b * lens.stride(0), lens.stride(1), p.Tq, row.data());
    for (int64_t i = 0; i < p.Tq; ++i) {
      const double len = row[by_query ? i : b];
      // Position j is kept when j < len; NaN keeps none.
      kept_[b * p.Tq + i] = !(len > 0.0) ? 0 : len >= double(p.Tk) ? p.Tk : int64_t(std::ceil(len));
    }
  }
}

void Inputs::set_table(const MaybeTensor& table, const MaybeTensor& keys_max, bool make_table) {
  Problem& p = problem;
  const ScalarType type = size_of(kind) == 8 ? ScalarType::Double : ScalarType::Float;
  // A table of the other precision was made for another number of queries: not for this call.
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
  buffers_.emplace_back(make_table ? p.B * p.Tk * p.width * size_of(kind) : 0);
  buffers_.emplace_back(p.B * size_of(kind));
  void* entries = make_table ? buffers_[buffers_.size() - 2].get() : nullptr;
  void* maxima = buffers_.back().get();
  fill_tables(kind, p.keys, p.B, p.Tk, p.H, maxima, entries);
  p.table = entries;
  p.keys_max = maxima;
}

}  // namespace bahdanau_fast

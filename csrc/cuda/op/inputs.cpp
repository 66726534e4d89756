#include "inputs.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <string>

namespace bahdanau_fast::gpu {
namespace {

constexpr LenType len_type(int64_t) { return LenType::i64; }
constexpr LenType len_type(int32_t) { return LenType::i32; }
constexpr LenType len_type(int16_t) { return LenType::i16; }
constexpr LenType len_type(int8_t) { return LenType::i8; }
constexpr LenType len_type(uint8_t) { return LenType::u8; }
constexpr LenType len_type(uint16_t) { return LenType::u16; }
constexpr LenType len_type(uint32_t) { return LenType::u32; }
constexpr LenType len_type(uint64_t) { return LenType::u64; }
constexpr LenType len_type(float) { return LenType::f32; }
constexpr LenType len_type(double) { return LenType::f64; }
constexpr LenType len_type(bf16) { return LenType::bf16; }
constexpr LenType len_type(f16) { return LenType::f16; }

std::string place_of(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  return (tensor.is_cuda() ? "cuda:" : "device ") + std::to_string(tensor.get_device_index());
}

// Torch's current stream. Looked up in the library that torch has loaded: a binary built against a
// torch without CUDA cannot name it.
void* current_stream(int device) {
  using Get = int32_t (*)(int32_t, void**);
  static const Get get = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    const char* name = "aoti_torch_get_current_cuda_stream";
    return torch_cuda ? reinterpret_cast<Get>(dlsym(torch_cuda, name)) : nullptr;
  }();
  STD_TORCH_CHECK(get != nullptr, "this torch has no CUDA");
  void* stream = nullptr;
  STD_TORCH_CHECK(get(device, &stream) == 0, "torch gave no stream for cuda:", device);
  return stream;
}

// Asked for once for each GPU, the current one.
int largest_cluster(int device, Kind kind) {
  static std::array<std::atomic<int>, 64> known{};
  std::atomic<int>& here = known[size_t(device) % known.size()];
  if (here == 0 || size_t(device) >= known.size()) here = kernels(kind).largest_cluster();
  return here;
}

}  // namespace

const Kernels& kernels(Kind kind) {
  static const Kernels* const all[kKinds] = {&kernels_f32, &kernels_f64, &kernels_bf16,
                                             &kernels_f16, &kernels_f32_in_f64};
  return *all[static_cast<int>(kind)];
}

Inputs::Inputs(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
               const MaybeTensor& valid_lens, const MaybeTensor& seed, double dropout_p,
               const std::optional<Projections>& projections) {
  STD_TORCH_CHECK(queries.is_cuda(), "queries must be on a CUDA device, got ", place_of(queries));
  device = queries.get_device_index();
  kind = kind_of(queries, "queries");
  STD_TORCH_CHECK(queries.dim() == 3 && keys.dim() == 3 && values.dim() == 3,
                  "queries, keys and values must have 3 dimensions");
  STD_TORCH_CHECK(kind_of(keys, "keys") == kind, "keys must have the dtype of queries");
  STD_TORCH_CHECK(kind_of(values, "values") == kind, "values must have the dtype of queries");
  STD_TORCH_CHECK(kind_of(w_v, "w_v") == kind, "w_v must have the dtype of queries");
  check_place(keys, "keys");
  check_place(values, "values");
  check_place(w_v, "w_v");
  Problem& p = problem;
  p.B = queries.size(0);
  p.Tq = queries.size(1);
  p.H = w_v.numel();
  p.Tk = keys.size(1);
  p.Dv = values.size(2);
  STD_TORCH_CHECK(w_v.dim() >= 1 && w_v.size(-1) == p.H, "w_v must have shape (1, H) or (H,)");
  STD_TORCH_CHECK(projections.has_value() || queries.size(2) == p.H,
                  "w_v must have as many elements as queries have hidden units");
  const bool projected = !projections.has_value() || !projections->w_k.has_value();
  STD_TORCH_CHECK(keys.size(0) == p.B && (!projected || keys.size(2) == p.H),
                  "keys must have the batch and hidden size of queries");
  STD_TORCH_CHECK(values.size(0) == p.B && values.size(1) == p.Tk,
                  "values must have the batch size and length of keys");
  STD_TORCH_CHECK(dropout_p >= 0.0 && dropout_p <= 1.0, "dropout_p must be between 0 and 1");
  if (kind == Kind::f32 && p.B * p.Tq * p.Tk * p.H <= kSmall) kind = Kind::f32_in_f64;
  p.dropout_p = dropout_p;
  if (dropout_p > 0.0) {
    STD_TORCH_CHECK(
        seed.has_value() && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long,
        "seed must be one int64 number");
    check_place(*seed, "seed");
    p.seed = static_cast<const int64_t*>(seed->const_data_ptr());
  }
  if (valid_lens.has_value()) set_lens(valid_lens);
  if (empty()) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  p.queries = view_of(queries);
  p.keys = view_of(keys);
  p.values = view_of(values);
  owned_.push_back(torch::stable::contiguous(w_v));
  p.w = owned_.back().const_data_ptr();
  if (projections.has_value()) set_projections(*projections, queries, keys);
  forward.p = p;
}

const void* Inputs::weight_of(const Tensor& tensor, const char* name,
                              const std::vector<int64_t>& shape) {
  bool fits = tensor.dim() == int64_t(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = tensor.size(i) == shape[i];
  STD_TORCH_CHECK(fits && tensor.scalar_type() == owned_.front().scalar_type(), name,
                  " must fit the projection and have the dtype of queries");
  check_place(tensor, name);
  owned_.push_back(torch::stable::contiguous(tensor));
  return owned_.back().const_data_ptr();
}

void Inputs::set_projections(const Projections& given, const Tensor& queries, const Tensor& keys) {
  const int64_t H = problem.H;
  forward.Dq = queries.size(2);
  forward.Dk = keys.size(2);
  forward.w_q = weight_of(given.w_q, "w_q", {H, forward.Dq});
  if (given.w_k.has_value()) forward.w_k = weight_of(*given.w_k, "w_k", {H, forward.Dk});
  if (given.bias.has_value()) forward.bias = weight_of(*given.bias, "bias", {H});
}

void Inputs::check_place(const Tensor& tensor, const char* name) const {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, name,
                  " must be on the device of queries, cuda:", device, ", got ", place_of(tensor));
}

View Inputs::view_of(const Tensor& tensor) {
  const bool rows = tensor.size(2) <= 1 || tensor.stride(2) == 1;
  owned_.push_back(rows ? tensor : torch::stable::contiguous(tensor));
  const Tensor& t = owned_.back();
  return {t.const_data_ptr(), t.stride(0), t.stride(1)};
}

View Inputs::grad_view(const MaybeTensor& grad, ScalarType type, const char* name,
                       int64_t columns) {
  const Problem& p = problem;
  if (!grad.has_value()) return {};
  STD_TORCH_CHECK(grad->scalar_type() == type && grad->dim() == 3 && grad->size(0) == p.B &&
                      grad->size(1) == p.Tq && grad->size(2) == columns,
                  name, " must have the shape and dtype of the result it belongs to");
  check_place(*grad, name);
  const torch::stable::accelerator::DeviceGuard guard(device);
  return view_of(*grad);
}

void Inputs::set_lens(const MaybeTensor& valid_lens) {
  const Problem& p = problem;
  const Tensor& lens = *valid_lens;
  check_place(lens, "valid_lens");
  const bool by_query = lens.dim() == 2;
  STD_TORCH_CHECK(
      (lens.dim() == 1 || by_query) && lens.size(0) == p.B && (!by_query || lens.size(1) == p.Tq),
      "valid_lens must have shape (B,) or (B, Tq)");
  const LenType type = with_type_of(lens, "valid_lens", [](auto x) { return len_type(x); });
  problem.lens = {lens.const_data_ptr(), type, lens.stride(0), by_query ? lens.stride(1) : 0};
}

Tensor Inputs::new_tensor(const std::vector<int64_t>& shape, ScalarType type) const {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i)
    strides[i - 1] = strides[i] * (shape[i] > 1 ? shape[i] : 1);
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      shape.size(), shape.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
      aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

Device Inputs::current() const {
  int multiprocessors = 0;
  STD_TORCH_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount,
                                         device) == cudaSuccess,
                  "cuda:", device, " does not tell its properties");
  return {multiprocessors, current_stream(device), largest_cluster(device, kind)};
}

}  // namespace bahdanau_fast::gpu

#include "inputs.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <string>

#include "common/philox.h"

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

// Torch's current stream. The function is looked up in the library that torch has loaded, because a
// binary built against a torch without CUDA cannot link to it.
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

// Blocks of the largest cluster of a kind's kernels on the current GPU, asked for once.
int largest_cluster(int device, Kind kind) {
  static std::array<std::array<std::atomic<int>, 64>, kKinds> known{};
  auto& of_kind = known[static_cast<size_t>(kind)];
  std::atomic<int>& here = of_kind[size_t(device) % of_kind.size()];
  if (here == 0 || size_t(device) >= of_kind.size()) here = kernels(kind).largest_cluster();
  return here;
}

}  // namespace

const Kernels& kernels(Kind kind) {
  return kind == Kind::f32 ? kernels_f32 : kind == Kind::bf16 ? kernels_bf16 : kernels_f16;
}

Inputs::Inputs(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
               const MaybeTensor& valid_lens, const MaybeTensor& mask, const MaybeTensor& seed,
               double dropout_p, const MaybeTensor& w_q) {
  STD_TORCH_CHECK(queries.is_cuda(), "queries must be on a CUDA device, got ", place_of(queries));
  device = queries.get_device_index();
  const auto here = [&](const Tensor& tensor, const char* name) { check_place(tensor, name); };
  Problem& p = problem;
  kind = read_sizes(queries, keys, values, w_v, dropout_p, w_q.has_value(), false, here, &p);
  dtype = queries.scalar_type();
  STD_TORCH_CHECK(kind != Kind::f64, "CUDA kernels take float32, bfloat16 or float16");
  STD_TORCH_CHECK(kernels(kind).serves(p), "CUDA kernels take at most ", kDecodeQueries,
                  " queries and ", kDecodeHidden, " hidden units, got ", p.Tq, " and ", p.H);
  if (dropout_p > 0.0) p.seed = seed_data(seed, here);
  p.threshold = dropout_threshold(dropout_p);
  p.scale = float(dropout_scale(dropout_p));
  if (valid_lens.has_value()) set_lens(*valid_lens);
  if (mask.has_value()) set_mask(*mask);
  if (p.empty()) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  p.queries = view_of(queries, owned_);
  p.keys = view_of(keys, owned_);
  p.values = view_of(values, owned_);
  owned_.push_back(packed(w_v));
  p.w = owned_.back().const_data_ptr();
  if (w_q.has_value()) set_w_q(*w_q, queries);
  forward.p = p;
}

void Inputs::set_w_q(const Tensor& w_q, const Tensor& queries) {
  forward.Dq = queries.size(2);
  STD_TORCH_CHECK(w_q.dim() == 2 && w_q.size(0) == problem.H && w_q.size(1) == forward.Dq &&
                      w_q.scalar_type() == dtype,
                  "w_q must fit the projection and have the dtype of queries");
  check_place(w_q, "w_q");
  owned_.push_back(packed(w_q));
  forward.w_q = owned_.back().const_data_ptr();
}

void Inputs::check_place(const Tensor& tensor, const char* name) const {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, name,
                  " must be on the device of queries, cuda:", device, ", got ", place_of(tensor));
}

View Inputs::view_like(const MaybeTensor& tensor, ScalarType type, const char* name,
                       int64_t columns) {
  if (!tensor.has_value()) return {};
  check_place(*tensor, name);
  const torch::stable::accelerator::DeviceGuard guard(device);
  return bahdanau_fast::view_like(*tensor, type, name, {problem.B, problem.Tq, columns}, owned_);
}

void Inputs::set_lens(const Tensor& lens) {
  const bool by_query = lens_by_query(
      lens, problem, [&](const Tensor& tensor, const char* name) { check_place(tensor, name); });
  const LenType type = with_type_of(lens, "valid_lens", [](auto x) { return len_type(x); });
  problem.lens = {lens.const_data_ptr(), type, lens.stride(0), by_query ? lens.stride(1) : 0};
}

void Inputs::set_mask(const Tensor& mask) {
  const Problem& p = problem;
  check_place(mask, "mask");
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.dim() == 3 &&
                      mask.size(0) == p.B && (mask.size(1) == 1 || mask.size(1) == p.Tq) &&
                      mask.size(2) == p.Tk,
                  "mask must be bool, (B, 1, Tk) or (B, Tq, Tk)");
  problem.mask = {static_cast<const bool*>(mask.const_data_ptr()), mask.stride(0),
                  mask.size(1) == 1 ? 0 : mask.stride(1), mask.stride(2)};
}

Tensor Inputs::new_tensor(const std::vector<int64_t>& shape, ScalarType type) const {
  return bahdanau_fast::new_tensor(shape, type, aoti_torch_device_type_cuda(), device);
}

Device Inputs::current() const {
  int multiprocessors = 0;
  STD_TORCH_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount,
                                         device) == cudaSuccess,
                  "cuda:", device, " does not tell its properties");
  return {multiprocessors, current_stream(device), largest_cluster(device, kind)};
}

}  // namespace bahdanau_fast::gpu

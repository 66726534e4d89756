#include "inputs.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>

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

// The current GPU as the kernels of a kind see it, which is asked for once, and torch's current
// stream there.
Device current_device(int index, const Kernels* kernels) {
  static auto* const known = new std::map<std::pair<int, const Kernels*>, Device>;
  static auto* const lock = new std::mutex;
  Device device;
  {
    const std::lock_guard<std::mutex> guard(*lock);
    const auto found = known->find({index, kernels});
    if (found != known->end()) device = found->second;
  }
  if (device.multiprocessors == 0) {
    device.index = index;
    device.cluster = kernels->largest_cluster();
    STD_TORCH_CHECK(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount,
                                           index) == cudaSuccess,
                    "cuda:", index, " does not tell its properties");
    const std::lock_guard<std::mutex> guard(*lock);
    known->insert({{index, kernels}, device});
  }
  device.stream = current_stream(index);
  return device;
}

int index_of(const Tensor& queries) {
  STD_TORCH_CHECK(queries.is_cuda(), "queries must be on a CUDA device, got ", place_of(queries));
  return queries.get_device_index();
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(weight), from(bias)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Inputs::Inputs(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& w_v,
               const MaybeTensor& valid_lens, const MaybeTensor& mask, const MaybeTensor& seed,
               double dropout_p, const MaybeTensor& w_q)
    : guard_(index_of(queries)) {
  device.index = queries.get_device_index();
  const auto here = [&](const Tensor& tensor, const char* name) { check_place(tensor, name); };
  Problem& p = forward.p;
  const Kind kind =
      read_sizes(queries, keys, values, w_v, dropout_p, w_q.has_value(), false, here, &p);
  dtype = queries.scalar_type();
  STD_TORCH_CHECK(kind != Kind::f64, "CUDA kernels take float32, bfloat16 or float16");
  kernels = kind == Kind::f32 ? &kernels_f32 : kind == Kind::bf16 ? &kernels_bf16 : &kernels_f16;
  STD_TORCH_CHECK(kernels->serves(p), "CUDA kernels take at most ", kDecodeQueries, " queries and ",
                  kDecodeHidden, " hidden units, got ", p.Tq, " and ", p.H);
  if (dropout_p > 0.0) p.seed = seed_data(seed, here);
  p.threshold = dropout_threshold(dropout_p);
  p.scale = float(dropout_scale(dropout_p));
  if (valid_lens.has_value()) set_lens(*valid_lens);
  if (mask.has_value()) set_mask(*mask);
  if (w_q.has_value()) {
    check_place(*w_q, "w_q");
    STD_TORCH_CHECK(w_q->dim() == 2 && w_q->size(0) == p.H && w_q->size(1) == queries.size(2) &&
                        w_q->scalar_type() == dtype,
                    "w_q must fit the projection and have the dtype of queries");
  }
  if (p.empty()) return;
  device = current_device(device.index, kernels);
  p.keys = view_of(keys, owned_);
  p.values = view_of(values, owned_);
  owned_.push_back(packed(w_v));
  p.w = owned_.back().const_data_ptr();
  p.queries = view_of(queries, owned_);
  if (!w_q.has_value()) return;
  owned_.push_back(packed(*w_q));
  forward.w_q = owned_.back().const_data_ptr();
  forward.Dq = queries.size(2);
  if (forward.Dq > 0 && kernels->projects(forward)) return;
  forward.w_q = nullptr;
  p.queries = view_of(linear(queries, *w_q, std::nullopt), owned_);
}

void Inputs::check_place(const Tensor& tensor, const char* name) const {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device.index, name,
                  " must be on the device of queries, cuda:", device.index, ", got ",
                  place_of(tensor));
}

View Inputs::view_like(const MaybeTensor& tensor, ScalarType type, const char* name,
                       int64_t columns) {
  if (!tensor.has_value()) return {};
  check_place(*tensor, name);
  return bahdanau_fast::view_like(*tensor, type, name, {problem.B, problem.Tq, columns}, owned_);
}

void Inputs::set_lens(const Tensor& lens) {
  Problem& p = forward.p;
  const bool by_query = lens_by_query(
      lens, p, [&](const Tensor& tensor, const char* name) { check_place(tensor, name); });
  const LenType type = with_type_of(lens, "valid_lens", [](auto x) { return len_type(x); });
  p.lens = {lens.const_data_ptr(), type, lens.stride(0), by_query ? lens.stride(1) : 0};
}

void Inputs::set_mask(const Tensor& mask) {
  Problem& p = forward.p;
  check_place(mask, "mask");
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.dim() == 3 &&
                      mask.size(0) == p.B && (mask.size(1) == 1 || mask.size(1) == p.Tq) &&
                      mask.size(2) == p.Tk,
                  "mask must be bool, (B, 1, Tk) or (B, Tq, Tk)");
  p.mask = {static_cast<const bool*>(mask.const_data_ptr()), mask.stride(0),
            mask.size(1) == 1 ? 0 : mask.stride(1), mask.stride(2)};
}

Tensor Inputs::new_tensor(const std::vector<int64_t>& shape, ScalarType type) const {
  return bahdanau_fast::new_tensor(shape, type, aoti_torch_device_type_cuda(), device.index);
}

Memory Inputs::memory() {
  return [this](int64_t bytes) {
    owned_.push_back(new_tensor({bytes}, ScalarType::Byte));
    return owned_.back().mutable_data_ptr();
  };
}

}  // namespace bahdanau_fast::gpu

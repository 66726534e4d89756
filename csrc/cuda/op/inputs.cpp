#include "inputs.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "common/philox.h"
#include "cuda/runtime/green_context.h"
#include "cuda/runtime/launch.h"
#include "products.h"
#include "torch_cuda.h"

namespace bahdanau_fast::gpu {
namespace {

#define BAHDANAU_FAST_LEN_TYPE(name, type) \
  constexpr LenType len_type(type) { return LenType::name; }
BAHDANAU_FAST_LEN_TYPES(BAHDANAU_FAST_LEN_TYPE)
#undef BAHDANAU_FAST_LEN_TYPE

std::string device_of(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  return (tensor.is_cuda() ? "cuda:" : "device ") + std::to_string(tensor.get_device_index());
}

// Torch's current stream.
void* current_stream(int device) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const auto get = in_torch_cuda<Get>("aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  STD_TORCH_CHECK(get(device, &stream) == 0, "torch gave no stream for cuda:", device);
  return stream;
}

void check_dense(const Tensor& tensor, const char* name) {
  int32_t layout = 0;
  const bool defined = tensor.defined() && aoti_torch_get_layout(tensor.get(), &layout) == 0;
  STD_TORCH_CHECK(defined && layout == aoti_torch_layout_strided(), name,
                  " must be a dense tensor");
}

// The GPU of the queries.
int index_of(const Tensor& queries) {
  check_dense(queries, "queries");
  STD_TORCH_CHECK(queries.is_cuda(), "queries must be on a CUDA device, got ", device_of(queries));
  return queries.get_device_index();
}

}  // namespace

Tensor in_vectors(const Tensor& tensor) {
  const Tensor rows = tensor.stride(tensor.dim() - 1) != 1 ? packed(tensor) : tensor;
  bool aligned = reinterpret_cast<uint64_t>(rows.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < rows.dim(); ++i) aligned = aligned && rows.stride(i) % 8 == 0;
  return aligned ? rows : torch::stable::clone(packed(rows));
}

// Cached, but for what the stream decides.
Device current_device(int index, const Kernels* kernels) {
  Device device = cached(std::pair(index, kernels), [&] {
    Device device;
    device.index = index;
    device.cluster = kernels->largest_cluster();
    const auto tells = [&](int* value, cudaDeviceAttr attribute) {
      return cudaDeviceGetAttribute(value, attribute, index) == cudaSuccess;
    };
    STD_TORCH_CHECK(tells(&device.multiprocessors, cudaDevAttrMultiProcessorCount) &&
                        tells(&device.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin),
                    "cuda:", index, " does not tell its properties");
    return device;
  });
  device.stream = current_stream(index);
  device.multiprocessors = multiprocessors_of(device.stream, device.multiprocessors);
  return device;
}

Inputs::Inputs(const AttentionArguments& args, Use use, const MaybeTensor& projected_queries,
               const MaybeTensor& projected_keys)
    : device{index_of(args.queries)}, guard_(device.index) {
  check(args, use);
  device = current_device(device.index, kernels);
  const auto project = [&](const Tensor& rows, const Tensor& weight, const MaybeTensor& bias,
                           const MaybeTensor& projected, const char* name) {
    if (!projected.has_value() || projected->numel() == 0) return linear(rows, weight, bias);
    check_fits(*projected, dtype, {problem.B, rows.size(1), problem.H}, name);
    return *projected;
  };
  Problem& p = forward.p;
  owned_.reserve(8);
  p.keys = view_of(args.w_k.has_value()
                       ? project(args.keys, *args.w_k, args.bias, projected_keys, "projected_keys")
                       : args.keys,
                   owned_);
  p.values = view_of(args.values, owned_);
  owned_.push_back(packed(args.w_v));
  p.w = owned_.back().const_data_ptr();
  p.queries = view_of(args.queries, owned_);
  if (!args.w_q.has_value()) return;
  if (use == Use::forward) {
    owned_.push_back(packed(*args.w_q));
    forward.w_q = owned_.back().const_data_ptr();
    forward.Dq = args.queries.size(2);
    if (kernels->projects(forward, device)) return;
    forward.w_q = nullptr;
  }
  projected =
      project(args.queries, *args.w_q, std::nullopt, projected_queries, "projected_queries");
  p.queries = view_of(*projected, owned_);
}

void Inputs::check(const AttentionArguments& args, Use use) {
  STD_TORCH_CHECK(!args.features.has_value() && !args.w_f.has_value() && args.activation == 0,
                  "features and w_f must be None and activation 0 for CUDA kernels");
  // An exponential is computed faster than it could be read.
  STD_TORCH_CHECK(!args.table.has_value() && !args.keys_max.has_value(),
                  "table and keys_max must be None for CUDA kernels");
  const auto same_device = [&](const Tensor& tensor, const char* name) {
    check_device(tensor, name);
  };
  Problem& p = forward.p;
  dtype = args.queries.scalar_type();
  const Kind kind = read_sizes(args.queries, args.keys, args.values, args.w_v, args.dropout_p,
                               args.w_q.has_value(), args.w_k.has_value(), same_device, &p);
  STD_TORCH_CHECK(kind != Kind::f64,
                  "queries must be float32, bfloat16 or float16 for CUDA kernels, got float64");
  if (args.w_q.has_value()) check_fits(*args.w_q, dtype, {p.H, args.queries.size(2)}, "w_q");
  if (args.w_k.has_value()) check_fits(*args.w_k, dtype, {p.H, args.keys.size(2)}, "w_k");
  if (args.bias.has_value()) check_fits(*args.bias, dtype, {p.H}, "bias");
  kernels = kind == Kind::f32 ? &kernels_f32 : kind == Kind::bf16 ? &kernels_bf16 : &kernels_f16;
  STD_TORCH_CHECK(use == Use::decoder || kernels->serves(p), "CUDA kernels take at most ",
                  kDecodeQueries, " queries and ", kDecodeHidden, " hidden units, got ", p.Tq,
                  " and ", p.H);
  if (args.dropout_p > 0.0) p.seed = seed_data(args.seed, same_device);
  p.threshold = dropout_threshold(args.dropout_p);
  p.scale = float(dropout_scale(args.dropout_p));
  if (args.valid_lens.has_value()) {
    const Tensor& lens = *args.valid_lens;
    const bool by_query = lens_by_query(lens, p, same_device);
    const LenType type = with_type_of(lens, "valid_lens", [](auto x) { return len_type(x); });
    p.lens = {lens.const_data_ptr(), type, lens.stride(0), by_query ? lens.stride(1) : 0};
  }
  if (args.mask.has_value()) {
    const Tensor& mask = *args.mask;
    check_mask(mask, p, same_device);
    p.mask = {static_cast<const bool*>(mask.const_data_ptr()), mask.stride(0),
              mask.size(1) == 1 ? 0 : mask.stride(1), mask.stride(2)};
  }
}

void Inputs::check_device(const Tensor& tensor, const char* name) const {
  check_dense(tensor, name);
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device.index, name,
                  " must be on the device of queries, cuda:", device.index, ", got ",
                  device_of(tensor));
}

void Inputs::check_fits(const Tensor& tensor, ScalarType type, std::initializer_list<int64_t> shape,
                        const char* name) const {
  check_device(tensor, name);
  const auto sizes = tensor.sizes();
  STD_TORCH_CHECK(tensor.scalar_type() == type &&
                      std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()),
                  name, " must have the shape and dtype that fit the others");
}

const void* Inputs::data_of(const Tensor& tensor, ScalarType type,
                            std::initializer_list<int64_t> shape, const char* name) {
  check_fits(tensor, type, shape, name);
  owned_.push_back(packed(tensor));
  if (reinterpret_cast<uint64_t>(owned_.back().const_data_ptr()) % 16 != 0)
    owned_.back() = torch::stable::clone(owned_.back());
  return owned_.back().const_data_ptr();
}

View Inputs::rows_of(const Tensor& tensor, int64_t rows, int64_t columns, const char* name) {
  check_fits(tensor, dtype, {rows, columns}, name);
  owned_.push_back(in_vectors(tensor));
  return {owned_.back().const_data_ptr(), 0, owned_.back().stride(0)};
}

View Inputs::view_like(const MaybeTensor& tensor, ScalarType type, const char* name,
                       int64_t columns) {
  if (!tensor.has_value()) return {};
  check_device(*tensor, name);
  return bahdanau_fast::view_like(*tensor, type, name, {problem.B, problem.Tq, columns}, owned_);
}

Tensor Inputs::new_tensor(const std::vector<int64_t>& shape, ScalarType type, bool wanted) const {
  return bahdanau_fast::new_tensor(wanted ? shape : std::vector<int64_t>{0}, type,
                                   aoti_torch_device_type_cuda(), device.index);
}

Memory Inputs::memory() {
  return [this](int64_t bytes) {
    owned_.push_back(new_tensor({bytes}, ScalarType::Byte));
    return owned_.back().mutable_data_ptr();
  };
}

}  // namespace bahdanau_fast::gpu

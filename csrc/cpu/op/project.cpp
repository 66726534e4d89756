#include "project.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <utility>

namespace bahdanau_fast {
namespace {

// Threads take so many columns at a time: their weights are then used from the cache, for all rows.
constexpr int64_t kBlock = 64;

int64_t blocks(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

// Into `out`, contiguous; `bytes` are those of an element of the storage type.
void run(const Projection& p, Kind kind, int64_t bytes, void* out) {
  parallel(
      blocks(p.H), p.B * p.R * p.D * kBlock / 8,
      [&] { return Buffer(p.R * kProjectUnits * size_of(kind)); },
      [&](int64_t i, const Buffer& work) {
        const int64_t first = i * kBlock;
        Projection part = p;
        part.H = std::min(kBlock, p.H - first);
        part.w = static_cast<const char*>(p.w) + first * p.D * bytes;
        if (p.bias != nullptr) part.bias = static_cast<const char*>(p.bias) + first * bytes;
        kernels(kind).project(part, static_cast<char*>(out) + first * bytes, p.H, work.get());
      });
}

// Gradients of rows, weight and bias, of no elements where they are not wanted, from that of the
// result, which is contiguous. `shape` is that of the rows.
std::tuple<Tensor, Tensor, Tensor> gradients_of(const Projection& p, Kind kind, const Tensor& grad,
                                                const std::vector<int64_t>& shape, bool of_rows,
                                                bool of_w, bool of_bias) {
  const auto made = [&](bool wanted, const std::vector<int64_t>& shape) {
    return new_tensor(wanted ? shape : std::vector<int64_t>{0}, grad.scalar_type());
  };
  Tensor grad_rows = made(of_rows, shape), grad_w = made(of_w, {p.H, p.D});
  Tensor grad_bias = made(of_bias, {p.H});
  const int64_t count = p.B * p.R;
  if (count * p.H == 0) {
    for (Tensor* t : {&grad_rows, &grad_w, &grad_bias}) torch::stable::zero_(*t);
    return {grad_rows, grad_w, grad_bias};
  }
  const void* from = grad.const_data_ptr();
  const Kernels& k = kernels(kind);
  const int64_t row_blocks = of_rows ? blocks(p.D) : 0;
  const int64_t weight_blocks = of_w || of_bias ? blocks(p.H) : 0;
  parallel(
      row_blocks + weight_blocks, count * std::max(p.D, p.H) * kBlock / 8,
      [&] { return Buffer((count * (p.H + kBlock) + kProjectUnits * p.D) * size_of(kind)); },
      [&](int64_t i, const Buffer& work) {
        const bool is_row = i < row_blocks;
        const int64_t first = (is_row ? i : i - row_blocks) * kBlock;
        if (is_row)
          k.project_grad_rows(p, from, first, std::min(first + kBlock, p.D),
                              grad_rows.mutable_data_ptr(), work.get());
        else
          k.project_grad_weight(p, from, first, std::min(first + kBlock, p.H),
                                data_or_null(grad_w, of_w), data_or_null(grad_bias, of_bias),
                                work.get());
      });
  return {grad_rows, grad_w, grad_bias};
}

}  // namespace

Projected::Projected(const Tensor& rows, const Tensor& weight, const MaybeTensor& bias,
                     int64_t hidden, const char* name, const char* weight_name, int64_t limit)
    : kind_(computing_kind(storage_kind(rows, name), rows.numel(), limit)) {
  STD_TORCH_CHECK(rows.dim() == 3, name, " must have 3 dimensions");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == hidden && weight.size(1) == rows.size(2) &&
                      weight.is_cpu() && weight.scalar_type() == rows.scalar_type(),
                  weight_name, " must have shape (H, D), H that of w_v, D and dtype those of ",
                  name);
  B_ = p_.B = rows.size(0);
  R_ = p_.R = rows.size(1);
  p_.D = rows.size(2);
  p_.H = weight.size(0);
  p_.rows = view_of(rows, owned_);
  if (R_ == 1) {  // kernels take several rows of a batch row together
    p_.rows.row_stride = p_.rows.batch_stride;
    std::swap(p_.B, p_.R);
  }
  owned_.push_back(packed(weight));
  p_.w = owned_.back().const_data_ptr();
  if (!bias.has_value()) return;
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == p_.H && bias->is_cpu() &&
                      bias->scalar_type() == rows.scalar_type(),
                  "bias must have shape (H,) and the dtype of ", name);
  owned_.push_back(packed(*bias));
  p_.bias = owned_.back().const_data_ptr();
}

OwnRows Projected::forward() const {
  const int64_t bytes = owned_[0].element_size();
  OwnRows out(B_, R_, p_.H, owned_[0].scalar_type(), bytes);
  run(p_, kind_, bytes, out.data());
  return out;
}

Tensor Projected::new_forward() const {
  Tensor out = new_tensor({B_, R_, p_.H}, owned_[0].scalar_type());
  run(p_, kind_, owned_[0].element_size(), out.mutable_data_ptr());
  return out;
}

Tensor Projected::forward_unless(const MaybeTensor& projected, const char* name) const {
  if (!projected.has_value() || projected->numel() == 0) return new_forward();
  const Tensor& t = *projected;
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 3 && t.size(0) == B_ && t.size(1) == R_ &&
                      t.size(2) == p_.H && t.scalar_type() == owned_[0].scalar_type(),
                  "projected_", name, " must be those that attention gives");
  return t;
}

std::tuple<Tensor, Tensor, Tensor> Projected::backward(const Tensor& grad, bool of_rows,
                                                       bool of_weight, bool of_bias) const {
  return gradients_of(p_, kind_, grad, {B_, R_, p_.D}, of_rows, of_weight, of_bias);
}

namespace {

// (...,D), with another number in the place of D.
std::vector<int64_t> shape_of(const Tensor& rows, int64_t columns) {
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end());
  shape.back() = columns;
  return shape;
}

// The number of rows of (...,D).
int64_t count_of(const Tensor& rows) {
  int64_t count = 1;
  for (int64_t i = 0; i + 1 < rows.dim(); ++i) count *= rows.size(i);
  return count;
}

// Rows (...,D), contiguous.
Projection of_rows(const Tensor& rows) {
  Projection p;
  p.B = 1;
  p.R = count_of(rows);
  p.D = rows.size(rows.dim() - 1);
  p.rows = {rows.const_data_ptr(), 0, p.D};
  return p;
}

// fp32 is summed up in fp32, as by the matrix products these operators replace.
Tensor project(const Tensor& x, const Tensor& weight, MaybeTensor bias) {
  const Kind kind = storage_kind(x, "x");
  const auto fits = [&](const Tensor& t) {
    return t.is_cpu() && t.scalar_type() == x.scalar_type();
  };
  STD_TORCH_CHECK(
      x.dim() > 0 && weight.dim() == 2 && weight.size(1) == x.size(x.dim() - 1) && fits(weight),
      "weight must have shape (H, D) and the dtype of x (..., D)");
  STD_TORCH_CHECK(
      !bias.has_value() || (bias->dim() == 1 && bias->size(0) == weight.size(0) && fits(*bias)),
      "bias must have shape (H,) and the dtype of x");
  const Tensor rows = packed(x), w = packed(weight);
  const MaybeTensor b = bias.has_value() ? MaybeTensor(packed(*bias)) : std::nullopt;
  Projection p = of_rows(rows);
  p.H = w.size(0);
  p.w = w.const_data_ptr();
  if (b.has_value()) p.bias = b->const_data_ptr();
  Tensor out = new_tensor(shape_of(x, p.H), x.scalar_type());
  run(p, kind, x.element_size(), out.mutable_data_ptr());
  return out;
}

std::tuple<Tensor, Tensor, Tensor> project_backward(const Tensor& grad, MaybeTensor x,
                                                    MaybeTensor weight, bool of_bias) {
  const Kind kind = storage_kind(grad, "grad");
  STD_TORCH_CHECK(grad.dim() > 0, "grad must have a dimension");
  const Tensor own = packed(grad);
  const int64_t count = count_of(own), H = own.size(own.dim() - 1);
  Projection p;
  MaybeTensor rows, w;
  if (x.has_value()) {
    STD_TORCH_CHECK(x->dim() > 0 && count_of(*x) == count && storage_kind(*x, "x") == kind,
                    "x must have shape (..., D) and the dtype of grad (..., H)");
    rows = packed(*x);
    p = of_rows(*rows);
  }
  if (weight.has_value()) {
    STD_TORCH_CHECK(weight->dim() == 2 && weight->size(0) == H &&
                        (!x.has_value() || weight->size(1) == p.D) &&
                        storage_kind(*weight, "weight") == kind,
                    "weight must have shape (H, D) and the dtype of grad (..., H)");
    w = packed(*weight);
    p.w = w->const_data_ptr();
    p.D = w->size(1);
  }
  p.B = 1;
  p.R = count;
  p.H = H;
  return gradients_of(p, kind, own, shape_of(own, p.D), w.has_value(), rows.has_value(), of_bias);
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) {
  m.impl("project", TORCH_BOX(&project));
  m.impl("project_backward", TORCH_BOX(&project_backward));
}

}  // namespace
}  // namespace bahdanau_fast

// Which keys a query sees: lengths and masks.
#include <cstring>

#include "common/lengths.h"
#include "inputs.h"

namespace bahdanau_fast {

void Inputs::set_seen(const MaybeTensor& seed, const MaybeTensor& valid_lens,
                      const MaybeTensor& mask) {
  Problem& p = problem;
  p.dropout = p.dropout_p > 0.0;
  if (p.dropout) p.seed = static_cast<uint64_t>(*seed_data(seed, check_cpu));
  key_counts_.assign(p.B * p.Tq, p.Tk);
  p.key_counts = key_counts_.data();
  if (valid_lens.has_value()) set_key_counts(*valid_lens);
  if (mask.has_value()) set_mask(*mask);
}

Tensor Inputs::counts(const Tensor& valid_lens) const {
  Tensor out = new_tensor(gradient_shape(valid_lens, true), ScalarType::Int);
  const Problem& p = problem;
  const int64_t count = out.numel(), step = valid_lens.dim() == 2 ? 1 : p.Tq;
  auto* to = static_cast<int32_t*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < count; ++i) to[i] = p.Tq > 0 ? int32_t(key_counts_[i * step]) : 0;
  return out;
}

void Inputs::set_key_counts(const Tensor& lens) {
  const Problem& p = problem;
  const bool by_query = lens_by_query(lens, p, check_cpu);
  std::vector<double> row(by_query ? p.Tq : p.B);
  // Also where it reads nothing: it refuses other dtypes.
  read(lens, "valid_lens", 0, lens.stride(0), by_query ? 0 : p.B, row.data());
  for (int64_t b = 0; b < p.B; ++b) {
    if (by_query) read(lens, "valid_lens", b * lens.stride(0), lens.stride(1), p.Tq, row.data());
    for (int64_t i = 0; i < p.Tq; ++i)
      key_counts_[b * p.Tq + i] = keys_within(row[by_query ? i : b], p.Tk);
  }
}

namespace {

// Of the first `count` keys: the number up to the last true one, and whether all of these are true.
struct Seen {
  int64_t keys;
  bool prefix;
};

Seen seen_in(const uint8_t* row, int64_t count) {
  const void* gap = std::memchr(row, 0, count);
  if (gap == nullptr) return {count, true};
  const int64_t first = static_cast<const uint8_t*>(gap) - row;
  int64_t end = count;
  for (uint64_t word = 0; end - first >= 8; end -= 8) {
    std::memcpy(&word, row + end - 8, 8);
    if (word != 0) break;
  }
  while (end > first && row[end - 1] == 0) --end;
  return {end, end == first};
}

}  // namespace

// Where the lengths leave nothing, or the mask nothing of that, a count is 0.
void Inputs::set_mask(const Tensor& mask) {
  Problem& p = problem;
  check_mask(mask, p, check_cpu);
  if (p.empty()) return;
  View view = view_of(mask, owned_);
  if (mask.size(1) == 1) view.row_stride = 0;
  bool prefixes = true;
  for (int64_t b = 0; b < p.B; ++b)
    for (int64_t i = 0; i < p.Tq; ++i) {
      int64_t& count = key_counts_[b * p.Tq + i];
      const int64_t at = b * view.batch_stride + i * view.row_stride;
      const Seen seen = seen_in(static_cast<const uint8_t*>(view.data) + at, count);
      count = seen.keys;
      prefixes = prefixes && seen.prefix;
    }
  if (!prefixes) p.mask = view;
}

}  // namespace bahdanau_fast

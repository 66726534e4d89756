// Fingerprints of tensors: their memory has changed if their fingerprint has.
//
// Block hashes (hash.h) are chained by a polynomial modulo 2^61 - 1. All keys are drawn at
// random when they are first needed, in each process, so that nobody can prepare two tensors with
// the same fingerprint. For two tensors of the same sizes and different bytes, both halves agree
// with a probability below (2^-32 + n 2^-60)^2, n being the number of blocks.
#include <array>
#include <cstring>
#include <random>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "inputs.h"

namespace bahdanau_fast {
namespace {

constexpr uint64_t kPrime = (uint64_t(1) << 61) - 1;
constexpr int64_t kUnitBytes = 64 << 10;  // of one run of memory, for one thread
constexpr int64_t kLeastRun = 64;         // bytes; shorter runs are first copied into one

struct Secrets {
  alignas(64) uint32_t key[2 * kHashWords];
  uint64_t factor[2];

  Secrets() {
    std::random_device random;
    for (uint32_t& word : key) word = random();
    for (uint64_t& f : factor) f = ((uint64_t(random()) << 32) | random()) % kPrime;
  }
};

const Secrets& secrets() {
  static const Secrets drawn;
  return drawn;
}

using Mark = std::array<uint64_t, 2>;

void chain(Mark& mark, int half, uint64_t next) {
  const unsigned __int128 product =
      static_cast<unsigned __int128>(mark[half]) * secrets().factor[half] + next;
  const uint64_t sum =
      static_cast<uint64_t>(product & kPrime) + static_cast<uint64_t>(product >> 61);
  mark[half] = sum >= kPrime ? sum - kPrime : sum;
}

// The mark of a stream of bytes that arrives in pieces.
class Stream {
 public:
  void add(const char* from, int64_t bytes) {
    while (bytes > 0) {
      if (filled_ == 0 && bytes >= kHashBytes) {
        const int64_t blocks = std::min(bytes / kHashBytes, kAtOnce);
        hash(from, blocks);
        from += blocks * kHashBytes;
        bytes -= blocks * kHashBytes;
        continue;
      }
      const int64_t part = std::min(bytes, kHashBytes - filled_);
      std::memcpy(buffer_ + filled_, from, part);
      filled_ += part;
      from += part;
      bytes -= part;
      if (filled_ == kHashBytes) flush();
    }
  }

  Mark finish() {
    if (filled_ > 0) {
      std::memset(buffer_ + filled_, 0, kHashBytes - filled_);
      flush();
    }
    return mark_;
  }

 private:
  static constexpr int64_t kAtOnce = 8;

  void flush() {
    hash(buffer_, 1);
    filled_ = 0;
  }

  void hash(const char* from, int64_t blocks) {
    uint64_t sums[2 * kAtOnce];
    kernels(Kind::f32).hash_blocks(from, blocks, secrets().key, sums);
    for (int64_t i = 0; i < 2 * blocks; ++i) {
      chain(mark_, i % 2, sums[i] >> 32);
      chain(mark_, i % 2, sums[i] & 0xffffffff);
    }
  }

  Mark mark_{};
  int64_t filled_ = 0;
  alignas(64) char buffer_[kHashBytes];
};

// The memory of a tensor as runs of bytes without gaps, one for each index of the other dimensions.
struct Runs {
  explicit Runs(const Tensor& tensor, int64_t itemsize)
      : data(static_cast<const char*>(tensor.const_data_ptr())), bytes(itemsize) {
    struct Dim {
      int64_t size, stride;
    };
    std::vector<Dim> dims;
    for (int64_t d = 0; d < tensor.dim(); ++d)  // of an expanded dimension, one element is read
      if (tensor.size(d) > 1 && tensor.stride(d) != 0)
        dims.push_back({tensor.size(d), tensor.stride(d) * itemsize});
    std::sort(dims.begin(), dims.end(), [](Dim a, Dim b) { return a.stride < b.stride; });
    for (const Dim& dim : dims) {
      if (count == 1 && dim.stride == bytes) {
        bytes *= dim.size;
      } else {
        sizes.push_back(dim.size);
        strides.push_back(dim.stride);
        count *= dim.size;
      }
    }
    if (tensor.numel() == 0) count = 0;
  }

  const char* at(int64_t index) const {
    const char* p = data;
    for (size_t d = 0; d < sizes.size(); ++d) {
      p += index % sizes[d] * strides[d];
      index /= sizes[d];
    }
    return p;
  }

  const char* data;
  int64_t bytes, count = 1;
  std::vector<int64_t> sizes, strides;
};

void add(Mark& mark, const Tensor& tensor, const char* name) {
  storage_kind(tensor, name);
  const int64_t itemsize =
      with_type_of(tensor, name, [](auto x) { return static_cast<int64_t>(sizeof(x)); });
  Runs runs(tensor, itemsize);
  Tensor gathered = tensor;
  if (runs.bytes < kLeastRun && runs.count > 1) {
    gathered = packed(tensor);
    runs = Runs(gathered, itemsize);
  }
  // Units are parts of a run, of at most kUnitBytes; a task takes several units if they are small.
  const int64_t pieces = (runs.bytes + kUnitBytes - 1) / kUnitBytes;
  const int64_t units = runs.count * pieces;
  const int64_t per_task = std::max<int64_t>(1, kUnitBytes / runs.bytes);
  const int64_t tasks = (units + per_task - 1) / per_task;
  std::vector<Mark> marks(tasks);
  // Hashing 16 bytes costs about as much as one element of the attention.
  const int64_t cost = std::min(kUnitBytes, runs.bytes * runs.count) / 16;
  parallel(
      tasks, cost, [] { return 0; },
      [&](int64_t task, int) {
        Stream stream;
        for (int64_t unit = task * per_task; unit < std::min(units, (task + 1) * per_task);
             ++unit) {
          const int64_t begin = unit % pieces * kUnitBytes;
          stream.add(runs.at(unit / pieces) + begin, std::min(kUnitBytes, runs.bytes - begin));
        }
        marks[task] = stream.finish();
      });
  for (const Mark& part : marks)
    for (int half : {0, 1}) chain(mark, half, part[half]);
  for (int half : {0, 1}) chain(mark, half, 1);  // separates this tensor from the next
}

std::tuple<int64_t, int64_t> fingerprint(const Tensor& keys, MaybeTensor weight, MaybeTensor bias) {
  Mark mark{};
  add(mark, keys, "keys");
  if (weight.has_value()) add(mark, *weight, "weight");
  if (bias.has_value()) add(mark, *bias, "bias");
  return {static_cast<int64_t>(mark[0]), static_cast<int64_t>(mark[1])};
}

STABLE_TORCH_LIBRARY_IMPL(bahdanau_fast, CPU, m) { m.impl("fingerprint", TORCH_BOX(&fingerprint)); }

}  // namespace
}  // namespace bahdanau_fast

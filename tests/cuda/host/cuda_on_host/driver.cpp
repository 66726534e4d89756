// Runs forward and backward of csrc/cuda on the host for one kind of numbers (-DSTORED=..,
// -DSUMMED=..). Problems come in on standard input, results go out on standard output; see
// __init__.py beside this file, which speaks the same format.
#include <unistd.h>

#include "cuda/op/attend.h"

namespace {

using namespace bahdanau_fast;
using namespace bahdanau_fast::gpu;

void transfer(int file, void* data, size_t bytes, bool in) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t moved = in ? read(file, at, bytes) : write(file, at, bytes);
    if (moved <= 0) std::_Exit(in ? 0 : 1);
    at += moved;
    bytes -= size_t(moved);
  }
}

int64_t number() {
  int64_t x;
  transfer(0, &x, sizeof x, true);
  return x;
}

// A buffer of its own, exactly as large as said: what lies around it belongs to nobody.
struct Bytes {
  std::unique_ptr<char[]> data;
  int64_t size = 0;

  explicit Bytes(int64_t bytes) : data(new char[size_t(bytes)]), size(bytes) {
    std::memset(data.get(), 0xff, size_t(bytes));  // NaN: an element left unwritten shows
  }
  static Bytes sent() {
    Bytes bytes(number());
    transfer(0, bytes.data.get(), size_t(bytes.size), true);
    return bytes;
  }
  void give() const { transfer(1, data.get(), size_t(size), false); }
};

// A (B, rows, columns) tensor inside the bytes sent with it; of size 0: none.
struct Tensor {
  Bytes bytes = Bytes::sent();
  int64_t offset = number(), batch = number(), row = number();

  View view() const {
    if (bytes.size == 0) return {};
    return {bytes.data.get() + offset, batch, row};
  }
};

constexpr int kCluster = 8;  // blocks of the largest cluster

// A GPU, with counters that have to be zero again after every launch.
struct Gpu : Device {
  Bytes zeros;

  Gpu(int64_t multiprocessors, int64_t count) : zeros(count * int64_t(sizeof(unsigned))) {
    this->multiprocessors = int(multiprocessors);
    cluster = kCluster;
    std::memset(zeros.data.get(), 0, size_t(zeros.size));
    counters = count > 0 ? reinterpret_cast<unsigned*>(zeros.data.get()) : nullptr;
  }
  ~Gpu() {
    for (int64_t i = 0; i < zeros.size; ++i)
      if (zeros.data[size_t(i)] != 0) {
        std::fprintf(stderr, "a counter is left that is not zero\n");
        std::abort();
      }
  }
};

struct Request {
  int64_t backward = number(), multiprocessors = number(), wanted = number();
  Problem p;
  Tensor queries, keys, values, w, w_q, w_k, bias, lens;
  int64_t features = number(), key_features = number(), lens_type = number(), dropped = number();
  Bytes seed{int64_t(sizeof(int64_t))};

  Request() {
    transfer(0, seed.data.get(), sizeof(int64_t), true);
    p.queries = queries.view();
    p.keys = keys.view();
    p.values = values.bytes.size == 0 ? p.keys : values.view();  // none sent: they are the keys
    p.w = w.view().data;
    p.lens = {lens.bytes.data.get() + lens.offset, LenType(lens_type), lens.batch, lens.row};
    double probability;
    transfer(0, &probability, sizeof probability, true);
    p.dropout_p = probability;
    p.seed = dropped ? reinterpret_cast<int64_t*>(seed.data.get()) : nullptr;
    p.B = number();
    p.Tq = number();
    p.Tk = number();
    p.H = number();
    p.Dv = number();
  }
};

void forward(const Request& r, const Kernels& k, int64_t size, int64_t weight_size) {
  const Problem& p = r.p;
  Bytes context(p.B * p.Tq * p.Dv * size), weights(r.wanted * p.B * p.Tq * p.Tk * weight_size);
  Forward f{p};
  f.context = context.data.get();
  f.weights = r.wanted ? weights.data.get() : nullptr;
  f.w_q = r.w_q.view().data;
  f.Dq = r.features;
  f.w_k = r.w_k.view().data;
  f.bias = r.bias.view().data;
  f.Dk = r.key_features;
  const Device bare{int(r.multiprocessors), nullptr, kCluster};
  const Gpu device(r.multiprocessors, k.counters(f, bare));
  if (f.w_k != nullptr && !k.is_one_launch(f, device)) std::abort();
  Bytes workspace(k.forward_workspace(f, device));
  k.forward(f, device, workspace.data.get());
  context.give();
  weights.give();
}

void backward(const Request& r, const Kernels& k, int64_t size) {
  const Problem& p = r.p;
  const Tensor weights, grad_context, grad_weights;
  const auto wanted = [&](int64_t bit, int64_t count) {
    return Bytes(r.wanted & bit ? count * size : 0);
  };
  Bytes queries = wanted(need_queries, p.B * p.Tq * p.H);
  Bytes keys = wanted(need_keys, p.B * p.Tk * p.H);
  Bytes values = wanted(need_values, p.B * p.Tk * p.Dv), w = wanted(need_w, p.H);
  const auto place = [&](Bytes& bytes, int64_t bit) {
    return r.wanted & bit ? bytes.data.get() : nullptr;
  };
  const Backward g{{weights.bytes.data.get(), grad_context.view(), grad_weights.view(),
                    place(queries, need_queries), place(keys, need_keys),
                    place(values, need_values), place(w, need_w)},
                   p};
  const Gpu gpu(r.multiprocessors, 0);
  Bytes workspace(k.backward_workspace(g, gpu));
  k.backward(g, gpu, workspace.data.get());
  for (const Bytes* grad : {&queries, &keys, &values, &w}) grad->give();
}

}  // namespace

int main() {
  const Kernels kernels = kernels_of<STORED, SUMMED>();
  while (true) {
    const Request request;
    if (request.backward)
      backward(request, kernels, sizeof(STORED));
    else
      forward(request, kernels, sizeof(STORED), sizeof(WeightOf<STORED>::type));
  }
}

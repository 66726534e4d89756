// Tensor cores. Fragments lie over a warp as the PTX ISA draws them.
//
// Products of warpgroups (wgmma): a warp takes its 16 of the 64 rows at once; what it reads is in
// use, and its registers are nobody's, until wgmma.wait_group.
#pragma once

#include "loads.h"

namespace ptx {

// ---- mma, ldmatrix, stmatrix ----

// A fragment of `rows` x `columns` numbers (of A, C and D; of B transposed): lane l holds pairs of
// neighbouring columns in row l / 4, 8 rows and then 4 pairs further from one pair to the next.
struct Spot {
  int row, column;
};
// Number `k` of lane `l`. 8 rows by 4 pairs are a block; blocks go down the rows first.
inline Spot spot(int l, int k, int rows) {
  const int block = k / 2, down = rows / 8;
  return {l / 4 + block % down * 8, (l % 4) * 2 + block / down * 8 + k % 2};
}

// What the lanes hold of a fragment of `rows` rows, two numbers in each of `count` registers.
template <class T, int columns>
void read_fragment(Warp& w, const Operand* o, int count, int rows, double (*to)[columns]) {
  for (int l = 0; l < kLanes; ++l)
    for (int k = 0; k < 2 * count; ++k) {
      const Spot s = spot(l, k, rows);
      T x;
      x.bits = uint16_t(w.of<uint32_t>(o[k / 2])[l] >> 16 * (k % 2));
      to[s.row][s.column] = double(float(x));
    }
}

// d = a b + c of 16 by 8 by 16; sums in double, rounded once.
template <class T>
void multiply(Warp& w, const Instr& i, Mask) {
  constexpr int M = 16, N = 8, K = 16, as = 4, bs = 2, cs = 4;  // registers of a, b, and c and d
  static double a[M][K], b[N][K];
  const Operand* o = i.o.data();
  read_fragment<T>(w, o + cs, as, M, a);
  read_fragment<T>(w, o + cs + as, bs, N, b);
  for (int l = 0; l < kLanes; ++l)
    for (int k = 0; k < cs; ++k) {
      const Spot s = spot(l, k, M);
      double sum = double(w.of<float>(o[cs + as + bs + k])[l]);
      for (int x = 0; x < K; ++x) sum += a[s.row][x] * b[s.column][x];
      w.of<float>(o[k])[l] = float(sum);
    }
}

inline void resolve_mma(Form& f, Instr& i) {
  if (!f.take("sync") || !f.take("aligned") || !f.take("row") || !f.take("col")) f.unknown();
  const std::string c = f.last(), b = f.last(), a = f.last(), d = f.last();
  if (a != b || c != "f32" || d != "f32" || !f.take("m16n8k16")) f.unknown();
  i.kind = Kind::whole_warp;
  i.run = a == "bf16" ? multiply<bf16> : a == "f16" ? multiply<f16> : nullptr;
}

// ldmatrix and stmatrix: lane 8 m + r has the address of row r of matrix m, 16 bytes. Mode 1
// transposes. Calls f(number, register, half) for each number of the rows.
template <class F>
void each_half(Warp& w, const Instr& i, size_t first, uint8_t (*rows)[16], F f) {
  for (int m = 0; m < i.count; ++m)
    for (int l = 0; l < kLanes; ++l)
      for (int k = 0; k < 2; ++k) {
        const int row = i.mode ? 2 * (l % 4) + k : l / 4, column = i.mode ? l / 4 : 2 * (l % 4) + k;
        f(rows[8 * m + row] + 2 * column, w.of<uint32_t>(i.o[first + size_t(m)])[l], k);
      }
}
template <bool loads>
void matrices(Warp& w, const Instr& i, Mask) {
  uint8_t rows[kLanes][16];
  ++w.launch->time;
  if (!loads)
    each_half(w, i, 1, rows, [](uint8_t* number, const uint32_t& reg, int k) {
      const uint16_t half = uint16_t(reg >> 16 * k);
      std::memcpy(number, &half, 2);
    });
  for (int l = 0; l < 8 * i.count; ++l) {
    const uint64_t at = address_of(w, i, i.o[loads ? size_t(i.count) : 0], l);
    const Place place = loads ? to_read(w, l, i, at, 16) : to_write(w, l, i, at, 16, rows[l]);
    if (loads) std::memcpy(rows[l], place.data(), 16);
  }
  if (loads)
    each_half(w, i, 0, rows, [](const uint8_t* number, uint32_t& reg, int k) {
      uint16_t half;
      std::memcpy(&half, number, 2);
      reg = (reg & (0xffff0000u >> 16 * k)) | uint32_t(half) << 16 * k;
    });
}
template <bool loads>
void resolve_matrices(Form& f, Instr& i) {
  i.count = f.take("x4") ? 4 : f.take("x2") ? 2 : 1;
  f.take("x1");
  i.mode = f.take("trans");
  i.space = space_of(f);
  i.kind = Kind::whole_warp;
  if (f.take("sync") && f.take("aligned") && f.take("m8n8") && f.last() == "b16")
    i.run = matrices<loads>;
}

inline void add_matrix_opcodes() {
  auto& all = opcodes();
  all["mma"] = resolve_mma;
  all["ldmatrix"] = resolve_matrices<true>;
  all["stmatrix"] = resolve_matrices<false>;
}

constexpr int kGroupWarps = 4;

// ---- wgmma: registers ----

// An instruction that is no product uses its registers: not those of a product under way.
inline void use_registers(Warp& w, const Instr& i) {
  for (const Operand& o : i.o) {
    if (o.size < 2) continue;
    Use& use = w.products.of(o);
    if (use.target != 0 || use.source)
      throw Fault(w.lanes[0].id, "a register of a product that wgmma.wait_group has not awaited");
    use.touched = true;
  }
}

inline void hold(Warp& w, const Product& product, bool holds) {
  for (const Operand& o : product.targets) w.products.of(o).target = holds ? product.columns : 0;
  for (const Operand& o : product.sources) w.products.of(o).source = holds;
}

// The registers of a new product. Products of one shape may add to the same registers in turn.
inline void take_registers(Warp& w, const Product& product) {
  const auto wrong = [&](const char* what) { throw Fault(w.lanes[0].id, what); };
  bool touched = !w.products.fenced;
  for (const Operand& o : product.targets) {
    const Use& use = w.products.of(o);
    touched = touched || use.touched;
    if (use.source || (use.target != 0 && use.target != product.columns))
      wrong("an accumulator that another product still uses");
  }
  for (const Operand& o : product.sources) {
    const Use& use = w.products.of(o);
    touched = touched || use.touched;
    if (use.target != 0) wrong("a fragment that another product still computes");
  }
  if (touched) wrong("no wgmma.fence since registers of the product were used");
  hold(w, product, true);
}

// ---- wgmma: shared memory ----

// A matrix as its descriptor says: pieces of 16 bytes, which go along K, or along the rows of A
// (the columns of B) if it is transposed.
struct Layout {
  uint64_t start, across, down;
  uint64_t pieces;  // neighbours before the next `across`; more than one are swizzled

  Layout(const Warp& w, uint64_t descriptor, bool transposed) {
    const auto field = [&](int bit) { return (descriptor >> bit & 0x3fff) << 4; };
    constexpr uint64_t of_mode[] = {1, 8, 4, 2};
    start = field(0), across = field(16), down = field(32);
    pieces = of_mode[descriptor >> 62];
    if (pieces == 1 && transposed) std::swap(across, down);
    if (descriptor >> 49 & 7)
      throw Fault(w.lanes[0].id, "a matrix descriptor with a base offset is not supported");
  }
  uint64_t address(int piece, int line) const {
    const uint64_t p = uint64_t(piece), l = uint64_t(line);
    const uint64_t at =
        start + p / pieces * across + p % pieces * 16 + l / 8 * down + l % 8 * pieces * 16;
    return at ^ (at >> 7 & (pieces - 1)) << 4;
  }
};

// Whether what ordinary stores wrote to a cell can be seen by products: the thread that wrote,
// before the barrier, or the one that reads, after it, has run fence.proxy.async. Copies (cp.async)
// need none here: Triton and CUTLASS leave it out.
inline bool proxied(Warp& w, int lane, const Access& written) {
  const Launch& launch = *w.launch;
  if (written.thread == kNobody || launch.program->code[written.pc].opcode.rfind("cp.", 0) == 0)
    return true;
  const Thread& me = w.lanes[lane];
  const uint32_t theirs = written.thread % launch.block_threads;
  const Thread& writer = w.block->warps[theirs / kLanes].lanes[theirs % kLanes];
  const bool before = writer.id == me.id || writer.proxy_bars < me.bars;
  return written.time < (before ? writer.proxy_time : writer.proxy_before) ||
         written.bars < me.proxy_bars;
}

// Calls f(lane, place) for a piece and two lanes that read it for their warp: no store is by both.
template <class F>
void each_reader(Warp& w, const Instr& i, uint64_t address, F f) {
  for (int lane = 0; lane < 2; ++lane) f(lane, place_of(w, lane, i.space, address, 16));
}
template <class F>
void each_cell(const Warp& w, const Place& place, F f) {
  const uint64_t granule = uint64_t(w.launch->program->granule);
  for (uint64_t at = place.at; at < place.at + 16; at += granule)
    f(place.region->shadow.at(at / granule));
}

inline const uint8_t* read_piece(Warp& w, const Instr& i, Product& product, uint64_t address) {
  const uint8_t* found = nullptr;
  product.pieces.push_back(address);
  each_reader(w, i, address, [&](int lane, const Place& place) {
    found = place.data();
    check_known(w, lane, place, 16);
    each_cell(w, place, [&](Cell& cell) {
      if (ordered(cell.written, w, lane) && !proxied(w, lane, cell.written))
        throw Fault(w.lanes[lane].id, "wgmma reads shared memory + " + std::to_string(place.at) +
                                          " without fence.proxy.async since it was stored");
      ++cell.products;
    });
    meet(w, lane, place, 16, false, false);
  });
  return found;
}
// Once more at the end: what is stored from then on has to come after it.
inline void end_reading(Warp& w, const Instr& i, const Product& product) {
  for (const uint64_t address : product.pieces)
    each_reader(w, i, address, [&](int lane, const Place& place) {
      each_cell(w, place, [](Cell& cell) { --cell.products; });
      meet(w, lane, place, 16, false, false);
    });
}

// `lines` rows of A (columns of B) from `first` on, K numbers each.
template <class T, int K>
void read_matrix(Warp& w, const Instr& i, Product& product, uint64_t descriptor, bool transposed,
                 int first, int lines, double (*to)[K]) {
  constexpr int each = 16 / sizeof(T);
  const Layout layout(w, descriptor, transposed);
  const int along = transposed ? lines / each : K / each, others = transposed ? K : lines;
  for (int piece = 0; piece < along; ++piece)
    for (int line = 0; line < others; ++line) {
      const uint64_t address = transposed ? layout.address(first / each + piece, line)
                                          : layout.address(piece, first + line);
      const uint8_t* bytes = read_piece(w, i, product, address);
      for (int k = 0; k < each; ++k) {
        T x;
        std::memcpy(&x, bytes + size_t(k) * sizeof x, sizeof x);
        (transposed ? to[piece * each + k][line] : to[line][piece * each + k]) = double(x);
      }
    }
}

// ---- wgmma: products ----

// What all lanes have to have in common.
inline uint64_t common(Warp& w, const Operand& o) {
  const uint64_t bits = w.bits(o, 0);
  for (int l = 1; l < kLanes; ++l)
    if (w.bits(o, l) != bits) throw Fault(w.lanes[l].id, "lanes of a product that differ");
  return bits;
}

// wgmma.mma_async d, a, b, scale-d, scale-a, scale-b{, transposed a}, transposed b; mode 1: a in
// registers. Sums in double, rounded once.
template <class T>
void multiply_group(Warp& w, const Instr& i, Mask) {
  constexpr int K = 16, M = 16;
  static double a[M][K], b[256][K];
  const size_t results = size_t(i.count) / 2, a_registers = i.mode == 1 ? 4 : 1;
  const Operand *d = i.o.data(), *of_a = d + results, *of_b = of_a + a_registers, *rest = of_b + 1;
  if (size_t(w.index / kGroupWarps + 1) * kGroupWarps * kLanes > w.launch->block_threads)
    throw Fault(w.lanes[0].id, "a product of a warpgroup that is not whole");
  ++w.launch->time;
  Product product;
  product.columns = uint16_t(i.count);
  product.targets.assign(d, d + results);
  if (i.mode == 1) product.sources.assign(of_a, of_b);
  take_registers(w, product);
  const uint64_t adds = common(w, rest[0]), to_b = common(w, *of_b);
  const uint64_t to_a = i.mode == 1 ? 0 : common(w, *of_a);
  const auto transposed = [&](size_t k) { return w.bits(rest[k], 0) != 0; };
  if (i.mode == 1)
    read_fragment<T>(w, of_a, 4, M, a);
  else
    read_matrix<T>(w, i, product, to_a, transposed(3), w.index % kGroupWarps * M, M, a);
  read_matrix<T>(w, i, product, to_b, transposed(i.mode == 1 ? 3 : 4), 0, i.count, b);
  const double sign = double(int64_t(w.bits(rest[1], 0)) * int64_t(w.bits(rest[2], 0)));
  for (int l = 0; l < kLanes; ++l)
    for (int k = 0; k < int(results); ++k) {
      const Spot s = spot(l, k, M);
      double sum = adds ? double(w.of<float>(d[k])[l]) : 0.0;
      for (int x = 0; x < K; ++x) sum += sign * a[s.row][x] * b[s.column][x];
      w.of<float>(d[k])[l] = float(sum);
    }
  w.products.groups.back().push_back(std::move(product));
}

inline void fence_products(Warp& w, const Instr&, Mask) {
  for (Use& use : w.products.registers) use.touched = false;
  w.products.fenced = true;
}
inline void commit_products(Warp& w, const Instr&, Mask) { w.products.groups.emplace_back(); }
// All groups but the last n.
inline void await_products(Warp& w, const Instr& i, Mask) {
  ++w.launch->time;
  auto& groups = w.products.groups;
  const size_t open = 1 + size_t(w.bits(i.o[0], 0));
  if (groups.size() <= open) return;
  const auto end = groups.end() - std::ptrdiff_t(open);
  for (auto group = groups.begin(); group != end; ++group)
    for (const Product& product : *group) {
      hold(w, product, false);
      end_reading(w, i, product);
    }
  groups.erase(groups.begin(), end);
  for (const auto& group : groups)
    for (const Product& product : group) hold(w, product, true);
}

inline void resolve_product(Form& f, Instr& i) {
  if (!f.take("sync") || !f.take("aligned")) f.unknown();
  i.kind = Kind::whole_warp;
  i.space = Space::shared;
  if (f.take("fence")) {
    i.run = fence_products;
  } else if (f.take("commit_group")) {
    i.run = commit_products;
  } else if (f.take("wait_group")) {
    i.run = await_products;
  } else if (f.take("mma_async")) {
    const std::string b = f.last(), a = f.last(), d = f.last(), shape = f.last();
    int n = 0, k = 0;
    if (std::sscanf(shape.c_str(), "m64n%dk%d", &n, &k) != 2 || n < 8 || n > 256 || n % 8 != 0 ||
        a != b || d != "f32" || k != 16)
      f.unknown();
    i.is_product = true;
    i.count = n;
    const size_t others = i.o.size() - size_t(n) / 2;
    i.mode = others == 9 ? 1 : 0;
    if (i.mode == 0 && others != 7) f.unknown();
    i.run = a == "bf16" ? multiply_group<bf16> : a == "f16" ? multiply_group<f16> : nullptr;
  }
}

}  // namespace ptx

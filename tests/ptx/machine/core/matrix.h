// Tensor cores: mma.sync, ldmatrix, stmatrix. Fragments lie over a warp as the PTX ISA draws them.
#pragma once

#include "loads.h"

namespace ptx {

// A fragment of `rows` x `columns` numbers (of A, C and D; of B transposed): lane l holds pieces of
// neighbouring columns in row l / 4, 8 rows and then 4 pieces further from one register to the
// next.
struct Spot {
  int row, column;
};
// Number `k` of lane `l`, where `each` neighbours make up a piece. 8 rows by 4 pieces are a block;
// blocks go down the rows first.
inline Spot spot(int l, int k, int each, int rows) {
  const int block = k / each, down = rows / 8;
  return {l / 4 + block % down * 8, (l % 4) * each + block / down * 4 * each + k % each};
}

template <class T>
double number_in(Warp& w, const Operand& o, int lane, int part) {
  if constexpr (sizeof(T) == 2) {
    T x;
    x.bits = uint16_t(w.of<uint32_t>(o)[lane] >> 16 * part);
    return double(float(x));
  } else {
    return double(w.of<T>(o)[lane]);
  }
}

// What the lanes hold of a fragment of `rows` rows, `count` numbers each: `per` of them in a
// register.
template <class T, int columns>
void read_fragment(Warp& w, const Operand* o, int count, int per, int each, int rows,
                   double (*to)[columns]) {
  for (int l = 0; l < kLanes; ++l)
    for (int k = 0; k < count; ++k) {
      const Spot s = spot(l, k, each, rows);
      to[s.row][s.column] = number_in<T>(w, o[k / per], l, k % per);
    }
}

// d = a b + c of M by N by K; sums in double, rounded once.
template <class T, class C, int M, int N, int K>
void multiply(Warp& w, const Instr& i, Mask) {
  constexpr int per = sizeof(T) == 2 ? 2 : 1;  // numbers in a register of A and B
  constexpr int as = M * K / kLanes / per, bs = N * K / kLanes / per, cs = M * N / kLanes;
  constexpr int pair = 2;  // neighbours that C holds
  static double a[M][K], b[N][K], c[M][N];
  const Operand* o = i.o.data();
  read_fragment<T>(w, o + cs, as * per, per, per, M, a);
  read_fragment<T>(w, o + cs + as, bs * per, per, per, N, b);
  read_fragment<C>(w, o + cs + as + bs, cs, 1, pair, M, c);
  for (int l = 0; l < kLanes; ++l)
    for (int k = 0; k < cs; ++k) {
      const Spot s = spot(l, k, pair, M);
      double sum = c[s.row][s.column];
      for (int x = 0; x < K; ++x) sum += a[s.row][x] * b[s.column][x];
      w.of<C>(o[k])[l] = C(sum);
    }
}

inline void resolve_mma(Form& f, Instr& i) {
  if (!f.take("sync") || !f.take("aligned") || !f.take("row") || !f.take("col")) f.unknown();
  const std::string c = f.last(), b = f.last(), a = f.last(), d = f.last(), shape = f.last();
  if (a != b || c != d) f.unknown();
  i.kind = Kind::whole_warp;
  const std::string form = shape + " " + a + " " + c;
  static const std::map<std::string, Run> all = {
      {"m16n8k16 bf16 f32", multiply<bf16, float, 16, 8, 16>},
      {"m16n8k16 f16 f32", multiply<f16, float, 16, 8, 16>},
      {"m8n8k4 f64 f64", multiply<double, double, 8, 8, 4>},
  };
  const auto known = all.find(form);
  if (known != all.end()) i.run = known->second;
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
  Request request;
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
    request.add(place);
  }
  if (loads)
    each_half(w, i, 0, rows, [](const uint8_t* number, uint32_t& reg, int k) {
      uint16_t half;
      std::memcpy(&half, number, 2);
      reg = (reg & (0xffff0000u >> 16 * k)) | uint32_t(half) << 16 * k;
    });
  request.count(*w.launch, 16);
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

}  // namespace ptx

// Beside tests/cuda/host/cuda_on_host/driver.cpp, in the place of the header of the same name
// there: launches go to the PTX machine, through two pipes, instead of to fibers. The launchers of
// csrc/cuda/op/attend.h thus compute the arguments; see driven.py.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>

// What the driver has allocated with new char[] is global memory.
namespace bahdanau_fast::host {

struct Piece {
  int64_t serial, bytes, filled;
  bool sent = false;
};
inline std::map<void*, Piece>& pieces() {
  static std::map<void*, Piece> all;
  return all;
}
inline void* piece(size_t bytes) {
  static int64_t serial = 0;
  // Aligned as a GPU's allocators do, with something nobody owns behind each.
  void* at = std::aligned_alloc(256, (bytes + 64 + 255) / 256 * 256);
  if (at == nullptr) throw std::bad_alloc();
  pieces()[at] = {serial++, int64_t(bytes), 0};
  return at;
}
// Says that what lies there was given, and is not what an allocation happens to hold.
inline void filled(void* at, int64_t) { pieces().at(at).filled = 1; }

}  // namespace bahdanau_fast::host

inline void* operator new[](size_t bytes) { return bahdanau_fast::host::piece(bytes); }
inline void operator delete[](void* at) noexcept {
  bahdanau_fast::host::pieces().erase(at);
  std::free(at);
}
inline void operator delete[](void* at, size_t) noexcept { operator delete[](at); }

#define filled filled_on_fibers
#define launch launch_on_fibers
#define fill_zero fill_zero_on_fibers
#include_next "device_on_host.h"
#undef filled
#undef launch
#undef fill_zero

namespace bahdanau_fast::gpu {

constexpr int kToMachine = 3, kFromMachine = 4;

inline void exchange_with_machine(void* data, size_t bytes, bool in) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t moved = in ? read(kFromMachine, at, bytes) : write(kToMachine, at, bytes);
    if (moved <= 0) std::_Exit(1);
    at += moved;
    bytes -= size_t(moved);
  }
}
// Whether memory stays in the machine: what was given is sent once, and nothing comes back. The
// driver's results are then not the kernels'.
inline bool machine_keeps() {
  static const bool keeps = std::getenv("PTX_MACHINE_KEEPS") != nullptr;
  return keeps;
}
inline void tell(int64_t x) { exchange_with_machine(&x, sizeof x, false); }

template <class P>
void launch(void (*kernel)(P), const Launch& at, const P& p) {
  if (at.blocks <= 0) return;
  check_blocks(at);
  Dl_info symbol{};
  dladdr(reinterpret_cast<void*>(kernel), &symbol);
  const std::string name = symbol.dli_sname == nullptr ? at.name : symbol.dli_sname;
  for (const int64_t x : {int64_t(name.size()), at.blocks, int64_t(at.threads), at.shared,
                          int64_t(at.cluster), int64_t(sizeof p), int64_t(host::pieces().size())})
    tell(x);
  exchange_with_machine(const_cast<char*>(name.data()), name.size(), false);
  P copy = p;
  exchange_with_machine(&copy, sizeof copy, false);
  for (auto& [address, piece] : host::pieces()) {
    for (const int64_t x :
         {piece.serial, int64_t(reinterpret_cast<uintptr_t>(address)), piece.bytes, piece.filled})
      tell(x);
    if (machine_keeps() && (!piece.filled || piece.sent)) continue;
    exchange_with_machine(address, size_t(piece.bytes), false);
    piece.sent = true;
  }
  if (machine_keeps()) {
    char done;
    return exchange_with_machine(&done, 1, true);
  }
  for (auto& [address, piece] : host::pieces())
    exchange_with_machine(address, size_t(piece.bytes), true);
}

// A launch without a kernel: the machine notes that the bytes are zero.
inline void fill_zero(void* p, int64_t bytes, void*) {
  std::memset(p, 0, size_t(bytes));
  for (const int64_t x : {int64_t(0), int64_t(reinterpret_cast<uintptr_t>(p)), bytes, int64_t(0),
                          int64_t(0), int64_t(0), int64_t(0)})
    tell(x);
}

}  // namespace bahdanau_fast::gpu

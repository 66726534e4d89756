// Threads, warps and blocks while they run.
#pragma once

#include <cmath>
#include <memory>
#include <unordered_map>

#include "program.h"

namespace ptx {

struct Block;
struct Launch;
struct Region;

// What fences have made visible: everything that a thread did up to a time, a block before its
// barrier of a number, and a cluster before its wait of a number.
enum class By : uint8_t { thread, block, cluster };
class Known {
  std::unordered_map<uint64_t, uint32_t> all_;

 public:
  void add(By by, uint32_t of, uint32_t until) {
    uint32_t& here = all_[uint64_t(by) << 32 | of];
    here = std::max(here, until);
  }
  bool has(By by, uint32_t of, uint32_t now) const {
    const auto found = all_.find(uint64_t(by) << 32 | of);
    return found != all_.end() && now < found->second;
  }
  void add(const Known& others) {
    for (const auto& [of, until] : others.all_) all_[of] = std::max(all_[of], until);
  }
  void clear() { all_.clear(); }
};

// A copy from global to shared memory that is under way.
struct Copy {
  uint64_t to;
  std::vector<uint8_t> bytes;
};

// A product of a warp (wgmma) that is under way: its registers, and where it reads shared memory.
struct Product {
  uint16_t columns = 0;
  std::vector<Operand> targets, sources;
  std::vector<uint64_t> pieces;
};
// Of a register: the columns of the product that computes it, whether one reads it, and whether
// another instruction has used it since the last wgmma.fence.
struct Use {
  uint16_t target = 0;
  bool source = false, touched = false;
};
struct Products {
  std::vector<std::vector<Product>> groups{1};  // the open one last
  std::vector<Use> registers;
  bool fenced = false;

  Use& of(const Operand& o) { return registers[o.slot / 8]; }
};

enum class Wait : uint8_t { no, lanes, barrier, cluster, forever };

struct Thread {
  uint32_t id = 0, pc = 0;
  Wait waits_for = Wait::no;
  // Barriers of the block, cluster barriers arrived at and passed; passed with the last of those
  // that order memory; whether the last arrival was relaxed.
  uint32_t bars = 0, arrives = 0, waits = 0, ordered = 0;
  bool relaxed = false;
  // Its last fence.proxy.async: when, past how many barriers; and when the last one before those.
  uint32_t proxy_time = 0, proxy_bars = 0, proxy_before = 0;
  Known fenced, known, seen;              // `seen` by an atomic operation, but no fence came since
  std::vector<std::vector<Copy>> copies;  // by group, the open one last
};

// What a load that looks for others' work found.
struct Look {
  uint32_t pc = 0;
  const Region* region = nullptr;
  uint64_t at = 0, bits = 0;
  bool operator==(const Look&) const = default;
};

struct Warp {
  Block* block = nullptr;
  Launch* launch = nullptr;
  int index = 0, size = kLanes;  // threads
  uint8_t* file = nullptr;
  Thread lanes[kLanes];
  Products products;
  Look last_look;
  bool found_the_same = false;  // when it looked last

  void look(const Look& found) {
    found_the_same = found == last_look;
    last_look = found;
  }

  template <class T>
  T* of(const Operand& o) {
    constexpr uint32_t at = sizeof(T) == 2 ? 0 : sizeof(T) == 4 ? kConstant4 : kConstant8;
    return reinterpret_cast<T*>(file + o.slot + (o.size == 0 ? at : 0));
  }
  Mask& predicate(const Operand& o) {
    return *reinterpret_cast<Mask*>(file + o.slot + (o.size == 0 ? kConstantMask : 0));
  }
  void set_predicate(const Operand& o, Mask lanes, Mask x) {
    Mask& d = predicate(o);
    d = (d & ~lanes) | (x & lanes);
  }
  // The bits of a register of any size.
  uint64_t bits(const Operand& o, int lane) {
    if (o.size == 8 || o.size == 0) return of<uint64_t>(o)[lane];
    if (o.size == 4) return of<uint32_t>(o)[lane];
    if (o.size == 2) return of<uint16_t>(o)[lane];
    return predicate(o) >> lane & 1;
  }
  void set_bits(const Operand& o, int lane, uint64_t bits) {
    if (o.size == 8) of<uint64_t>(o)[lane] = bits;
    if (o.size == 4) of<uint32_t>(o)[lane] = uint32_t(bits);
    if (o.size == 2) of<uint16_t>(o)[lane] = uint16_t(bits);
  }
};

// Calls f(lane) for the lanes of a mask.
template <class F>
inline void each(Mask mask, F f) {
  if (mask == kAll)
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
  else
    for (; mask != 0; mask &= mask - 1) f(__builtin_ctz(mask));
}

// Says which thread of which block it was; machine.cpp adds the instruction.
struct Fault : std::runtime_error {
  uint32_t thread;
  Fault(uint32_t id, const std::string& what) : std::runtime_error(what), thread(id) {}
};

template <class To, class From>
To cast(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof x);
  return y;
}

// ---- storage types ----

struct f16 {
  uint16_t bits;
  f16() = default;
  explicit f16(float x) : bits(cast<uint16_t>(_Float16(x))) {}
  operator float() const { return float(cast<_Float16>(bits)); }
};

struct bf16 {
  uint16_t bits;
  bf16() = default;
  explicit bf16(float x) {
    const uint32_t all = cast<uint32_t>(x);
    bits = x != x ? 0x7fff : uint16_t((all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  operator float() const { return cast<float>(uint32_t(bits) << 16); }
};

template <class T>
constexpr bool is_half = false;
template <>
inline constexpr bool is_half<f16> = true;
template <>
inline constexpr bool is_half<bf16> = true;

}  // namespace ptx

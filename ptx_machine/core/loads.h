// Loads, stores, atomic operations and copies.
#pragma once

#include "floats.h"
#include "memory.h"

namespace ptx {

inline uint64_t address_of(Warp& w, const Instr& i, const Operand& o, int lane) {
  return w.bits(o, lane) + uint64_t(i.offset);
}

inline uint64_t extended(uint64_t bits, int width, bool is_signed) {
  const int unused = 64 - 8 * width;
  return is_signed ? uint64_t(int64_t(bits << unused) >> unused) : bits << unused >> unused;
}

// A fence, or a release: what came before it, also to those whom it was made visible to.
inline void release(Warp& w, int lane, Known& to) {
  const Thread& me = w.lanes[lane];
  to.add(By::thread, me.id, w.launch->time + 1);
  to.add(By::block, w.block->index, me.bars);
  to.add(By::cluster, w.block->cluster, me.ordered);
  to.add(me.known);
  to.add(w.block->known);
}
// A fence of all of the GPU.
inline void fence(Warp& w, int lane) {
  Thread& me = w.lanes[lane];
  me.known.add(me.seen);
  me.seen.clear();
  release(w, lane, me.fenced);
}
// At an atomic operation: from its place on can be acquired what was fenced before, and all if it
// releases itself.
inline void publish(Warp& w, int lane, const Instr& i, const Place& place) {
  Known& here = w.launch->released[place.data()];
  here.add(w.lanes[lane].fenced);
  here.add(w.block->fenced);
  if (i.releases) release(w, lane, here);
}
// What was published there is known at once, or from the next fence on.
inline void acquire(Warp& w, int lane, const Instr& i, const Place& place) {
  Thread& me = w.lanes[lane];
  (i.acquires ? me.known : me.seen).add(w.launch->released[place.data()]);
}

// A strong load looks for others' work; where a warp's first lane finds what it found before, it is
// the others' turn.
template <bool strong>
void load(Warp& w, const Instr& i, Mask mask) {
  const uint64_t all = uint64_t(i.width) * i.count;
  const int first = __builtin_ctz(mask);
  ++w.launch->time;
  each(mask, [&](int l) {
    const Place from = to_read(w, l, i, address_of(w, i, i.o[i.count], l), all);
    uint64_t bits = 0;
    for (int k = 0; k < i.count; ++k) {
      bits = 0;
      std::memcpy(&bits, from.data() + k * i.width, size_t(i.width));
      w.set_bits(i.o[k], l, extended(bits, i.width, i.is_signed));
    }
    if constexpr (strong) {
      acquire(w, l, i, from);
      if (l == first) w.look({i.pc, from.region, from.at, bits});
    }
  });
}

inline void load_param(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const uint64_t at = address_of(w, i, i.o[i.count], l) - kParam;
    if (at + uint64_t(i.width) * i.count > w.launch->params_bytes)
      throw Fault(w.lanes[l].id, "read past the parameters");
    for (int k = 0; k < i.count; ++k) {
      uint64_t bits = 0;
      std::memcpy(&bits, w.launch->params + at + k * i.width, size_t(i.width));
      w.set_bits(i.o[k], l, extended(bits, i.width, i.is_signed));
    }
  });
}

inline void store(Warp& w, const Instr& i, Mask mask) {
  const uint64_t all = uint64_t(i.width) * i.count;
  ++w.launch->time;
  each(mask, [&](int l) {
    const uint64_t address = address_of(w, i, i.o[0], l);
    uint8_t bytes[64];
    for (int k = 0; k < i.count; ++k) {
      const uint64_t bits = w.bits(i.o[1 + k], l);
      std::memcpy(bytes + k * i.width, &bits, size_t(i.width));
    }
    to_write(w, l, i, address, all, bytes);
  });
}

inline Space space_of(Form& f) {
  static const Space spaces[] = {Space::global, Space::shared, Space::shared, Space::param};
  const int at = f.one_of({"global", "shared", "shared::cta", "param"});
  return at < 0 ? Space::generic : spaces[at];
}

inline void resolve_load(Form& f, Instr& i) {
  i.constant = f.take("nc");
  f.one_of({"ca", "cg"});
  i.acquires = f.take("acquire");
  const bool scoped = i.acquires || f.take("relaxed");
  if (scoped && !f.take("gpu")) f.unknown();
  i.strong = scoped || f.take("volatile");
  if (i.strong) i.kind = Kind::look;
}
inline void resolve_access(Form& f, Instr& i, bool loads) {
  i.space = space_of(f);
  if (loads) resolve_load(f, i);
  i.count = f.take("v2") ? 2 : f.take("v4") ? 4 : 1;
  const std::string type = f.last();
  i.width = bits_of(type) / 8;
  i.is_signed = type[0] == 's';
  if (i.space == Space::param)
    i.run = loads ? load_param : nullptr;
  else
    i.run = !loads ? store : i.strong ? load<true> : load<false>;
}

// ---- atomic operations ----

// atom d, [a], b and red [a], b, for all of the GPU.
template <class F, class T>
void atomic(Warp& w, const Instr& i, Mask mask) {
  const bool gives = i.o.size() == 3;
  ++w.launch->time;
  each(mask, [&](int l) {
    const Place at = place_of(w, l, i.space, address_of(w, i, i.o[gives], l), sizeof(T));
    publish(w, l, i, at);
    check_known(w, l, at, sizeof(T));
    touch(w, l, at, sizeof(T), true, false);
    meet(w, l, at, sizeof(T), true, true);
    acquire(w, l, i, at);
    T old;
    std::memcpy(&old, at.data(), sizeof old);
    const T next = F()(old, read<T>(w, i.o[gives + 1], l));
    std::memcpy(at.data(), &next, sizeof next);
    if (gives) write<T>(w, i.o[0], l, old);
  });
}

inline void resolve_atomic(Form& f, Instr& i) {
  const bool both = f.take("acq_rel");
  i.acquires = f.take("acquire") || both;
  i.releases = f.take("release") || both;
  f.take("relaxed");
  f.take("gpu");
  i.space = space_of(f);
  const std::string type = f.last();
  if (f.take("add") && type == "u32") i.run = atomic<Add, uint32_t>;
  if (f.take("max") && type == "u64") i.run = atomic<Max, uint64_t>;
}

// ---- cp.async ----

// cp.async to, from, bytes{, bytes from memory}: what is left of `bytes` is zero. The bytes arrive
// at the wait; until then they are as good as never written.
inline void copy_async(Warp& w, const Instr& i, Mask mask) {
  ++w.launch->time;
  Instr from = i, to = i;
  from.space = Space::global;
  to.space = Space::shared;
  to.offset = 0;
  const int width = int(w.bits(i.o[2], __builtin_ctz(mask)));
  each(mask, [&](int l) {
    const uint64_t source = w.bits(i.o[1], l) + uint64_t(i.second_offset);
    const uint64_t target = address_of(w, i, i.o[0], l);
    const uint64_t size = i.o.size() > 3 ? w.bits(i.o[3], l) : uint64_t(width);
    Copy copy{target, std::vector<uint8_t>(size_t(width))};
    if (size > uint64_t(width)) throw Fault(w.lanes[l].id, "cp.async of more bytes than it has");
    if (source % width != 0) throw Fault(w.lanes[l].id, "misaligned cp.async");
    for (uint64_t k = 0; k < size; ++k) copy.bytes[k] = *to_read(w, l, from, source + k, 1).data();
    const Place place = to_write(w, l, to, target, uint64_t(width));
    std::memset(place.region->known + place.at, 0, size_t(width));
    auto& groups = w.lanes[l].copies;
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(copy);
  });
}
inline void copy_commit(Warp& w, const Instr&, Mask mask) {
  each(mask, [&](int l) {
    auto& groups = w.lanes[l].copies;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
  });
}
// All groups but the last n.
inline void copy_wait(Warp& w, const Instr& i, Mask mask) {
  ++w.launch->time;
  Instr to = i;
  to.space = Space::shared;
  each(mask, [&](int l) {
    auto& groups = w.lanes[l].copies;
    const size_t open = 1 + size_t(w.bits(i.o[0], l));
    while (groups.size() > open) {
      for (const Copy& copy : groups.front()) {
        const Place place = to_write(w, l, to, copy.to, copy.bytes.size());
        std::memcpy(place.data(), copy.bytes.data(), copy.bytes.size());
      }
      groups.erase(groups.begin());
    }
  });
}

inline void resolve_cp(Form& f, Instr& i) {
  if (!f.take("async")) f.unknown();
  if (f.take("commit_group")) {
    i.run = copy_commit;
  } else if (f.take("wait_group")) {
    i.run = copy_wait;
  } else {
    f.one_of({"ca", "cg"});
    if (!f.take("shared") || !f.take("global") || i.o.size() < 3) f.unknown();
    i.run = copy_async;
  }
}

// ---- addresses ----

// cvta between a space and the generic one; global addresses are generic ones.
inline void convert_address(Warp& w, const Instr& i, Mask mask) {
  const uint64_t window = i.space == Space::shared ? kWindow : 0;
  each(mask, [&](int l) { w.set_bits(i.o[0], l, w.bits(i.o[1], l) + window); });
}
inline void resolve_cvta(Form& f, Instr& i) {
  const bool to = f.take("to");
  i.space = space_of(f);
  f.last();
  if (i.space == Space::global || (i.space == Space::shared && !to)) i.run = convert_address;
}
// The same place in the shared memory of another block of the cluster.
inline void map_address(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const uint64_t address = w.bits(i.o[1], l), rank = w.bits(i.o[2], l);
    if (rank >= w.block->mates->size())
      throw Fault(w.lanes[l].id, "mapa of block " + std::to_string(rank) + " of a cluster of " +
                                     std::to_string(w.block->mates->size()));
    w.set_bits(i.o[0], l, kWindow + ((rank + 1) << 24) + ((address - kWindow) & 0xffffff));
  });
}

inline void add_memory_opcodes() {
  auto& all = opcodes();
  all["ld"] = [](Form& f, Instr& i) { resolve_access(f, i, true); };
  all["st"] = [](Form& f, Instr& i) { resolve_access(f, i, false); };
  all["atom"] = all["red"] = resolve_atomic;
  all["cp"] = resolve_cp;
  all["cvt"] = resolve_cvt;
  all["cvta"] = resolve_cvta;
  all["mapa"] = [](Form& f, Instr& i) {
    if (f.last() == "u64") i.run = map_address;  // of a generic address
  };
}

}  // namespace ptx

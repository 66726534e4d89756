// Loads, stores, atomic operations and copies.
#pragma once

#include "arithmetic/convert.h"
#include "memory.h"

namespace ptx {

inline uint64_t address_of(Warp& w, const Instr& i, const Operand& o, int lane) {
  return w.bits(o, lane) + uint64_t(i.offset);
}

inline uint64_t extended(uint64_t bits, int width, bool is_signed) {
  const int unused = 64 - 8 * width;
  if (unused == 0) return bits;
  return is_signed ? uint64_t(int64_t(bits << unused) >> unused) : bits << unused >> unused;
}

inline void load(Warp& w, const Instr& i, Mask mask) {
  const uint64_t all = uint64_t(i.width) * i.count;
  ++w.launch->time;
  Request request;
  each(mask, [&](int l) {
    const uint64_t address = address_of(w, i, i.o[i.count], l);
    const Place from = to_read(w, l, i, address, all);
    for (int k = 0; k < i.count; ++k) {
      uint64_t bits = 0;
      std::memcpy(&bits, from.data() + k * i.width, size_t(i.width));
      w.set_bits(i.o[k], l, extended(bits, i.width, i.is_signed));
    }
    if (i.acquires) w.lanes[l].known.add(w.launch->released[address]);
    if (w.launch->counts) {
      request.add(from);
      if (from.region->space == Space::shared)
        w.depth_now = std::max(w.depth_now,
                               from.region->shadow.at(from.at / w.launch->program->granule).depth);
      else if (from.region->space == Space::global)
        w.depth_now |= 0x8000;
    }
  });
  request.count(*w.launch, all);
}

inline void load_param(Warp& w, const Instr& i, Mask mask) {
  const auto& params = w.launch->params;
  each(mask, [&](int l) {
    const uint64_t at = address_of(w, i, i.o[i.count], l) - kParam;
    if (at + uint64_t(i.width) * i.count > params.size())
      throw Fault(w.lanes[l].id, "read past the parameters");
    for (int k = 0; k < i.count; ++k) {
      uint64_t bits = 0;
      std::memcpy(&bits, params.data() + at + k * i.width, size_t(i.width));
      w.set_bits(i.o[k], l, extended(bits, i.width, i.is_signed));
    }
  });
}

// A fence of all of the GPU: what came before it can be released.
inline void fence(Warp& w, int lane) {
  Thread& me = w.lanes[lane];
  me.fenced.time_of_thread[me.id] = w.launch->time + 1;
  me.fenced.bars_of_block[w.block->index] = me.bars;
  me.fenced.waits_of_cluster[w.block->cluster] = me.waits;
  me.known.add(me.seen);
  me.seen.clear();
  me.fenced.add(me.known);
  me.fenced.add(w.block->known);
}
// At an atomic operation: what was fenced before can be acquired from this address on.
inline void publish(Warp& w, int lane, uint64_t address, bool releases) {
  if (releases) fence(w, lane);
  Known& here = w.launch->released[address];
  here.add(w.lanes[lane].fenced);
  here.add(w.block->fenced);
}

inline void store(Warp& w, const Instr& i, Mask mask) {
  const uint64_t all = uint64_t(i.width) * i.count;
  ++w.launch->time;
  Request request;
  each(mask, [&](int l) {
    const uint64_t address = address_of(w, i, i.o[0], l);
    if (i.atomic) publish(w, l, address, i.releases);
    uint8_t bytes[64];
    for (int k = 0; k < i.count; ++k) {
      const uint64_t bits = w.bits(i.o[1 + k], l);
      std::memcpy(bytes + k * i.width, &bits, size_t(i.width));
    }
    const Place to = to_write(w, l, i, address, all, bytes);
    if (w.launch->counts) {
      request.add(to);
      if (to.region->space == Space::shared)
        for (uint64_t b = 0; b < all; b += w.launch->program->granule)
          to.region->shadow.at((to.at + b) / w.launch->program->granule).depth = w.depth_now;
    }
  });
  request.count(*w.launch, all);
}

inline Space space_of(Form& f) {
  if (f.take("shared::cluster")) return Space::cluster;
  static const Space spaces[] = {Space::global, Space::shared, Space::shared,
                                 Space::param,  Space::param,  Space::local};
  const int at = f.one_of({"global", "shared", "shared::cta", "param", "param::entry", "local"});
  return at < 0 ? Space::generic : spaces[at];
}
inline void skip_cache_hints(Form& f) {
  for (const char* hint :
       {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_last", "L1::evict_first",
        "L1::no_allocate", "L1::evict_normal", "L2::128B", "L2::256B", "L2::64B"})
    f.take(hint);
  if (f.take("L2::cache_hint")) f.unknown();
}
inline bool skip_scope(Form& f) {
  return f.one_of({"gpu", "sys", "cluster"}) >= 0 || !f.take("cta");
}

inline void resolve_access(Form& f, Instr& i, bool loads) {
  i.space = space_of(f);
  i.constant = loads && f.take("nc");
  const bool released = f.take("release"), acquired = f.take("acquire");
  const bool relaxed = f.take("relaxed"), is_volatile = f.take("volatile");
  i.atomic = released || acquired || relaxed || is_volatile;
  if (i.atomic && !is_volatile) skip_scope(f);
  i.acquires = acquired;
  i.releases = released;
  skip_cache_hints(f);
  i.count = f.take("v2") ? 2 : f.take("v4") ? 4 : f.take("v8") ? 8 : 1;
  const std::string type = f.last();
  i.width = bits_of(type) / 8;
  i.is_signed = type[0] == 's';
  if (i.space == Space::param)
    i.run = loads ? load_param : nullptr;
  else
    i.run = loads ? load : store;
}

// ---- atomic operations ----

using Exchange = decltype([]<class T>(T, T b) { return b; });
using Increment = decltype([]<class T>(T a, T b) { return a >= b ? T(0) : T(a + 1); });
using Decrement = decltype([]<class T>(T a, T b) { return a == 0 || a > b ? b : T(a - 1); });

// mode 0: a result is wanted (atom), 1: none is (red).
template <class T, class F>
void atomic(Warp& w, const Instr& i, Mask mask) {
  const size_t first = i.mode == 0 ? 1 : 0;
  ++w.launch->time;
  each(mask, [&](int l) {
    const uint64_t address = address_of(w, i, i.o[first], l);
    publish(w, l, address, i.releases);
    const Place at = place_of(w, l, i.space, address, sizeof(T));
    check_known(w, l, at, sizeof(T));
    touch(w, l, at, sizeof(T), true, false);
    if (w.launch->checks_races) meet(w, l, at, sizeof(T), true, true);
    Thread& me = w.lanes[l];
    (i.acquires ? me.known : me.seen).add(w.launch->released[address]);
    T old, next;
    std::memcpy(&old, at.data(), sizeof old);
    const T b = read<T>(w, i.o[first + 1], l);
    if constexpr (std::is_same_v<F, void>)
      next = std::memcmp(&old, &b, sizeof b) == 0 ? read<T>(w, i.o[first + 2], l) : old;
    else
      next = F()(old, b);
    std::memcpy(at.data(), &next, sizeof next);
    if (i.mode == 0) write<T>(w, i.o[0], l, old);
    if (w.launch->counts && at.region->space == Space::global) w.depth_now |= 0x8000;
  });
}

template <class F>
bool atomic_integer(const std::string& type, Instr& i) {
  return with_integer(type, [&](auto t) { i.run = atomic<decltype(t), F>; });
}

inline void resolve_atomic(Form& f, Instr& i) {
  i.space = space_of(f);
  const int order = f.one_of({"relaxed", "acquire", "release", "acq_rel"});
  i.acquires = order == 1 || order == 3;
  i.releases = order >= 2;
  skip_scope(f);
  f.take("noftz");
  static constexpr bool (*integers[])(const std::string&, Instr&) = {
      atomic_integer<Add>,      atomic_integer<Exchange>, atomic_integer<Min>,
      atomic_integer<Max>,      atomic_integer<And>,      atomic_integer<Or>,
      atomic_integer<Xor>,      atomic_integer<void>,     atomic_integer<Increment>,
      atomic_integer<Decrement>};
  const int which =
      f.one_of({"add", "exch", "min", "max", "and", "or", "xor", "cas", "inc", "dec"});
  const std::string type = f.last();
  i.atomic = true;
  if (which < 0) f.unknown();
  if (type.find('f') == std::string::npos)
    integers[which](type, i);
  else if (which == 0)
    with_float(type, [&](auto t) { i.run = atomic<decltype(t), Lifted<FAdd>>; });
}

// ---- cp.async ----

// cp.async to, from, bytes{, bytes from memory}: what is left of `bytes` is zero. The bytes arrive
// at the wait; until then they are as good as never written.
inline void copy_async(Warp& w, const Instr& i, Mask mask) {
  ++w.launch->time;
  Request request;
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
    if (size > 0) {
      for (uint64_t k = 0; k < size; ++k)
        copy.bytes[k] = *to_read(w, l, from, source + k, 1).data();
      request.add(place_of(w, l, Space::global, source, 1));
    }
    const Place place = to_write(w, l, to, target, uint64_t(width));
    std::memset(place.region->known + place.at, 0, size_t(width));
    auto& groups = w.lanes[l].copies;
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(copy);
  });
  request.count(*w.launch, uint64_t(width));
}
inline void copy_commit(Warp& w, const Instr&, Mask mask) {
  each(mask, [&](int l) {
    auto& groups = w.lanes[l].copies;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
  });
}
// All groups but the last n; mode 1: everything.
inline void copy_wait(Warp& w, const Instr& i, Mask mask) {
  ++w.launch->time;
  Instr to = i;
  to.space = Space::shared;
  each(mask, [&](int l) {
    auto& groups = w.lanes[l].copies;
    const size_t open = i.mode == 1 ? 0 : 1 + size_t(w.bits(i.o[0], l));
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
  } else if (f.take("wait_all")) {
    i.mode = 1;
    i.run = copy_wait;
  } else if (f.take("wait_group")) {
    i.run = copy_wait;
  } else {
    skip_cache_hints(f);
    f.take("shared");
    f.take("shared::cta");
    if (!f.take("global") || i.o.size() < 3) f.unknown();
    i.run = copy_async;
  }
}

// ---- addresses ----

// cvta between a space and the generic one; global addresses are generic ones. mode 1: to generic,
// 2: to shared, 0: nothing to do.
inline void convert_address(Warp& w, const Instr& i, Mask mask) {
  const uint64_t window = i.space == Space::local ? kLocalWindow : kWindow;
  each(mask, [&](int l) {
    const uint64_t address = w.bits(i.o[1], l) + uint64_t(i.offset);
    w.set_bits(i.o[0], l,
               i.mode == 1   ? address + window
               : i.mode == 2 ? address - window
                             : address);
  });
}
inline void resolve_cvta(Form& f, Instr& i) {
  const bool to = f.take("to");
  i.space = space_of(f);
  f.last();
  const bool here =
      i.space == Space::shared || i.space == Space::cluster || i.space == Space::local;
  i.mode = !here ? 0 : to ? 2 : 1;
  i.run = convert_address;
}
// The same place in the shared memory of another block of the cluster.
inline void map_address(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    const uint64_t address = w.bits(i.o[1], l), rank = w.bits(i.o[2], l);
    const uint64_t window = i.space == Space::generic ? kWindow : 0;
    if (rank >= w.block->mates->size())
      throw Fault(w.lanes[l].id, "mapa of block " + std::to_string(rank) + " of a cluster of " +
                                     std::to_string(w.block->mates->size()));
    w.set_bits(i.o[0], l, window + ((rank + 1) << 24) + ((address - window) & 0xffffff));
  });
}

inline void add_memory_opcodes() {
  auto& all = opcodes();
  all["ld"] = [](Form& f, Instr& i) { resolve_access(f, i, true); };
  all["ldu"] = all["ld"];
  all["st"] = [](Form& f, Instr& i) { resolve_access(f, i, false); };
  all["atom"] = resolve_atomic;
  all["red"] = [](Form& f, Instr& i) {
    i.mode = 1;
    resolve_atomic(f, i);
  };
  all["cp"] = resolve_cp;
  all["cvt"] = resolve_cvt;
  all["cvta"] = resolve_cvta;
  all["mapa"] = [](Form& f, Instr& i) {
    i.space = space_of(f);
    f.last();
    i.run = map_address;
  };
}

}  // namespace ptx

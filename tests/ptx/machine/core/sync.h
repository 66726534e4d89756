// Barriers, fences and what the lanes of a warp do together.
#pragma once

#include "loads.h"

namespace ptx {

inline void nothing(Warp&, const Instr&, Mask) {}

// ---- barriers and fences ----

// What a barrier reduces: kinds 1 or, 2 and, 3 popc in `mode`.
inline void vote_at_barrier(Warp& w, const Instr& i, Mask mask) {
  if (i.mode == 0) return;
  const Mask yes = w.predicate(i.o.back()) & mask;
  if (yes != 0) w.block->votes |= 1;
  if (yes != mask) w.block->votes |= 2;
  w.block->voters += uint32_t(__builtin_popcount(yes));
}
inline void give_votes(Warp& w, const Instr& i, Mask mask) {
  if (i.mode == 3) {
    each(mask, [&](int l) { w.set_bits(i.o[0], l, w.block->voters); });
  } else if (i.mode > 0) {
    const bool result = i.mode == 1 ? w.block->votes & 1 : !(w.block->votes & 2);
    Mask& d = w.predicate(i.o[0]);
    d = result ? d | mask : d & ~mask;
  }
}

inline void arrive_at_cluster(Warp& w, const Instr&, Mask mask) {
  each(mask, [&](int l) {
    Thread& me = w.lanes[l];
    if (me.arrives > me.waits) throw Fault(me.id, "barrier.cluster.arrive twice without a wait");
    ++me.arrives;
  });
}

inline void resolve_barrier(Form& f, Instr& i) {
  if (f.take("cluster")) {
    f.take("aligned");
    if (f.take("arrive")) {
      f.take("release");
      i.run = arrive_at_cluster;
    } else if (f.take("wait")) {
      f.take("acquire");
      i.kind = Kind::cluster_wait;
      i.run = nothing;
    }
    return;
  }
  f.take("cta");
  if (f.take("warp")) {
    if (!f.take("sync")) f.unknown();
    i.kind = Kind::collective;
    i.run = [](Warp& w, const Instr&, Mask mask) {
      // Orders the whole warp or nothing.
      if (__builtin_popcount(mask) == w.size) each(mask, [&](int l) { ++w.lanes[l].syncs; });
    };
    return;
  }
  f.take("aligned");
  i.kind = Kind::barrier;
  i.run = vote_at_barrier;
  if (f.take("sync")) {
    i.mode = 0;
    return;
  }
  if (!f.take("red")) f.unknown();
  i.mode = 1 + f.one_of({"or", "and", "popc"});
  f.last();
}

inline void fence_all(Warp& w, const Instr&, Mask mask) {
  ++w.launch->time;
  w.trips = std::max(w.trips, w.needed) + 1;  // until what the warp has written can be seen
  each(mask, [&](int l) { fence(w, l); });
}
// Lets products (wgmma) see what was stored.
inline void fence_proxy(Warp& w, const Instr&, Mask mask) {
  ++w.launch->time;
  each(mask, [&](int l) {
    Thread& me = w.lanes[l];
    if (me.proxy_bars < me.bars) me.proxy_before = me.proxy_time;
    me.proxy_time = w.launch->time;
    me.proxy_bars = me.bars;
  });
}
inline void resolve_fence(Form& f, Instr& i) {
  if (f.take("proxy")) {
    if (!f.take("async")) f.unknown();
    i.run = f.take("global") ? nothing : fence_proxy;
    f.take("shared::cta");
    return;
  }
  f.one_of({"sc", "acq_rel"});
  i.run = f.take("cta")                                    ? nothing
          : f.one_of({"gl", "gpu", "sys", "cluster"}) >= 0 ? fence_all
                                                           : nullptr;
}

// ---- warps ----

// shfl.sync d{|p}, a, b, c, mask: the modes are up, down, bfly, idx.
inline void shuffle(Warp& w, const Instr& i, Mask mask) {
  const size_t first = i.o.size() - 4;
  const uint32_t* a = w.of<uint32_t>(i.o[first]);
  uint32_t from[kLanes], results[kLanes];
  Mask in_range = 0;
  std::memcpy(from, a, sizeof from);
  each(mask, [&](int l) {
    const int b = int(w.of<uint32_t>(i.o[first + 1])[l] & 31);
    const int c = int(w.of<uint32_t>(i.o[first + 2])[l]), clamp = c & 31, segment = c >> 8 & 31;
    const int most = (l & segment) | (clamp & ~segment), least = l & segment;
    int source = l;
    bool good = false;
    switch (i.mode) {
      case 0:
        source = l - b, good = source >= most;
        break;
      case 1:
        source = l + b, good = source <= most;
        break;
      case 2:
        source = l ^ b, good = source <= most;
        break;
      default:
        source = least | (b & ~segment), good = source <= most;
    }
    if (!good) source = l;
    if (!(mask >> source & 1))
      throw Fault(w.lanes[l].id,
                  "shfl.sync from lane " + std::to_string(source) + ", which takes no part");
    results[l] = from[source];
    in_range |= Mask(good) << l;
  });
  each(mask, [&](int l) { w.of<uint32_t>(i.o[0])[l] = results[l]; });
  if (first == 2) {
    Mask& p = w.predicate(i.o[1]);
    p = (p & ~mask) | (in_range & mask);
  }
}
inline void resolve_shfl(Form& f, Instr& i) {
  i.mode = f.one_of({"up", "down", "bfly", "idx"});
  if (!f.take("sync") || f.last() != "b32" || i.mode < 0) f.unknown();
  i.kind = Kind::collective;
  i.run = shuffle;
}

// vote.sync: modes any, all, uni, ballot.
inline void vote(Warp& w, const Instr& i, Mask mask) {
  const Mask yes = w.predicate(i.o[1]) & mask;
  if (i.mode == 3) {
    each(mask, [&](int l) { w.of<uint32_t>(i.o[0])[l] = yes; });
    return;
  }
  const bool result = i.mode == 0 ? yes != 0 : i.mode == 1 ? yes == mask : yes == 0 || yes == mask;
  Mask& d = w.predicate(i.o[0]);
  d = result ? d | mask : d & ~mask;
}
inline void resolve_vote(Form& f, Instr& i) {
  i.mode = f.one_of({"any", "all", "uni", "ballot"});
  if (!f.take("sync") || i.mode < 0) f.unknown();
  f.last();
  i.kind = Kind::collective;
  i.run = vote;
}

template <class T, class F>
void reduce(Warp& w, const Instr& i, Mask mask) {
  const T* a = w.of<T>(i.o[1]);
  T all = a[__builtin_ctz(mask)];
  each(mask & (mask - 1), [&](int l) { all = F()(all, a[l]); });
  each(mask, [&](int l) { w.of<T>(i.o[0])[l] = all; });
}
inline void resolve_redux(Form& f, Instr& i) {
  const int which = f.one_of({"add", "min", "max", "and", "or", "xor"});
  if (!f.take("sync")) f.unknown();
  i.kind = Kind::collective;
  with_integer(f.last(), [&](auto t) {
    using T = decltype(t);
    constexpr Run runs[] = {reduce<T, Add>, reduce<T, Min>, reduce<T, Max>,
                            reduce<T, And>, reduce<T, Or>,  reduce<T, Xor>};
    if (which >= 0) i.run = runs[which];
  });
}

inline void match_any(Warp& w, const Instr& i, Mask mask) {
  Mask found[kLanes];
  each(mask, [&](int l) {
    found[l] = 0;
    each(mask, [&](int k) { found[l] |= Mask(w.bits(i.o[1], k) == w.bits(i.o[1], l)) << k; });
  });
  each(mask, [&](int l) { w.of<uint32_t>(i.o[0])[l] = found[l]; });
}
// elect.sync d|p, mask: the lowest lane.
inline void elect(Warp& w, const Instr& i, Mask mask) {
  const int chosen = __builtin_ctz(mask);
  each(mask, [&](int l) { w.set_bits(i.o[0], l, uint64_t(chosen)); });
  Mask& p = w.predicate(i.o[1]);
  p = (p & ~mask) | (Mask(1) << chosen);
}

inline void add_sync_opcodes() {
  auto& all = opcodes();
  all["bar"] = all["barrier"] = resolve_barrier;
  all["membar"] = all["fence"] = resolve_fence;
  all["shfl"] = resolve_shfl;
  all["vote"] = resolve_vote;
  all["redux"] = resolve_redux;
  all["match"] = [](Form& f, Instr& i) {
    if (!f.take("any") || !f.take("sync")) f.unknown();
    f.last();
    i.kind = Kind::collective;
    i.run = match_any;
  };
  all["elect"] = [](Form& f, Instr& i) {
    if (!f.take("sync")) f.unknown();
    i.kind = Kind::collective;
    i.run = elect;
  };
  all["activemask"] = [](Form& f, Instr& i) {
    f.last();
    i.run = [](Warp& w, const Instr& in, Mask mask) {
      each(mask, [&](int l) { w.of<uint32_t>(in.o[0])[l] = mask; });
    };
  };
  all["bra"] = [](Form& f, Instr& i) {
    f.take("uni");
    i.kind = Kind::branch;
    i.run = nothing;
  };
  all["ret"] = all["exit"] = [](Form&, Instr& i) {
    i.kind = Kind::end;
    i.run = nothing;
  };
  for (const char* hint : {"griddepcontrol", "setmaxnreg", "nanosleep"})
    all[hint] = [](Form& f, Instr& i) {
      f.parts.clear();
      i.run = nothing;
    };
}

}  // namespace ptx

// Barriers, fences and what the lanes of a warp do together.
#pragma once

#include "loads.h"

namespace ptx {

inline void nothing(Warp&, const Instr&, Mask) {}

// ---- barriers and fences ----

// bar.red.or: mode 1.
inline void vote_at_barrier(Warp& w, const Instr& i, Mask mask) {
  if (i.mode == 1 && (w.predicate(i.o.back()) & mask) != 0) w.block->vote = true;
}
inline void give_vote(Warp& w, const Instr& i, Mask mask) {
  if (i.mode == 1) w.set_predicate(i.o[0], mask, w.block->vote ? kAll : 0);
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
  i.kind = Kind::barrier;
  i.mode = f.take("red");
  const bool known = i.mode ? f.take("or") && f.last() == "pred" && i.o.size() == 3
                            : f.take("sync") && i.o.size() == 1;
  if (known) i.run = vote_at_barrier;
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
  if (f.take("gl")) i.run = fence_all;
  if (f.take("proxy") && f.take("async") && f.take("shared::cta")) i.run = fence_proxy;
}

// ---- warps ----

// shfl.sync d{|p}, a, b, 31, mask of the whole warp: the modes are bfly, idx.
inline void shuffle(Warp& w, const Instr& i, Mask mask) {
  const Operand* o = &i.o[i.o.size() - 4];
  uint32_t from[kLanes];
  std::memcpy(from, w.of<uint32_t>(o[0]), sizeof from);
  each(mask, [&](int l) {
    const uint32_t b = w.of<uint32_t>(o[1])[l] & 31, source = i.mode == 0 ? uint32_t(l) ^ b : b;
    if (w.of<uint32_t>(o[2])[l] != 31)
      throw Fault(w.lanes[l].id, "shfl.sync of a part of the warp is not supported");
    if (!(mask >> source & 1))
      throw Fault(w.lanes[l].id,
                  "shfl.sync from lane " + std::to_string(source) + ", which takes no part");
    w.of<uint32_t>(i.o[0])[l] = from[source];
  });
  if (i.o.size() > 5) w.set_predicate(i.o[1], mask, kAll);  // all are in range
}
inline void resolve_shfl(Form& f, Instr& i) {
  i.mode = f.one_of({"bfly", "idx"});
  if (!f.take("sync") || f.last() != "b32" || i.mode < 0) f.unknown();
  i.kind = Kind::collective;
  i.run = shuffle;
}

template <class T, class F>
void reduce(Warp& w, const Instr& i, Mask mask) {
  const T* a = w.of<T>(i.o[1]);
  T all = a[__builtin_ctz(mask)];
  each(mask & (mask - 1), [&](int l) { all = F()(all, a[l]); });
  each(mask, [&](int l) { w.of<T>(i.o[0])[l] = all; });
}
inline void resolve_redux(Form& f, Instr& i) {
  const int which = f.one_of({"add", "min", "max"});
  if (!f.take("sync")) f.unknown();
  i.kind = Kind::collective;
  with_integer(f.last(), [&](auto t) {
    using T = decltype(t);
    constexpr Run runs[] = {reduce<T, Add>, reduce<T, Min>, reduce<T, Max>};
    if (which >= 0) i.run = runs[which];
  });
}

inline void add_sync_opcodes() {
  auto& all = opcodes();
  all["bar"] = all["barrier"] = resolve_barrier;
  all["membar"] = all["fence"] = resolve_fence;
  all["shfl"] = resolve_shfl;
  all["redux"] = resolve_redux;
  all["bra"] = [](Form& f, Instr& i) {
    f.take("uni");
    i.kind = Kind::branch;
    i.run = nothing;
  };
  all["ret"] = [](Form&, Instr& i) {
    i.kind = Kind::end;
    i.run = nothing;
  };
}

}  // namespace ptx

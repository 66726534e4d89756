// Runs warps: of a warp's threads those that are furthest behind in the code run together, so that
// threads that went apart meet again where their ways join. Barriers, fences and shuffles.
#pragma once

#include "tensor_cores.h"

namespace ptx {

inline void nothing(Warp&, const Instr&, Mask) {}

// ---- barriers and fences ----

inline void arrive_at_cluster(Warp& w, const Instr& i, Mask mask) {
  each(mask, [&](int l) {
    Thread& me = w.lanes[l];
    if (me.arrives > me.waits) throw Fault(me.id, "barrier.cluster.arrive twice without a wait");
    ++me.arrives;
    me.relaxed = i.mode == 1;
  });
}

inline void resolve_barrier(Form& f, Instr& i) {
  if (f.take("cluster")) {
    if (f.take("arrive")) {
      if (!f.take("release")) i.mode = f.take("relaxed");
      i.run = arrive_at_cluster;
    } else if (f.take("wait")) {
      f.take("acquire");
      i.kind = Kind::cluster_wait;
      i.run = nothing;
    }
    return;
  }
  i.kind = Kind::barrier;
  if (f.take("sync") && i.o.size() == 1) i.run = nothing;
}

inline void fence_all(Warp& w, const Instr&, Mask mask) {
  ++w.launch->time;
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

// ---- shuffles and reductions ----

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

// ---- warps ----

// One instruction for some of its lanes.
inline void execute(Warp& w, const Instr& i, Mask mask) {
  w.launch->pc = i.pc;
  if (w.launch->program->has_products && !i.is_product) use_registers(w, i);
  i.run(w, i, mask);
}

struct Runner {
  Warp& w;
  Launch& launch;
  const std::vector<Instr>& code;
  uint32_t pc = 0, other = 0;  // of the lanes that run; the lowest of the others that could
  Mask running = 0;
  uint64_t turn, left;  // instructions
  bool over = false;

  Runner(Warp& warp, uint64_t most)
      : w(warp), launch(*warp.launch), code(warp.launch->program->code) {
    turn = left = std::min(most, launch.fuel);
  }

  // Chooses the lanes that run next; false if all wait or have ended.
  bool choose() {
    pc = other = kNobody;
    running = 0;
    for (int l = 0; l < w.size; ++l) {
      const Thread& thread = w.lanes[l];
      if (thread.waits_for != Wait::no) continue;
      if (thread.pc < pc) {
        other = pc;
        pc = thread.pc;
        running = 0;
      }
      if (thread.pc == pc)
        running |= Mask(1) << l;
      else if (thread.pc < other)
        other = thread.pc;
    }
    return running != 0;
  }
  void move(Mask mask, uint32_t to) {
    each(mask, [&](int l) { w.lanes[l].pc = to; });
  }

  // Until every thread waits for other warps or has ended, or the turn is over.
  void run() {
    while (!over && choose()) {
      while (pc < other && straight()) {
      }
    }
    launch.fuel -= turn - left;
  }

  bool interrupt() {
    if (turn == launch.fuel) throw Fault(w.lanes[0].id, "the kernel does not end");
    move(running, pc);
    over = launch.moved = true;
    return false;
  }

  // One instruction; false if the running lanes are to be chosen anew.
  bool straight() {
    if (left == 0) return interrupt();
    --left;
    const Instr& i = code.at(pc);
    Mask on = running;
    if (i.guard >= 0) {
      const Mask p = *reinterpret_cast<Mask*>(w.file + i.guard);
      on &= i.negated ? ~p : p;
    }
    if (i.kind == Kind::plain) {
      if (on != 0) execute(w, i, on);
      ++pc;
      if (pc >= other) move(running, pc);
      return true;
    }
    if (i.kind == Kind::branch) return branch(i, on);
    launch.pc = pc;
    move(running, pc + 1);
    if (i.kind == Kind::collective || i.kind == Kind::whole_warp) {
      together(i, on);
    } else if (i.kind == Kind::end) {
      if (on != 0) execute(w, i, on);
      each(on, [&](int l) { w.lanes[l].waits_for = Wait::forever; });
    } else if (on != 0) {
      execute(w, i, on);
      if (i.kind == Kind::look)
        over = w.found_the_same;
      else
        each(on, [&](int l) { wait(w.lanes[l], i, l); });
    }
    return false;
  }

  bool branch(const Instr& i, Mask on) {
    const uint32_t target = uint32_t(i.offset);
    if (on == running || on == 0) {
      pc = on == 0 ? pc + 1 : target;
      move(running, pc);
      return true;
    }
    move(on, target);
    move(running & ~on, pc + 1);
    return false;
  }

  void wait(Thread& thread, const Instr& i, int lane) {
    if (i.kind == Kind::cluster_wait) {
      if (thread.arrives != thread.waits + 1)
        throw Fault(thread.id, "barrier.cluster.wait without an arrive");
      thread.waits_for = Wait::cluster;
      return;
    }
    if (w.bits(i.o[0], lane) != 0)
      throw Fault(thread.id, "another barrier than number 0 is not supported");
    thread.waits_for = Wait::barrier;
  }

  // Runs an instruction for lanes whose partners are there, and lets the others wait for theirs.
  void together(const Instr& i, Mask on) {
    for (int l = 0; l < w.size; ++l) {
      Thread& thread = w.lanes[l];
      if (thread.waits_for != Wait::lanes || thread.pc != i.pc) continue;
      thread.waits_for = Wait::no;
      thread.pc = i.pc + 1;
      on |= Mask(1) << l;
    }
    const Mask there = w.size == kLanes ? kAll : (Mask(1) << w.size) - 1;
    while (on != 0) {
      const int first = __builtin_ctz(on);
      const bool all = i.kind == Kind::whole_warp || i.o.empty();
      const Mask members = (all ? kAll : Mask(w.of<uint32_t>(i.o.back())[first])) & there;
      if (!(members >> first & 1))
        throw Fault(w.lanes[first].id, "a lane that its own mask leaves out");
      each(members & ~on, [&](int l) {
        if (w.lanes[l].waits_for == Wait::forever)
          throw Fault(w.lanes[first].id,
                      "waits for lane " + std::to_string(l) + ", which has ended");
      });
      if ((members & ~on) == 0) {
        execute(w, i, members);
      } else {
        each(members & on, [&](int l) {
          w.lanes[l].waits_for = Wait::lanes;
          w.lanes[l].pc = i.pc;
        });
      }
      on &= ~members;
    }
  }
};

// ---- blocks ----

template <class F>
void each_thread(Block& block, F f) {
  for (Warp& warp : block.warps)
    for (int l = 0; l < warp.size; ++l) f(warp, warp.lanes[l], l);
}

// Lets the threads of a block past a barrier if all are there.
inline bool release_block(Block& block) {
  bool all = true;
  each_thread(block,
              [&](Warp&, Thread& thread, int) { all = all && thread.waits_for == Wait::barrier; });
  if (!all) return false;
  each_thread(block, [&](Warp&, Thread& thread, int) {
    block.known.add(thread.known);
    block.fenced.add(thread.fenced);
    thread.known.clear();
    thread.fenced.clear();
    ++thread.bars;
    thread.waits_for = Wait::no;
  });
  return true;
}

// The same for a cluster. Threads that have ended have arrived. Where a thread's arrival was
// relaxed the barrier orders nothing in memory.
inline bool release_cluster(std::vector<Block*>& blocks) {
  bool all = true, some = false, orders = true;
  for (Block* block : blocks)
    each_thread(*block, [&](Warp&, Thread& thread, int) {
      some = some || thread.waits_for == Wait::cluster;
      orders = orders && (thread.waits_for == Wait::forever || !thread.relaxed);
      all = all && (thread.waits_for == Wait::forever || thread.arrives == thread.waits + 1);
    });
  if (!some || !all) return false;
  Known known, fenced;
  for (Block* block : blocks) {
    if (!orders) break;
    each_thread(*block, [&](Warp&, Thread& thread, int) {
      known.add(thread.known);
      fenced.add(thread.fenced);
    });
    known.add(block->known);
    fenced.add(block->fenced);
  }
  for (Block* block : blocks) {
    block->known.add(known);
    block->fenced.add(fenced);
    each_thread(*block, [&](Warp&, Thread& thread, int) {
      if (thread.waits_for != Wait::cluster) return;
      ++thread.waits;
      if (orders) thread.ordered = thread.waits;
      thread.waits_for = Wait::no;
    });
  }
  return true;
}

}  // namespace ptx

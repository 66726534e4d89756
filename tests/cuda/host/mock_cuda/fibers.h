// Runs launches on the host: every CUDA thread is a fiber of its own, with a stack of its own.
//
// All of them run on one thread of the machine, in turn; barriers and shuffles wait for all of the
// block or warp, and a barrier that some never reach ends the program. Shared memory begins as
// garbage and is exactly as large as the launch asked for. AddressSanitizer knows the stacks.
// x86-64 and GCC.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#ifndef __x86_64__
#error "fibers are written for x86-64"
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace bahdanau_fast::host {

struct Index {
  unsigned x;
};

struct Barrier {
  int arrived = 0, rounds = 0;
};

struct Warp {
  Barrier barrier;
  unsigned char slots[2][32][8];
};

struct Block;

struct Fiber {
  Index thread{};
  Block* block = nullptr;
  int place = 0;  // in its cluster
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  bool done = false;
  int turn = 0;  // which slots the next shuffle takes
  void* of_address_sanitizer = nullptr;
};

constexpr size_t kStack = 48 * 1024;

// One block of a launch.
struct Block {
  Index index{}, threads{};
  std::vector<std::unique_ptr<Warp>> warps;
  Barrier barrier;
  int ors = 0;
  std::unique_ptr<char[]> shared;
};

// Blocks that run at the same time and reach each other's shared memory; often one alone.
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Barrier barrier;
  int idle = 0;
  const std::function<void()>* kernel = nullptr;
  int step = 1;  // the order fibers run in
};

struct Machine {
  Fiber* current = nullptr;
  Cluster* cluster = nullptr;
  Fiber main;
  bool backwards = false;

  static Machine& get() {
    static Machine machine;
    return machine;
  }
};

inline Cluster& cluster() { return *Machine::get().cluster; }
inline Fiber& self() { return *Machine::get().current; }
inline Block& block() { return *self().block; }

// Saves what a call preserves on this stack, its pointer in *save, and goes on on the stack `to`.
__attribute__((naked, noinline, noclone, no_sanitize("address"))) inline void switch_stacks(
    void** /*save*/, void* /*to*/) {
  __asm__(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

inline void arrive_on(Fiber* from) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(from->of_address_sanitizer, nullptr, nullptr);
#endif
  (void)from;
}

inline void go_to(Fiber* to) {
  Fiber* from = Machine::get().current;
  if (from == to) return;
  Machine::get().current = to;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(from->done ? nullptr : &from->of_address_sanitizer, to->stack,
                                 kStack);
#endif
  __asm__ volatile("" ::: "memory");  // others write while this one waits
  switch_stacks(&from->stack_pointer, to->stack_pointer);
  __asm__ volatile("" ::: "memory");
  arrive_on(from);
}

// To the next fiber of the cluster that is not done; to main when all are.
inline void yield(int at) {
  Cluster& all = cluster();
  const int n = int(all.fibers.size());
  for (int tried = 0; tried < n; ++tried) {
    at = (at + all.step) % n;
    Fiber* next = all.fibers[size_t(at)].get();
    if (!next->done) return go_to(next);
  }
  go_to(&Machine::get().main);
}

// Until `count` fibers have come.
inline void wait(Barrier& barrier, int count) {
  Cluster& all = cluster();
  const int round = barrier.rounds, arrived = barrier.arrived + 1;
  if (arrived == count) {
    barrier.arrived = 0;
    barrier.rounds = round + 1;
    all.idle = 0;
  } else {
    barrier.arrived = arrived;
    while (barrier.rounds == round) {
      ++all.idle;
      if (all.idle > 4 * int(all.fibers.size())) {
        std::fprintf(stderr, "a barrier that not all threads reach\n");
        std::abort();
      }
      yield(self().place);
    }
    all.idle = 0;
  }
}

[[noreturn]] inline void fiber_main() {
  arrive_on(&self());
  (*cluster().kernel)();
  self().done = true;
  cluster().idle = 0;
  yield(self().place);
  std::abort();
}

inline void run(Cluster& all) {
  Machine& m = Machine::get();
  const size_t threads = all.blocks[0]->threads.x, bytes = kStack * threads * all.blocks.size();
  char* stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) std::abort();
  for (size_t place = 0; place < threads * all.blocks.size(); ++place) {
    const size_t t = place % threads;
    Block& block = *all.blocks[place / threads];
    if (t % 32 == 0) block.warps.push_back(std::make_unique<Warp>());
    all.fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *all.fibers.back();
    fiber.thread.x = unsigned(t);
    fiber.block = &block;
    fiber.place = int(place);
    fiber.stack = stacks + kStack * place;
    void** top = reinterpret_cast<void**>(fiber.stack + kStack) - 1;  // as after a call
    *--top = reinterpret_cast<void*>(&fiber_main);
    top -= 6;  // the registers that are popped first
    std::memset(top, 0, 6 * sizeof(void*));
    fiber.stack_pointer = top;
  }
  m.current = &m.main;
  m.cluster = &all;
  yield(0);
  munmap(stacks, bytes);
}

template <class X>
X exchange(X x, int from) {
  static_assert(sizeof(X) <= 8);
  Fiber& me = self();
  Warp& warp = *block().warps[me.thread.x / 32];
  auto& slots = warp.slots[me.turn ^= 1];
  std::memcpy(slots[me.thread.x % 32], &x, sizeof x);
  wait(warp.barrier, 32);
  std::memcpy(&x, slots[from], sizeof x);
  return x;
}

// Runs a launch: every other one backwards, blocks and threads.
inline void launch(const std::function<void()>& kernel, int64_t blocks, int threads, int64_t shared,
                   int blocks_of_cluster) {
  Machine& m = Machine::get();
  m.backwards = !m.backwards;
  for (int64_t i = 0; i < blocks; i += blocks_of_cluster) {
    Cluster all;
    all.kernel = &kernel;
    for (int rank = 0; rank < blocks_of_cluster; ++rank) {
      all.blocks.push_back(std::make_unique<Block>());
      Block& block = *all.blocks.back();
      block.index.x = unsigned((m.backwards ? blocks - blocks_of_cluster - i : i) + rank);
      block.threads.x = unsigned(threads);
      block.shared = std::make_unique<char[]>(size_t(shared));
      std::memset(block.shared.get(), 0xff, size_t(shared));  // NaN
    }
    all.step = m.backwards ? threads * blocks_of_cluster - 1 : 1;
    run(all);
  }
}

}  // namespace bahdanau_fast::host

// Runs CUDA kernels on the host, for tests: csrc/cuda/device.h takes this for its CUDA half.
//
// Every CUDA thread is a fiber of its own, with a stack of its own; barriers and shuffles wait for
// all of the block or warp, and a barrier that some never reach ends the program. Shared memory
// begins as garbage and is exactly as large as the launch asked for. AddressSanitizer knows the
// stacks. To ThreadSanitizer fibers are threads that nothing orders but what orders CUDA threads:
// a barrier its block, a shuffle its warp, a fence and an atomic blocks among each other, a launch
// the next. So accesses that race on a GPU race here, whatever order the fibers ran in.
//
// x86-64 and GCC or Clang. What the host cannot mean, approximations in machine code, has its plain
// equivalent below.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#ifndef __x86_64__
#error "fibers are written for x86-64"
#endif

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace bahdanau_fast::host {

// ---- what the sanitizers are told
// ----------------------------------------------------------------

#ifdef __SANITIZE_THREAD__
inline void release(void* at) { __tsan_release(at); }
inline void acquire(void* at) { __tsan_acquire(at); }
#else
inline void release(void*) {}
inline void acquire(void*) {}
#endif

// ---- fibers
// --------------------------------------------------------------------------------------

struct Index {
  unsigned x;
};

// All that follows runs on one thread of the machine; the atomics keep ThreadSanitizer from taking
// the scheduler's own notes for shared data.
template <class X>
using Note = std::atomic<X>;
template <class X>
X look(const Note<X>& note) {
  return note.load(std::memory_order_relaxed);
}
template <class X>
void put(Note<X>& note, X x) {
  note.store(x, std::memory_order_relaxed);
}

struct Barrier {
  Note<int> arrived{0}, rounds{0};
  alignas(8) char order;  // an address for the sanitizer
};

struct Warp {
  Barrier barrier;
  unsigned char slots[2][32][8];
  uint32_t parts[2][32][6];
};

struct Fiber {
  Index thread{};
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Note<bool> done{false};
  int turn = 0;                          // which slots the next shuffle takes
  bool fenced = false, counted = false;  // whether it has met a fence, an atomic addition
  Note<void*> of_thread_sanitizer{nullptr};
  void* of_address_sanitizer = nullptr;
};

constexpr size_t kStack = 48 * 1024;

// One block of a launch, made anew for each: what another one's threads did orders nothing here.
struct Block {
  Index index{}, threads{};
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  Barrier barrier;
  Note<int> ors{0}, idle{0};
  std::unique_ptr<char[]> shared;
  const std::function<void()>* kernel = nullptr;
  int step = 1;  // the order fibers run in
};

struct Machine {
  Note<Fiber*> current{nullptr};
  Note<Block*> block{nullptr};
  Fiber main;
  alignas(8) char fence;  // addresses for the sanitizer, which tells eights of bytes apart
  alignas(8) char finished;
  bool backwards = false;

  static Machine& get() {
    static Machine machine;
    return machine;
  }
};

inline Block& block() { return *look(Machine::get().block); }
inline Fiber& self() { return *look(Machine::get().current); }

#ifdef __clang__
#define BF_NAKED __attribute__((naked, noinline))
#else
#define BF_NAKED __attribute__((naked, noinline, noclone, no_sanitize("thread", "address")))
#endif
// Saves what a call preserves on this stack, its pointer in *save, and goes on on the stack `to`.
BF_NAKED inline void switch_stacks(void** /*save*/, void* /*to*/) {
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
  Fiber* from = look(Machine::get().current);
  if (from == to) return;
  put(Machine::get().current, to);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(look(from->done) ? nullptr : &from->of_address_sanitizer,
                                 to->stack, kStack);
#endif
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(look(to->of_thread_sanitizer), 1 /* without ordering anything */);
#endif
  switch_stacks(&from->stack_pointer, to->stack_pointer);
  arrive_on(from);
}

// To the next fiber of the block that is not done; to main when all are.
inline void yield(int at) {
  Block& all = block();
  const int n = int(all.fibers.size());
  for (int tried = 0; tried < n; ++tried) {
    at = (at + all.step) % n;
    Fiber* next = all.fibers[size_t(at)].get();
    if (!look(next->done)) return go_to(next);
  }
  go_to(&Machine::get().main);
}

// Until `count` fibers have come.
inline void wait(Barrier& barrier, int count) {
  Block& all = block();
  release(&barrier.order);
  const int round = look(barrier.rounds), arrived = look(barrier.arrived) + 1;
  if (arrived == count) {
    put(barrier.arrived, 0);
    put(barrier.rounds, round + 1);
    put(all.idle, 0);
  } else {
    put(barrier.arrived, arrived);
    while (look(barrier.rounds) == round) {
      put(all.idle, look(all.idle) + 1);
      if (look(all.idle) > 4 * int(all.fibers.size())) {
        std::fprintf(stderr, "a barrier that not all threads reach\n");
        std::abort();
      }
      yield(int(self().thread.x));
    }
    put(all.idle, 0);
  }
  acquire(&barrier.order);
}

[[noreturn]] inline void fiber_main() {
  arrive_on(&self());
  (*block().kernel)();
  release(&Machine::get().finished);
  put(self().done, true);
  put(block().idle, 0);
  yield(int(self().thread.x));
  std::abort();
}

inline void run(Block& all) {
  Machine& m = Machine::get();
  const size_t threads = all.threads.x, bytes = kStack * threads;
  char* stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) std::abort();
  for (size_t t = 0; t < threads; ++t) {
    if (t % 32 == 0) all.warps.push_back(std::make_unique<Warp>());
    all.fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *all.fibers.back();
    fiber.thread.x = unsigned(t);
    fiber.stack = stacks + kStack * t;
    void** top = reinterpret_cast<void**>(fiber.stack + kStack) - 1;  // as after a call
    *--top = reinterpret_cast<void*>(&fiber_main);
    top -= 6;  // the registers that are popped first
    std::memset(top, 0, 6 * sizeof(void*));
    fiber.stack_pointer = top;
  }
  put(m.current, &m.main);
  put(m.block, &all);
#ifdef __SANITIZE_THREAD__
  put(m.main.of_thread_sanitizer, __tsan_get_current_fiber());
  for (auto& fiber : all.fibers) put(fiber->of_thread_sanitizer, __tsan_create_fiber(0));
#endif
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

}  // namespace bahdanau_fast::host

// ---- CUDA's words
// --------------------------------------------------------------------------------

#define threadIdx (bahdanau_fast::host::self().thread)
#define blockIdx (bahdanau_fast::host::block().index)
#define blockDim (bahdanau_fast::host::block().threads)

inline void __syncthreads() {
  auto& block = bahdanau_fast::host::block();
  bahdanau_fast::host::wait(block.barrier, int(block.fibers.size()));
}
inline int __syncthreads_or(int x) {
  namespace host = bahdanau_fast::host;
  host::Note<int>& ors = host::block().ors;
  host::put(ors, host::look(ors) | (x != 0));
  __syncthreads();
  const int result = host::look(ors);
  __syncthreads();
  host::put(ors, 0);
  __syncthreads();
  return result;
}
template <class X>
X __shfl_xor_sync(unsigned, X x, int mask) {
  return bahdanau_fast::host::exchange(x, int(threadIdx.x % 32) ^ mask);
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, x, mask);
    x = other > x ? other : x;
  }
  return x;
}
// What comes before a fence and an atomic is ordered before what comes after an atomic and a fence.
inline void __threadfence() {
  auto& me = bahdanau_fast::host::self();
  me.fenced = true;
  if (me.counted) bahdanau_fast::host::acquire(&bahdanau_fast::host::Machine::get().fence);
}
inline unsigned atomicAdd(unsigned* at, unsigned x) {
  auto& me = bahdanau_fast::host::self();
  if (me.fenced) bahdanau_fast::host::release(&bahdanau_fast::host::Machine::get().fence);
  me.counted = true;
  return __atomic_fetch_add(at, x, __ATOMIC_RELAXED);
}
inline unsigned atomicMax(unsigned* at, unsigned x) {
  unsigned seen = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (seen < x &&
         !__atomic_compare_exchange_n(at, &seen, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}

// ---- the seam of device.h
// ------------------------------------------------------------------------

namespace bahdanau_fast::gpu {

using std::ceil;
using std::exp;
using std::fabs;
using std::tanh;

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}
inline double from_bits(uint32_t low, uint32_t high) {
  const uint64_t bits = uint64_t(high) << 32 | low;
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// As the machine's: no subnormal numbers come out or go in.
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? 0.0f * x : x; }
inline float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
inline float reciprocal(float x) { return flushed(1.0f / flushed(x)); }
inline float clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }
inline float at_most(float x, float limit) { return x > limit ? limit : x; }

inline float widen(f16 x) {
  _Float16 half;
  std::memcpy(&half, &x, sizeof half);
  return float(half);
}
inline void narrow(float x, f16* out) {
  const _Float16 half = _Float16(x);
  std::memcpy(out, &half, sizeof half);
}
inline void narrow(float x, bf16* out) {
  const uint32_t bits = to_bits(x);
  out->bits = x != x ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Bytes16 load16(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) {
    std::fprintf(stderr, "a misaligned load of 16 bytes\n");
    std::abort();
  }
  Bytes16 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline float widen(bf16 x);

// The tensor cores' product: every lane lays its parts open and adds up its own four results.
template <class T>
void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  host::Fiber& me = host::self();
  host::Warp& warp = *host::block().warps[me.thread.x / 32];
  auto& parts = warp.parts[me.turn ^= 1];
  const unsigned lane = me.thread.x % 32;
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(parts[lane], own, sizeof own);
  host::wait(warp.barrier, 32);
  const auto half = [&](unsigned of, unsigned part, unsigned k) {
    T x;
    x.bits = uint16_t(parts[of][part] >> (k % 2 * 16));
    return widen(x);
  };
  for (unsigned result = 0; result < 4; ++result) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + result % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned at = k % 8 / 2, upper = k / 8;
      sums[result] +=
          half(row * 4 + at, result / 2 + 2 * upper, k) * half(column * 4 + at, 4 + upper, k);
    }
  }
}

inline char* shared_memory() { return host::block().shared.get(); }

template <class P>
void launch(void (*kernel)(P), const Launch& at, const P& p) {
  check_blocks(at);
  host::Machine& m = host::Machine::get();
  const std::function<void()> body = [&] { kernel(p); };
  m.backwards = !m.backwards;
  std::vector<std::unique_ptr<host::Block>> blocks;
#ifdef __SANITIZE_THREAD__
  // An identity given back would be handed to a later block, and order it behind the earlier one.
  if (at.blocks * at.threads > 8000) {
    std::fprintf(stderr, "%s: more threads than ThreadSanitizer tells apart\n", at.name);
    std::abort();
  }
#endif
  for (int64_t i = 0; i < at.blocks; ++i) {
#ifndef __SANITIZE_THREAD__
    blocks.clear();  // else kept: nothing orders another block's threads behind this one's
#endif
    blocks.push_back(std::make_unique<host::Block>());
    host::Block& block = *blocks.back();
    block.index.x = unsigned(m.backwards ? at.blocks - 1 - i : i);
    block.threads.x = unsigned(at.threads);
    block.shared = std::make_unique<char[]>(size_t(at.shared));
    std::memset(block.shared.get(), 0xff, size_t(at.shared));  // NaN
    block.kernel = &body;
    block.step = m.backwards ? at.threads - 1 : 1;
    host::run(block);
  }
  host::acquire(&m.finished);
#ifdef __SANITIZE_THREAD__
  for (auto& block : blocks) {
    block->shared.reset();
    for (auto& fiber : block->fibers) __tsan_destroy_fiber(host::look(fiber->of_thread_sanitizer));
    (void)block.release();  // left: its last fibers read it on their way out, behind `finished`
  }
#endif
}

inline void fill_zero(void* p, int64_t bytes, void*) { std::memset(p, 0, size_t(bytes)); }

}  // namespace bahdanau_fast::gpu

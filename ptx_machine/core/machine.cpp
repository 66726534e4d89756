// The machine as a library: load a program, run a launch. launch.py beside this folder calls it.
#include <numeric>
#include <random>

#include "scheduler.h"

namespace ptx {
namespace {

void add_opcodes() {
  add_integer_opcodes();
  add_floating_opcodes();
  add_memory_opcodes();
  add_sync_opcodes();
  add_matrix_opcodes();
  opcodes()["wgmma"] = resolve_product;
}

uint32_t special(const std::string& name, const Block& b, const Launch& launch, uint32_t thread) {
  if (name == "tid.x") return thread;
  if (name == "ntid.x") return launch.block_threads;
  if (name == "ctaid.x") return b.x;
  if (name == "ctaid.y") return b.y;
  if (name == "cluster_ctarank") return b.rank;
  if (name == "cluster_nctaid.x") return launch.cluster_size;
  throw std::runtime_error("unknown special register: %" + name);
}

// The blocks of one cluster with the memory they run in, used for one cluster after another.
struct Cluster {
  Launch& launch;
  bool ended = false;
  std::vector<Block> blocks;
  std::vector<Block*> mates;
  std::vector<std::vector<uint8_t>> files;
  std::vector<Warp*> turns;

  explicit Cluster(Launch& of) : launch(of), blocks(of.cluster_size) {
    const size_t warps = (of.block_threads + kLanes - 1) / kLanes;
    for (Block& block : blocks) {
      mates.push_back(&block);
      block.warps.resize(warps);
    }
    files.resize(warps * blocks.size());
    for (auto& file : files) {
      file.resize(of.program->bytes);
      set_constants(file.data());
    }
  }

  void set_constants(uint8_t* file) const {
    for (const Constant& constant : launch.program->constants) {
      uint8_t* at = file + constant.slot;
      for (int l = 0; l < kLanes; ++l) {
        std::memcpy(at + 2 * l, &constant.value, 2);
        std::memcpy(at + kConstant4 + 4 * l, &constant.value, 4);
        std::memcpy(at + kConstant8 + 8 * l, &constant.value, 8);
      }
      const Mask mask = constant.value != 0 ? kAll : 0;
      std::memcpy(at + kConstantMask, &mask, 4);
    }
  }

  void begin_block(size_t rank, uint32_t index) {
    Block& b = blocks[rank];
    const Program& program = *launch.program;
    b.index = index;
    b.cluster = index / launch.cluster_size;
    b.rank = uint32_t(rank);
    b.x = index % launch.grid[0];
    b.y = index / launch.grid[0];
    b.launch = &launch;
    b.mates = &mates;
    b.known = b.fenced = Known();
    b.ended = false;
    b.visited = Access();
    b.shared.assign(launch.shared_bytes, 0xff);
    b.shared_known.assign(launch.shared_bytes, 0);
    b.region = {"shared memory",     Space::shared,   0,
                launch.shared_bytes, b.shared.data(), b.shared_known.data()};
    for (size_t k = 0; k < b.warps.size(); ++k) {
      Warp& w = b.warps[k];
      const size_t at = rank * b.warps.size() + k;
      w.block = &b;
      w.launch = &launch;
      w.index = int(k);
      w.size = int(std::min<size_t>(kLanes, launch.block_threads - k * kLanes));
      w.file = files[at].data();
      w.products = Products();
      w.last_look = Look();
      if (program.has_products) w.products.registers.resize(program.bytes / 8 + 1);
      for (int l = 0; l < kLanes; ++l) {
        w.lanes[l] = Thread();
        w.lanes[l].id = uint32_t(index * launch.block_threads + k * kLanes + size_t(l));
      }
      for (const Special& s : program.specials)
        for (int l = 0; l < w.size; ++l)
          reinterpret_cast<uint32_t*>(w.file + s.slot)[l] =
              special(s.name, b, launch, uint32_t(k * kLanes + size_t(l)));
    }
  }

  void begin(uint32_t first) {
    ended = false;
    turns.clear();
    for (size_t rank = 0; rank < blocks.size(); ++rank) {
      begin_block(rank, first + uint32_t(rank));
      for (Warp& warp : blocks[rank].warps) turns.push_back(&warp);
    }
    if (launch.order == kBackwards) std::reverse(turns.begin(), turns.end());
  }

  // Its warps take turns for as long as barriers let them. If others are there and the order is
  // random, they may come in between at any instruction.
  void advance(std::mt19937& random) {
    const bool mixed = launch.cooperative && launch.order == kRandom;
    for (bool goes_on = !ended; goes_on;) {
      if (launch.order == kRandom) std::shuffle(turns.begin(), turns.end(), random);
      for (Warp* warp : turns) Runner(*warp, mixed ? 1 << random() % 12 : 1 << 20).run();
      bool passed = release_cluster(mates);
      ended = true;
      for (Block& block : blocks) {
        passed = release_block(block) || passed;
        block.ended = true;
        each_thread(block, [&](Warp&, Thread& thread, int) {
          block.ended = block.ended && thread.waits_for == Wait::forever;
        });
        ended = ended && block.ended;
      }
      launch.moved |= passed;
      goes_on = passed && !ended && !mixed;
    }
  }

  // A block must not end before a cluster barrier behind the last visit to its shared memory.
  void check_visits(Block& block) {
    uint32_t waits = 0;
    each_thread(block, [&](Warp&, Thread& thread, int) { waits = std::max(waits, thread.waits); });
    const Access& last = block.visited;
    if (last.thread == kNobody || last.arrives < waits) return;
    const std::string pc = std::to_string(last.pc);
    launch.races[{last.pc, last.pc}] =
        pc + " " + pc + " access to the shared memory of a block that may have ended, block " +
        std::to_string(block.index);
  }

  // Of registers and places in the code.
  size_t state() const {
    size_t all = 0;
    const auto add = [&](size_t more) { all = all * 31 + more; };
    for (const auto& file : files)
      add(std::hash<std::string_view>()({reinterpret_cast<const char*>(file.data()), file.size()}));
    for (const Warp* warp : turns)
      for (const Thread& thread : warp->lanes) add(thread.pc);
    return all;
  }

  // A warp that looks for what others do; if none does, it is said what threads wait for.
  const Warp* watcher() {
    for (const Warp* warp : turns)
      for (int l = 0; l < warp->size; ++l)
        if (warp->lanes[l].waits_for == Wait::no) return warp;
    for (Block& block : blocks)
      each_thread(block, [&](Warp&, Thread& thread, int) {
        if (thread.waits_for == Wait::forever) return;
        const bool lanes = thread.waits_for == Wait::lanes;
        launch.pc = thread.pc - (lanes ? 0 : 1);
        throw Fault(thread.id, lanes ? "waits for lanes that never come"
                               : thread.waits_for == Wait::barrier
                                   ? "a barrier that not all threads of the block reach"
                                   : "a cluster barrier that not all threads reach");
      });
    return nullptr;
  }
};

[[noreturn]] void stuck(Launch& launch, std::vector<Cluster>& clusters) {
  const Warp* of = nullptr;
  for (Cluster& cluster : clusters)
    if (const Warp* found = cluster.watcher()) of = found;
  launch.pc = of->last_look.pc;
  throw Fault(of->lanes[0].id, "waits for a change of " + of->last_look.region->name + " + " +
                                   std::to_string(of->last_look.at) + " that never comes");
}

// Runs clusters that are alive at once. Nobody will move where a round changed nothing.
void run_together(Launch& launch, std::vector<Cluster>& clusters, std::mt19937& random) {
  std::vector<Cluster*> turns;
  for (Cluster& cluster : clusters) turns.push_back(&cluster);
  for (size_t before = 0; !turns.empty();) {
    if (launch.order == kRandom) std::shuffle(turns.begin(), turns.end(), random);
    launch.moved = false;
    for (Cluster* cluster : turns) cluster->advance(random);
    std::erase_if(turns, [](Cluster* cluster) { return cluster->ended; });
    size_t now = 0;
    if (!launch.moved)
      for (const Cluster& cluster : clusters) now = now * 31 + cluster.state();
    if (now != 0 && now == before) stuck(launch, clusters);
    before = now;
  }
  for (Cluster& cluster : clusters)
    for (Block& block : cluster.blocks) cluster.check_visits(block);
}

void run(const Program& program, Arguments& arguments, std::string* said) {
  Launch launch(program, arguments);
  random_seed = (uint64_t(launch.seed) + 1) * 0x2545f4914f6cdd1du;
  std::mt19937 random(launch.seed);
  try {
    std::vector<uint32_t> turns(launch.clusters);
    std::iota(turns.begin(), turns.end(), 0u);
    if (launch.order == kBackwards) std::reverse(turns.begin(), turns.end());
    if (launch.order == kRandom) std::shuffle(turns.begin(), turns.end(), random);
    std::vector<Cluster> alive;
    const size_t at_once = launch.cooperative ? turns.size() : 1;
    alive.reserve(at_once);  // blocks know where their mates are
    while (alive.size() < at_once) alive.emplace_back(launch);
    for (auto turn = turns.begin(); turn != turns.end();) {
      for (Cluster& cluster : alive) cluster.begin(*turn++ * launch.cluster_size);
      run_together(launch, alive, random);
    }
  } catch (const Fault& fault) {
    *said = "fault " + std::to_string(launch.pc) + " thread " +
            std::to_string(fault.thread % launch.block_threads) + " of block " +
            std::to_string(fault.thread / launch.block_threads) + ": " + fault.what() + "\n";
  }
  for (const auto& [pcs, race] : launch.races) *said += "race " + race + "\n";
  arguments.fuel = launch.fuel;
}

thread_local std::string message;

}  // namespace
}  // namespace ptx

extern "C" {

// A program, which stays for good; null after a mistake, which ptx_message() then tells.
void* ptx_load(const char* text) {
  static const bool ready = (ptx::add_opcodes(), true);
  (void)ready;
  try {
    ptx::message.clear();
    return new ptx::Program(text);
  } catch (const std::exception& error) {
    ptx::message = error.what();
    return nullptr;
  }
}

// What there is to say afterwards, a line each: "fault <instruction> <what>", "race <instruction>
// <instruction> <what>"; empty if all is well.
const char* ptx_message() { return ptx::message.c_str(); }

void ptx_run(const void* program, ptx::Arguments* arguments) {
  ptx::message.clear();
  try {
    ptx::run(*static_cast<const ptx::Program*>(program), *arguments, &ptx::message);
  } catch (const std::exception& error) {
    ptx::message = std::string("error ") + error.what();
  }
}

}  // extern "C"

// Memory with what is known of each byte (written at all?) and of each cell (who was there last?).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <set>

#include "state.h"

namespace ptx {

// Where spaces begin. A shared address of a block's own is kShared + offset; of block r of its
// cluster that plus (r + 1) << 24; generic addresses of shared memory begin at kWindow.
constexpr uint64_t kShared = 1024, kWindow = uint64_t(1) << 40;
constexpr uint64_t kParam = 4096;

constexpr uint32_t kNobody = 0xffffffffu;

// When a thread was at a cell, in counts that barriers advance.
struct Access {
  uint32_t thread = kNobody, pc = 0, bars = 0, arrives = 0, time = 0;
  bool atomic = false;
};
struct Cell {
  Access written, read, read_too;  // the last reader, and one of another warp
  uint16_t products = 0;           // that still read it
};

// The cells of a piece of memory, made when they are first touched.
struct Shadow {
  static constexpr size_t kPage = 512;
  std::vector<std::unique_ptr<Cell[]>> pages;

  Cell& at(uint64_t cell) {
    const size_t page = cell / kPage;
    if (page >= pages.size()) pages.resize(page + 1);
    if (!pages[page]) pages[page] = std::make_unique<Cell[]>(kPage);
    return pages[page][cell % kPage];
  }
};

// By the launch that runs.
enum Touched : uint8_t { kWritten = 1, kConstant = 2 };

// A buffer in global memory, or the shared memory of a block.
struct Region {
  std::string name;
  Space space = Space::global;
  uint64_t address = 0, bytes = 0;
  uint8_t *data = nullptr, *known = nullptr;  // `known`: 0 where nothing was written; null: none
  std::unique_ptr<uint8_t[], decltype(&std::free)> touched{nullptr, std::free};  // as Touched says
  Shadow shadow;
};

struct Block {
  uint32_t index = 0, cluster = 0, rank = 0, x = 0, y = 0;
  Launch* launch = nullptr;
  std::vector<Block*>* mates = nullptr;  // the blocks of its cluster
  std::vector<Warp> warps;
  std::vector<uint8_t> shared, shared_known;
  Region region;
  Known known, fenced;
  bool ended = false;
  Access visited;  // by another block of the cluster, after the most cluster barriers
};

struct Buffer {
  const char* name;
  uint64_t address, bytes;
  uint8_t* known;  // as of a Region
};

enum Order : int32_t { kGiven, kBackwards, kRandom };  // as in launch.py

// What launch.py gives.
struct Arguments {
  uint32_t grid[2], block_threads, cluster_size;
  uint64_t shared_bytes, params_bytes;
  const uint8_t* params;
  uint64_t buffers_count;
  Buffer* buffers;  // by address
  uint64_t clusters;
  Order order;
  uint32_t seed;
  int32_t lanes_clash, cooperative;
  uint64_t fuel;
};

struct Launch : Arguments {
  const Program* program;
  std::vector<Region> regions;
  uint32_t time = 0;
  uint32_t pc = 0;     // of the instruction that runs
  bool moved = false;  // since that was last asked, something that another thread may wait for
  std::map<std::pair<uint32_t, uint32_t>, std::string> races;
  std::unordered_map<const uint8_t*, Known> released;  // by the place of atomic operations

  Launch(const Program& of, const Arguments& arguments) : Arguments(arguments), program(&of) {
    for (const Buffer* b = buffers; b != buffers + buffers_count; ++b)
      regions.push_back({b->name, Space::global, b->address, b->bytes,
                         reinterpret_cast<uint8_t*>(b->address), b->known});
  }

  Region* find(uint64_t address, uint64_t width) {
    Region& last = regions.empty() ? none : regions[last_found];
    if (address - last.address < last.bytes && last.bytes - (address - last.address) >= width)
      return &last;
    const auto after = [](uint64_t a, const Region& region) { return a < region.address; };
    const auto end = std::upper_bound(regions.begin(), regions.end(), address, after);
    if (end == regions.begin()) return nullptr;
    Region& found = *(end - 1);
    const uint64_t at = address - found.address;
    if (at >= found.bytes || found.bytes - at < width) return nullptr;
    last_found = size_t(end - 1 - regions.begin());
    return &found;
  }

 private:
  Region none;
  size_t last_found = 0;
};

// ---- addresses ----

struct Place {
  Region* region;
  uint64_t at;
  uint8_t* data() const { return region->data + at; }
};

// An access to the shared memory of another block: it has to have begun, and, which is looked at
// when all have ended, to be there still.
inline void visit(Warp& w, int lane, Block& owner) {
  const Thread& me = w.lanes[lane];
  if (me.waits == 0)
    throw Fault(me.id, "access to the shared memory of a block that may not have begun");
  if (owner.visited.thread == kNobody || owner.visited.arrives < me.arrives)
    owner.visited = {me.id, w.launch->pc, me.bars, me.arrives, w.launch->time, false};
}

inline Place place_of(Warp& w, int lane, Space space, uint64_t address, uint64_t width) {
  Block& block = *w.block;
  const Thread& thread = w.lanes[lane];
  const auto wrong = [&](const std::string& what) {
    throw Fault(thread.id,
                what + " of " + std::to_string(width) + " bytes at " + std::to_string(address));
  };
  if (address % width != 0) wrong("misaligned access");
  if (space == Space::generic && address >= kWindow && address < 2 * kWindow)
    space = Space::cluster, address -= kWindow;
  if (space == Space::shared || space == Space::cluster) {
    const uint64_t rank = address >> 24, offset = (address & 0xffffff) - kShared;
    if (rank > block.mates->size()) wrong("access to a block outside of the cluster");
    Block& owner = rank == 0 ? block : *(*block.mates)[rank - 1];
    if (offset >= owner.region.bytes || owner.region.bytes - offset < width)
      wrong("access outside of shared memory (" + std::to_string(owner.region.bytes) + " bytes)");
    if (&owner != &block) visit(w, lane, owner);
    return {&owner.region, offset};
  }
  Region* found = w.launch->find(address, width);
  if (found == nullptr) wrong("access outside of every buffer");
  return {found, address - found->address};
}

// ---- races ----

inline bool knows(const Known& known, const Access& a, const Launch& launch) {
  const uint32_t block = a.thread / launch.block_threads;
  return known.has(By::thread, a.thread, a.time) || known.has(By::block, block, a.bars) ||
         known.has(By::cluster, block / launch.cluster_size, a.arrives);
}

// Whether something orders an earlier access before what a thread does now.
inline bool ordered(const Access& a, const Warp& w, int lane) {
  const Thread& me = w.lanes[lane];
  if (a.thread == kNobody || a.thread == me.id) return true;
  const Launch& launch = *w.launch;
  const uint32_t theirs = a.thread / launch.block_threads;
  if (theirs == w.block->index && a.bars < me.bars) return true;
  if (theirs / launch.cluster_size == w.block->cluster && a.arrives < me.ordered) return true;
  return knows(me.known, a, launch) || knows(w.block->known, a, launch);
}

inline void note_race(Warp& w, int lane, const Access& before, const char* kinds,
                      const Region& region, uint64_t at) {
  Launch& launch = *w.launch;
  const auto key = std::minmax(before.pc, launch.pc);
  if (launch.races.size() >= 64 || launch.races.count(key)) return;
  const auto who = [&](uint32_t id) {
    return "thread " + std::to_string(id % launch.block_threads) + " of block " +
           std::to_string(id / launch.block_threads);
  };
  launch.races[key] = std::to_string(before.pc) + " " + std::to_string(launch.pc) + " " + kinds +
                      " of " + region.name + " + " + std::to_string(at) + " by " +
                      who(before.thread) + " and " + who(w.lanes[lane].id);
}

// Checks a read or write of whole cells against those before it, and remembers it. Threads that
// store the same `bytes` with the same instruction do not race: a layout of Triton's that holds a
// number more than once has each of its threads store it.
inline void meet(Warp& w, int lane, const Place& place, uint64_t width, bool writes, bool atomic,
                 const uint8_t* bytes = nullptr) {
  const uint64_t granule = uint64_t(w.launch->program->granule);
  const Thread& me = w.lanes[lane];
  const Access now = {me.id, w.launch->pc, me.bars, me.arrives, w.launch->time, atomic};
  const auto foreign = [&](const Access& a) {
    return a.thread / w.launch->block_threads != w.block->index;
  };
  w.launch->moved |= writes;
  for (uint64_t cell = place.at / granule; cell * granule < place.at + width; ++cell) {
    Cell& c = place.region->shadow.at(cell);
    const uint64_t at = cell * granule;
    const bool again = bytes != nullptr && c.written.thread != kNobody && c.written.pc == now.pc;
    const bool same = again && at >= place.at &&
                      std::memcmp(place.region->data + at, bytes + (at - place.at), granule) == 0;
    const bool clash = again && w.launch->lanes_clash && c.written.time == now.time;
    if ((same || clash) && !ordered(c.written, w, lane)) continue;
    if (!(atomic && c.written.atomic) && !ordered(c.written, w, lane))
      note_race(w, lane, c.written, writes ? "write and write" : "write and read", *place.region,
                at);
    if (writes) {
      if (c.products > 0)
        note_race(w, lane, c.read, "read that is under way and write", *place.region, at);
      for (const Access* read : {&c.read, &c.read_too})
        if (!(atomic && read->atomic) && !ordered(*read, w, lane))
          note_race(w, lane, *read, "read and write", *place.region, at);
      c.written = now;
      if (c.products == 0) c.read = c.read_too = Access();
    } else {
      // A read by another block is not forgotten for one by this.
      if (c.read.thread / kLanes != now.thread / kLanes && !ordered(c.read, w, lane) &&
          (foreign(c.read) || !foreign(c.read_too) || ordered(c.read_too, w, lane)))
        c.read_too = c.read;
      else if (c.read_too.thread == kNobody && c.read.thread != now.thread)
        c.read_too = c.read;
      c.read = now;
    }
  }
}

// ---- reading and writing ----

inline void touch(Warp& w, int lane, const Place& place, uint64_t width, bool writes,
                  bool constant) {
  Region& region = *place.region;
  if (region.space != Space::global) return;
  if (!region.touched)  // pages that nobody touches take no memory
    region.touched.reset(static_cast<uint8_t*>(std::calloc(region.bytes, 1)));
  const uint8_t clash = writes ? kConstant : constant ? kWritten : 0;
  const uint8_t mark = writes ? kWritten : constant ? kConstant : 0;
  for (uint64_t k = place.at; k < place.at + width; ++k) {
    if (region.touched[k] & clash)
      throw Fault(w.lanes[lane].id, region.name + " + " + std::to_string(k) +
                                        " is written in a launch that reads it as constant");
    region.touched[k] |= mark;
  }
}

inline void check_known(Warp& w, int lane, const Place& place, uint64_t width) {
  if (place.region->known == nullptr) return;
  for (uint64_t k = place.at; k < place.at + width; ++k)
    if (!place.region->known[k])
      throw Fault(w.lanes[lane].id, "read of " + place.region->name + " + " + std::to_string(k) +
                                        ", where nothing was written");
}

inline Place to_read(Warp& w, int lane, const Instr& i, uint64_t address, uint64_t width) {
  const Place place = place_of(w, lane, i.space, address, width);
  check_known(w, lane, place, width);
  touch(w, lane, place, width, false, i.constant);
  if (!i.constant) meet(w, lane, place, width, false, i.strong);
  return place;
}
// Where the bytes go, unless they are given: then they are written.
inline Place to_write(Warp& w, int lane, const Instr& i, uint64_t address, uint64_t width,
                      const uint8_t* bytes = nullptr) {
  const Place place = place_of(w, lane, i.space, address, width);
  touch(w, lane, place, width, true, false);
  meet(w, lane, place, width, true, false, bytes);
  if (bytes != nullptr) std::memcpy(place.data(), bytes, width);
  if (place.region->known != nullptr) std::memset(place.region->known + place.at, 1, width);
  return place;
}

}  // namespace ptx

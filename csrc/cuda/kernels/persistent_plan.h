// How the work of the persistent kernels is cut, and what shared memory a block has: computed once,
// on the host, from sizes alone.
//
// The batch is cut into groups, which wait for nobody but themselves. The blocks of a group share
// the cells' units, the hidden units of the attention and the features of the values; each keeps
// the weights of its own in shared memory, and attends for some of the group's batch rows.
#pragma once

#include "problem.h"

namespace bahdanau_fast::gpu {

constexpr int kPersistentThreads = 256, kPersistentWarps = kPersistentThreads / kWarp;
// A product's tile: rows of weights that a warp multiplies at a time, in pieces of 16, and batch
// rows; K is taken in pieces of kDepth. Sizes are multiples of that.
constexpr int kTileRows = 64, kTileBatch = 8, kDepth = 32;
// Of the sums that a warp lays down: numbers, and from one warp's to the next.
constexpr int kTile = kTileRows * kTileBatch, kTileStride = kTile + kTileBatch;
// A block attends to so many numbers of keys or values in a step at the most: above, single steps,
// which cut the keys of a row, have more of the GPU.
// measured: gpu-h200.csv, "one launch: decoder (128,12 steps,200,512), forward + backward,
// bfloat16" takes less than "loop of launches: decoder (128,12 steps,200,512), forward + backward,
// bfloat16"; "one launch: decoder (16,12 steps,400,512), forward + backward, bfloat16" takes more.
LAB_CONSTEXPR int64_t kMostAttended = 1 << 17;
constexpr int64_t kLeastUnits = 4;  // of a block: fewer blocks meet faster

// Elements from one row of weights in shared memory to the next: rows begin in other banks.
__host__ __device__ constexpr int64_t pitch_of(int64_t columns) {
  return columns % 64 == 0 ? columns + kDepth : columns;
}

struct PersistentPlan {
  int groups = 0;     // 0: it does not fit
  int blocks = 0;     // of a group
  int rows = 0;       // of the batch, of a group
  int sentences = 0;  // rows that a block attends for
  // Of a block: units of the cells, hidden units of the attention, features of the values.
  int units = 0, hidden = 0, features = 0;
  bool resident = false;  // keys and values stay in shared memory
  // Rows of the two weights in shared memory, without those that fill a piece of 16, and columns.
  int first_rows = 0, first_columns = 0, second_rows = 0, second_columns = 0;
  // Where what lies in shared memory begins, in bytes.
  int second = 0, own = 0, tokens = 0, vectors = 0, keys = 0, parts = 0, kept = 0;
  int bytes = 0;

  // Numbers of one kind that belong to the block's units, from a unit to the next: odd, so that
  // either index can be the fast one.
  __host__ __device__ int own_stride() const { return rows | 1; }
};

// For so many groups; `bytes` may be more than a GPU has.
inline PersistentPlan cut_in_groups(const Decoder& of, bool backward, int64_t groups,
                                    int64_t blocks, bool resident) {
  PersistentPlan plan;
  plan.rows = int(ceil_div(of.p.B, groups));
  plan.groups = int(ceil_div(of.p.B, plan.rows));
  const int64_t most = blocks / groups;
  plan.units = int(larger(kLeastUnits, ceil_div(of.H, most)));
  plan.blocks = int(larger(ceil_div(of.H, plan.units), smaller(most, plan.rows)));
  plan.hidden = int(ceil_div(of.p.H, plan.blocks));
  plan.features = int(ceil_div(of.p.Dv, plan.blocks));
  plan.sentences = int(ceil_div(plan.rows, plan.blocks));
  plan.resident = resident;
  const int64_t gates = of.gates() * plan.units;
  plan.first_rows = int(backward ? plan.features + plan.units : plan.hidden + gates);
  plan.first_columns = int(backward ? 4 * of.H : of.H);
  plan.second_rows = int(backward ? plan.units : gates);
  plan.second_columns = int(backward ? of.p.H : of.p.Dv);
  Carver from{nullptr};
  const auto place = [&](int64_t count, int64_t size) {
    const int64_t at = from.used;
    from.used += (count * size + 15) / 16 * 16;
    return int(at);
  };
  const auto weights = [&](int64_t rows, int64_t columns) {
    return place(ceil_div(rows, 16) * 16 * pitch_of(columns), 2);
  };
  weights(plan.first_rows, plan.first_columns);
  plan.second = weights(plan.second_rows, plan.second_columns);
  // Forward the four gates and the state, of an LSTM two; backward the gradients of those.
  const int64_t states = of.lstm ? 2 : 1;
  plan.own = place((backward ? states : 4 + states) * plan.units * plan.own_stride(), 4);
  plan.tokens = place(plan.rows, 4);
  plan.vectors = place(2 * of.p.H + (backward ? of.p.Dv : 0), 4);
  plan.keys = place(2 * of.p.Tk, 4);
  plan.parts = place(larger(kPersistentWarps * kTileStride, larger(of.p.H, of.p.Dv)), 4);
  plan.kept = place(resident ? plan.sentences * of.p.Tk * (of.p.H + of.p.Dv) : 0, 2);
  plan.bytes = int(smaller(from.used, 1 << 30));
  return plan;
}

// The plan whose blocks read least in a step, for a GPU that runs so many blocks at once, with so
// many bytes of shared memory each; without groups if there is none.
inline PersistentPlan plan_persistent(const Decoder& of, bool backward, int64_t blocks,
                                      int64_t shared) {
  PersistentPlan best;
  int64_t least = INT64_MAX;
  // All rows end together where tokens are written.
  const int64_t most = of.V > 0 ? 1 : smaller(blocks, ceil_div(of.p.B, kTileBatch));
  for (int64_t groups = 1; groups <= most; groups *= 2)
    for (const bool resident : {true, false}) {
      const PersistentPlan plan = cut_in_groups(of, backward, groups, blocks, resident);
      const int64_t attended = plan.sentences * of.p.Tk;
      if (plan.bytes > shared || attended * larger(of.p.H, of.p.Dv) > kMostAttended) continue;
      const int64_t reads =
          plan.rows * (ceil_div(plan.first_rows, kTileRows) * plan.first_columns +
                       ceil_div(plan.second_rows, kTileRows) * plan.second_columns) +
          (resident ? 0 : attended * (of.p.H + of.p.Dv));
      if (reads < least) least = reads, best = plan;
    }
  return best;
}

// Why there is none.
inline const char* why_no_plan(const Decoder& of, bool backward, int64_t blocks) {
  return plan_persistent(of, backward, blocks, 1 << 30).groups > 0
             ? "its weights do not fit into the GPU's shared memory"
             : "single steps have more of the GPU for so many keys and rows";
}

}  // namespace bahdanau_fast::gpu

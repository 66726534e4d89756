// How the work of the persistent kernels is cut, and what shared memory a block has: computed once,
// on the host, from sizes alone.
//
// The batch is cut into groups, which wait for nobody but themselves. The blocks of a group share
// the cells' units, the hidden units of the attention and the features of the values; a block keeps
// the weights of its share in shared memory, and attends for some of the group's batch rows.
#pragma once

#include "problem.h"

namespace bahdanau_fast::gpu {

constexpr int kPersistentThreads = 256, kPersistentWarps = kPersistentThreads / kWarp;
// A product's tile: rows of weights that a warp multiplies at a time, in pieces of 16, and batch
// rows; K is taken in pieces of kDepth. Sizes are multiples of that.
constexpr int kTileRows = 64, kTileBatch = 8, kDepth = 32;
constexpr int kTileStride = (kTileRows + 1) * kTileBatch;  // from one warp's sums to the next
// A block attends to so many numbers of keys or values in a step at the most: above, single steps,
// which cut the keys of a row, have more of the GPU.
// measured: gpu-h200.csv, "one launch: decoder (128,12 steps,200,512), forward + backward,
// bfloat16" takes less than "loop of launches: decoder (128,12 steps,200,512), forward + backward,
// bfloat16"; "one launch: decoder (16,12 steps,400,512), forward + backward, bfloat16" takes more.
constexpr int64_t kMostAttended = 1 << 17;
constexpr int64_t kLeastUnits = 4;  // of a block: fewer blocks meet faster

// Elements from one row of weights in shared memory to the next: rows begin in other banks.
__host__ __device__ constexpr int64_t pitch_of(int64_t columns) {
  return columns % 64 == 0 ? columns + kDepth : columns;
}

// Rows of a weight that a block has in shared memory, without those that fill a piece of 16.
struct SharedWeight {
  int rows = 0, columns = 0, offset = 0;  // in bytes

  int64_t bytes() const { return ceil_div(rows, 16) * 16 * pitch_of(columns) * 2; }
};

struct PersistentPlan {
  int groups = 0;     // 0: it does not fit
  int blocks = 0;     // of a group
  int rows = 0;       // of the batch, of a group
  int sentences = 0;  // rows that a block attends for
  // Of a block: units of the cells, hidden units of the attention, features of the values.
  int units = 0, hidden = 0, features = 0;
  bool resident = false;  // keys and values stay in shared memory
  SharedWeight first, second;
  // Offsets in shared memory, in bytes.
  int unit_values = 0, tokens = 0, vectors = 0, scores = 0, parts = 0, resident_rows = 0;
  int bytes = 0;

  // From one of the block's units to the next in unit_values: odd, so that either index can be the
  // fast one.
  __host__ __device__ int unit_stride() const { return rows | 1; }
};

// For so many groups; `bytes` may be more than a GPU has.
inline PersistentPlan cut_in_groups(const Decoder& d, int64_t groups, int64_t blocks,
                                    bool resident) {
  PersistentPlan plan;
  plan.rows = int(ceil_div(d.p.B, groups));
  plan.groups = int(ceil_div(d.p.B, plan.rows));
  const int64_t most = blocks / groups;
  plan.units = int(larger(kLeastUnits, ceil_div(d.H, most)));
  plan.blocks = int(larger(ceil_div(d.H, plan.units), smaller(most, plan.rows)));
  plan.hidden = int(ceil_div(d.p.H, plan.blocks));
  plan.features = int(ceil_div(d.p.Dv, plan.blocks));
  plan.sentences = int(ceil_div(plan.rows, plan.blocks));
  plan.resident = resident;
  const int gates = int(d.gates()) * plan.units;
  plan.first = d.backward ? SharedWeight{plan.features + plan.units, int(4 * d.H)}
                          : SharedWeight{plan.hidden + gates, int(d.H)};
  plan.second =
      d.backward ? SharedWeight{plan.units, int(d.p.H)} : SharedWeight{gates, int(d.p.Dv)};
  Carver from{nullptr};
  const auto offset = [&](int64_t bytes) {
    const int64_t offset = from.used;
    from.take<char>(bytes);
    return int(offset);
  };
  plan.first.offset = offset(plan.first.bytes());
  plan.second.offset = offset(plan.second.bytes());
  // Forward the four gates and the state, of an LSTM two; backward the gradients of those.
  const int64_t states = d.lstm ? 2 : 1;
  plan.unit_values =
      offset((d.backward ? states : 4 + states) * plan.units * plan.unit_stride() * 4);
  plan.tokens = offset(plan.rows * 4);
  plan.vectors = offset((2 * d.p.H + (d.backward ? d.p.Dv : 0)) * 4);
  plan.scores = offset(2 * d.p.Tk * 4);
  plan.parts = offset(larger(kPersistentWarps * kTileStride, larger(d.p.H, d.p.Dv)) * 4);
  plan.resident_rows = offset(resident ? plan.sentences * d.p.Tk * (d.p.H + d.p.Dv) * 2 : 0);
  plan.bytes = int(smaller(from.used, 1 << 30));
  return plan;
}

// The plan whose blocks read least in a step, for a GPU that runs so many blocks at once, with so
// many bytes of shared memory each; without groups if there is none.
inline PersistentPlan plan_persistent(const Decoder& d, int64_t blocks, int64_t shared) {
  PersistentPlan best;
  int64_t least = INT64_MAX;
  // All rows end together where tokens are written.
  const int64_t most = d.V > 0 ? 1 : smaller(blocks, ceil_div(d.p.B, kTileBatch));
  for (int64_t groups = 1; groups <= most; groups *= 2)
    for (const bool resident : {true, false}) {
      const PersistentPlan plan = cut_in_groups(d, groups, blocks, resident);
      const int64_t attended = plan.sentences * d.p.Tk;
      if (plan.bytes > shared || attended * larger(d.p.H, d.p.Dv) > kMostAttended) continue;
      const int64_t reads =
          plan.rows * (ceil_div(plan.first.rows, kTileRows) * plan.first.columns +
                       ceil_div(plan.second.rows, kTileRows) * plan.second.columns) +
          (resident ? 0 : attended * (d.p.H + d.p.Dv));
      if (reads < least) least = reads, best = plan;
    }
  return best;
}

inline const char* why_no_plan(const Decoder& d, int64_t blocks) {
  return plan_persistent(d, blocks, 1 << 30).groups > 0
             ? "its weights do not fit into the GPU's shared memory"
             : "single steps have more of the GPU for so many keys and rows";
}

}  // namespace bahdanau_fast::gpu

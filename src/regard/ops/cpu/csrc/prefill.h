// What prefill and its gradient share: which keys each query sees, and the scores of a row.
//
// For each row b of the batch and each key/value head g, the queries of its n = H/G query heads form T n rows: row r is query
// r / n of query head g n + r % n, so that neighbouring rows see almost the same keys. A block consists of as many rows as fit
// into the L2 cache, divided into groups of kRows rows; a tile consists of kTilePanels panels of kPanel keys. What the mask
// hides from all rows of a group is not multiplied.
#pragma once
#include "arguments.h"
#include "entry.h"
#include "scratch.h"
#include "softmax_rows.h"
#include "tasks.h"

constexpr int64_t kTileKeys = 256, kTilePanels = kTileKeys / kPanel;
constexpr int64_t kMaxBlockRows = 258;  // with a tile, their scores, weights, queries and sums fit into the L2 cache
constexpr int64_t kMaxGroups = kMaxBlockRows / kRows;

// Some neighbouring rows of one key/value head.
struct Block {
  int64_t b, g, first, rows, n;
  int64_t head(int64_t r) const { return g * n + (first + r) % n; }
  int64_t query(int64_t r) const { return (first + r) / n; }
};

// The block with a number among those of `step` rows each.
inline Block block_of(const Prefill* call, int64_t pair, int64_t number, int64_t step) {
  int64_t n = call->H / call->G, first = number * step;
  return {pair / call->G, pair % call->G, first, std::min(step, call->T * n - first), n};
}

// Divides a piece of memory into arrays that begin at cache lines; without memory it measures them.
class Pieces {
 public:
  explicit Pieces(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(int64_t n) {
    char* piece = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += round_up(n * int64_t(sizeof(T)), 64);
    return reinterpret_cast<T*>(piece);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

// ---- the mask

// What is known of the positions of the keys of a panel.
struct PanelBounds {
  int64_t smallest, largest;  // of the keys that exist
  int64_t is_full;            // whether no slot is empty
};

// The positions of the keys in whole panels, -1 in empty slots, and the bounds of each panel.
struct Keys {
  int64_t panels;
  int64_t rows;  // B, or 1 if the positions are shared
  int64_t* positions;
  PanelBounds* bounds;

  Keys(const Prefill* call, Pieces& pieces)
      : panels((call->S + kPanel - 1) / kPanel),
        rows(call->k_positions.shape[2]),
        positions(pieces.take<int64_t>(rows * panels * kPanel)),
        bounds(pieces.take<PanelBounds>(rows * panels)) {}
  int64_t at(int64_t b, int64_t panel) const { return std::min(b, rows - 1) * panels + panel; }

  // Writes both for one panel.
  void survey(const Prefill* call, int64_t row, int64_t panel) {
    int64_t index = at(row, panel);
    PanelBounds found = {INT64_MAX, -1, 1};
    for (int64_t j = 0, key = panel * kPanel; j < kPanel; j++, key++) {
      int64_t position = key < call->S ? call->k_positions.data[row * call->S + key] : -1;
      positions[index * kPanel + j] = position;
      found.largest = std::max(found.largest, position);
      found.smallest = std::min(found.smallest, position < 0 ? INT64_MAX : position);
      found.is_full &= position >= 0;
    }
    bounds[index] = found;
  }
};

// The ranges of positions that a query sees.
struct Ranges {
  const int64_t *starts, *stops;
  int64_t n;
  bool is(const Ranges& other) const { return starts == other.starts && stops == other.stops; }
};

inline const int64_t* mask_row(const Array<int64_t>& x, int64_t b, int64_t h, int64_t t) {
  int64_t row = std::min(b, x.shape[0] - 1) * x.shape[1] + std::min(h, x.shape[1] - 1);
  return x.data + (row * x.shape[2] + std::min(t, x.shape[2] - 1)) * x.shape[3];
}

inline Ranges ranges_of(const Prefill* call, const Block& block, int64_t r) {
  int64_t b = block.b, h = block.head(r), t = block.query(r);
  return {mask_row(call->starts, b, h, t), mask_row(call->stops, b, h, t), call->starts.shape[3]};
}

enum Seen : uint8_t { kNothing, kPart, kEverything };

// How much of a panel lies within ranges; kEverything only if it lies within one of them.
inline Seen seen_of_panel(const Ranges& ranges, const PanelBounds& bounds) {
  Seen seen = kNothing;
  for (int64_t i = 0; i < ranges.n; i++) {
    int64_t start = ranges.starts[i], stop = ranges.stops[i];
    if (start > bounds.largest || stop <= bounds.smallest) continue;
    if (start <= bounds.smallest && stop > bounds.largest && bounds.is_full) return kEverything;
    seen = kPart;
  }
  return seen;
}

// What the groups of a block see of one tile after another.
class Survey {
 public:
  int64_t groups;
  int64_t starts[kMaxGroups], stops[kMaxGroups];  // the first panel of the tile that a group sees, and one past the last one
  Seen seen[kMaxGroups][kTilePanels];             // what all rows of a group see of a panel

  explicit Survey(const Prefill* call) : call_(call), reach_(2 * call->starts.shape[3]) {}

  // Begins a block: range i of `reach_` spans range i of all rows.
  void begin(const Block& block) {
    block_ = block;
    groups = (block.rows + kRows - 1) / kRows;
    int64_t n = call_->starts.shape[3], *lows = reach_, *highs = lows + n;
    std::fill(lows, highs, INT64_MAX);
    std::fill(highs, highs + n, 0);
    Ranges previous = {};
    for (int64_t r = 0; r < block.rows; r++) {
      Ranges ranges = ranges_of(call_, block, r);
      if (ranges.is(std::exchange(previous, ranges))) continue;
      for (int64_t i = 0; i < n; i++) {
        if (ranges.starts[i] >= ranges.stops[i]) continue;
        lows[i] = std::min(lows[i], ranges.starts[i]);
        highs[i] = std::max(highs[i], ranges.stops[i]);
      }
    }
  }

  // Surveys the tile that begins at a panel; returns whether any group sees any of it.
  bool tile(const Keys& keys, int64_t first) {
    int64_t n = call_->starts.shape[3], panels = std::min(kTilePanels, keys.panels - first);
    const PanelBounds* bounds = keys.bounds + keys.at(block_.b, first);
    Ranges reach = {reach_, reach_ + n, n};
    bool is_visible = false;
    for (int64_t p = 0; p < panels; p++) is_visible |= seen_of_panel(reach, bounds[p]) != kNothing;
    if (!is_visible) return false;
    is_visible = false;
    for (int64_t group = 0; group < groups; group++) {
      starts[group] = kTilePanels, stops[group] = 0;
      for (int64_t p = 0; p < kTilePanels; p++) {
        seen[group][p] = p < panels ? seen_by_group(group, bounds[p]) : kNothing;
        if (seen[group][p] != kNothing) starts[group] = std::min(starts[group], p), stops[group] = p + 1;
      }
      is_visible |= stops[group] > 0;
    }
    return is_visible;
  }

 private:
  Seen seen_by_group(int64_t group, const PanelBounds& bounds) const {
    Seen least = kEverything, most = kNothing;
    Ranges previous = {};
    for (int64_t r = group * kRows; r < std::min(block_.rows, (group + 1) * kRows); r++) {
      Ranges ranges = ranges_of(call_, block_, r);
      if (ranges.is(std::exchange(previous, ranges))) continue;
      Seen seen = seen_of_panel(ranges, bounds);
      least = std::min(least, seen), most = std::max(most, seen);
    }
    return most == kNothing ? kNothing : least == kEverything ? kEverything : kPart;
  }

  const Prefill* call_;
  Scratch<int64_t> reach_;
  Block block_;
};

// ---- rows

// Applies the softcap and ALiBi, and the scale before them, to n scores of a row with keys at `positions`, and returns the
// scale that is still to be applied: 1, or the scale itself where it is positive and nothing comes after it, because it then
// keeps the order of the scores.
inline float adjust_scores(const Prefill* call, const Block& block, int64_t r, const int64_t* positions, float* s, int64_t n) {
  float scale = call->scale, cap = call->softcap;
  bool has_slopes = call->slopes.shape[3] > 0;
  if (scale > 0 && cap == 0 && !has_slopes) return scale;
  for (int64_t j = 0; j < n; j += kLanes) {
    vf x = load(s + j) * scale;
    store(s + j, cap > 0 ? cap * tanh(x / cap) : x);
  }
  if (has_slopes) {
    const Array<int64_t>& q = call->q_positions;
    int64_t position = q.data[std::min(block.b, q.shape[2] - 1) * call->T + block.query(r)];
    float slope = call->slopes.data[block.head(r)];
    for (int64_t j = 0; j < n; j++) {
      int64_t distance = position - positions[j];
      s[j] -= slope * float(call->symmetric && distance < 0 ? -distance : distance);
    }
  }
  return 1.0f;
}

// Copies n numbers as numbers of another type.
template <typename To, typename From>
inline void convert_row(const From* x, int64_t n, To* y) {
  if constexpr (std::is_same_v<To, From>) {
    std::memcpy(y, x, n * sizeof(To));
  } else {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, load(x + i));
    if (i < n) store_first(y + i, load_first(x + i, n - i), n - i);
  }
}

// The numbers [d] of a batch row, head and token.
template <typename T>
inline const T* row_at(const Strided& x, int64_t b, int64_t h, int64_t t) {
  return static_cast<const T*>(x.data) + b * x.steps[0] + h * x.steps[1] + t * x.steps[2];
}

// Writes the queries of a block, or another such tensor [B,H,T,D], to `out` [rows, step].
template <typename T, typename F>
inline void load_block(const Strided& x, const Block& block, int64_t D, F* out, int64_t step) {
  for (int64_t r = 0; r < block.rows; r++) {
    convert_row(row_at<T>(x, block.b, block.head(r), block.query(r)), D, out + r * step);
  }
}

// Writes n sums times a factor, in fp32 or in another type, from index `at` of `out` on.
template <typename T>
inline void write_row(const float* sums, float factor, int64_t n, void* out, int64_t at, bool is_wide) {
  auto write = [&](auto* y) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, load(sums + i) * factor);
    if (i < n) store_first(y + i, load_first(sums + i, n - i) * factor, n - i);
  };
  is_wide ? write(static_cast<float*>(out) + at) : write(static_cast<T*>(out) + at);
}

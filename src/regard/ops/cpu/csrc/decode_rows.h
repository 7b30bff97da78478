// What decoding does for the rows of a head, whatever its keys and values are stored as: which keys a row sees, the terms
// that are added to scores, the online softmax, and the results.
//
// All queries that use a key/value head are the R = H/G * T rows of one block: row r is query r % T of query head g H/G + r / T.
// Keys are read in tiles; a tile is the slots first <= j < last.
#pragma once
#include <algorithm>
#include <cmath>

#include "arguments.h"
#include "decode.h"
#include "scratch.h"
#include "simd.h"

constexpr float kHidden = -INFINITY;  // the score of a key that a row does not see

struct Tile {
  int64_t first, last;
  int64_t size() const { return last - first; }
};

// The rows of key/value head g in row b of the batch: those of its query heads, one after another.
struct Head {
  int64_t b, g, heads, T;
  int64_t first() const { return g * heads; }
  int64_t rows() const { return heads * T; }

  // Calls do_row(r, h, t) for each row r, which is query t of query head h.
  template <typename DoRow>
  void each_row(DoRow do_row) const {
    int64_t r = 0;
    for (int64_t h = first(); h < first() + heads; h++) {
      for (int64_t t = 0; t < T; t++) do_row(r++, h, t);
    }
  }
};

// The row of an array [b,h,t,n] for a query; a dimension of 1 is shared.
template <typename N>
const N* row_of(const Array<N>& x, int64_t b, int64_t h, int64_t t) {
  b = std::min(b, x.shape[0] - 1), h = std::min(h, x.shape[1] - 1), t = std::min(t, x.shape[2] - 1);
  return x.data + ((b * x.shape[1] + h) * x.shape[2] + t) * x.shape[3];
}

// Whether all queries of a row of the batch share one row of an array [b,h,t,n].
template <typename N>
bool has_one_row(const Array<N>& x) {
  return x.shape[1] == 1 && x.shape[2] == 1;
}

inline int64_t key_position(const Decode& call, int64_t b, int64_t slot) {
  int64_t rows = call.k_positions.shape[2], S = call.k_positions.shape[3];
  return S == 0 ? call.origin + slot : call.k_positions.data[std::min(b, rows - 1) * S + slot];
}

// Whether positions follow from the slots and masks are ranges, so that whole tiles can be judged.
inline bool judges_tiles(const Decode& call) { return call.k_positions.shape[3] == 0 && call.visible.shape[3] == 0; }

enum class Coverage { none, some, all };

// Which rows see which keys of a tile at contiguous positions: every row all of them, no row any, or some.
inline Coverage tile_coverage(const Decode& call, const Head& head, const Tile& tile) {
  int64_t p0 = call.origin + tile.first, p1 = call.origin + tile.last;
  bool every = true, some = false, shared = has_one_row(call.starts) && has_one_row(call.stops);
  Head judged{head.b, head.g, shared ? 1 : head.heads, shared ? 1 : head.T};
  judged.each_row([&](int64_t, int64_t h, int64_t t) {
    const int64_t *start = row_of(call.starts, head.b, h, t), *stop = row_of(call.stops, head.b, h, t);
    bool whole = false;
    for (int64_t i = 0; i < call.starts.shape[3]; i++) {
      whole |= start[i] <= p0 && p1 <= stop[i];
      some |= start[i] < p1 && p0 < stop[i];
    }
    every &= whole;
  });
  return every && p0 >= 0 ? Coverage::all : some ? Coverage::some : Coverage::none;
}

// Sets visible[j - first] to whether query t of head h sees key j of a tile.
inline void row_visibility(const Decode& call, int64_t b, int64_t h, int64_t t, const Tile& tile, bool* visible) {
  if (call.visible.shape[3]) {
    std::memcpy(visible, row_of(call.visible, b, h, t) + tile.first, tile.size());
    return;
  }
  const int64_t *start = row_of(call.starts, b, h, t), *stop = row_of(call.stops, b, h, t);
  for (int64_t j = tile.first; j < tile.last; j++) {
    int64_t p = key_position(call, b, j);
    bool inside = false;
    for (int64_t i = 0; i < call.starts.shape[3]; i++) inside |= start[i] <= p && p < stop[i];
    visible[j - tile.first] = inside && p >= 0;
  }
}

inline bool has_score_terms(const Decode& call) {
  return call.softcap != 0 || call.slopes.shape[3] != 0 || call.bias.shape[3] != 0;
}

// Applies the softcap, ALiBi and the bias to the scores s [rows, distance] of the n keys at slots index[0], index[1], ...
inline void add_score_terms(const Decode& call, const Head& head, const int64_t* index, int64_t n, float* s, int64_t distance) {
  float cap = float(call.softcap);
  head.each_row([&](int64_t r, int64_t h, int64_t t) {
    float* row = s + r * distance;
    if (cap > 0) {
      for (int64_t c = 0; c < n; c++) row[c] = cap * std::tanh(row[c] / cap);
    }
    if (call.slopes.shape[3]) {
      float slope = call.slopes.data[h];
      int64_t q = row_of(call.q_positions, 0, 0, head.b)[t];
      for (int64_t c = 0; c < n; c++) {
        int64_t behind = q - key_position(call, head.b, index[c]);
        row[c] -= slope * float(call.symmetric ? std::abs(behind) : behind);
      }
    }
    if (call.bias.shape[3]) {
      const float* bias = row_of(call.bias, head.b, h, t);
      for (int64_t c = 0; c < n; c++) row[c] += bias[index[c]];
    }
  });
}

// The results of the rows of a task so far: the sums of weighted values [rows, width] relative to the largest score of each
// row, that score, and the sum of the weights.
class RowSums {
 public:
  RowSums(int64_t rows, int64_t E)
      : width((E + kLanes - 1) / kLanes * kLanes), values(rows * width), tops_(rows), totals_(rows), rows_(rows) {}

  void clear() {
    std::memset(values.data(), 0, rows_ * width * sizeof(float));
    for (int64_t r = 0; r < rows_; r++) tops_[r] = -INFINITY, totals_[r] = 0;
  }

  // Replaces n scores of each of some rows by the weights exp(s - top), where top is the largest score of the row so far,
  // and rescales its sums to it. Up to kLanes - 1 numbers behind a row's scores are overwritten.
  void weigh(float* s, int64_t distance, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++, s += distance) {
      int64_t whole = (n + kLanes - 1) / kLanes * kLanes;
      for (int64_t c = n; c < whole; c++) s[c] = kHidden;
      vf best = splat(tops_[r]);
      for (int64_t c = 0; c < whole; c += kLanes) best = larger(load(s + c), best);
      float top = largest(best);
      if (top > tops_[r]) {
        float correction = exp1(tops_[r] - top), *row = values.data() + r * width;
        totals_[r] *= correction;
        for (int64_t e = 0; e < width; e += kLanes) store(row + e, load(row + e) * correction);
        tops_[r] = top;
      }
      vf added = {};
      for (int64_t c = 0; c < whole; c += kLanes) {
        vf x = load(s + c);
        // where every score is -inf or NaN, the weights are 0, or stay NaN
        vf weight = top == -INFINITY ? (x == x ? vf{} : x) : exp(x - top);
        store(s + c, weight);
        added += weight;
      }
      totals_[r] += sum(added);
    }
  }

  // Writes out [rows, E] and lse [rows]; a row that saw no key has the output 0 and the lse -inf.
  void write(int64_t rows, int64_t E, float* out, float* lse) {
    for (int64_t r = 0; r < rows; r++) {
      double total = totals_[r];
      lse[r] = total != 0 ? float(double(tops_[r]) + std::log(total)) : -INFINITY;
      const float* row = values.data() + r * width;
      if (total != 0) {  // a branch in the loop would keep it from being vectorized
        for (int64_t e = 0; e < E; e++) out[r * E + e] = float(row[e] / total);
      } else {
        std::fill_n(out + r * E, E, 0.0f);
      }
    }
  }

  const int64_t width;
  Scratch<float> values;

 private:
  Scratch<float> tops_;
  Scratch<double> totals_;
  int64_t rows_;
};

// Takes the tasks of a call until none is left: `attend(head, first_tile, last_tile, sums)` adds the tiles of a split. The
// thread that finishes last joins the splits.
template <typename Attend>
void run_splits(Decode* call, int64_t tile_keys, RowSums& sums, Attend attend) {
  int64_t G = call->q.shape[1], R = call->q.shape[2], E = call->out.shape[3];
  int64_t heads = call->out.shape[0], P = call->out.shape[1];
  int64_t tiles = (call->S + tile_keys - 1) / tile_keys, share = (tiles + P - 1) / P;
  for (int64_t task; (task = take_task(call)) < heads * P;) {
    int64_t head = task / P, p = task % P;
    sums.clear();
    attend(Head{head / G, head % G, R / call->T, call->T}, p * share, std::min(tiles, (p + 1) * share), sums);
    sums.write(R, E, call->out.data + task * R * E, call->lse.data + task * R);
    if (finish_task(call) == heads * P - 1 && P > 1) {
      for (int64_t i = 0; i < heads; i++) {
        for (int64_t r = 0; r < R; r++) {
          join_row(call->out.data + (i * P * R + r) * E, call->lse.data + i * P * R + r, P, E, R * E, R);
        }
      }
      finish_task(call);
    }
  }
}

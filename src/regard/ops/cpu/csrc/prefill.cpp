// The entry of prefill: blocks of queries attend to tiles of packed keys. For each tile, a group of rows computes the scores
// of the panels that it sees, converts them to weights (online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867), and
// multiplies the weights with the values from the first to the last of these panels.
#include "prefill.h"

// The keys and values of a call, packed for the products: keys [B G, panels, depth, kPanel], which a product sums over D, and
// values [B G, panels of E, length, kPanel].
template <typename F>
struct Packed {
  Pieces pieces;
  Keys keys;
  int64_t depth, length, width, heads;
  F *k, *v;

  explicit Packed(const Prefill* call)
      : pieces(call->memory),
        keys(call, pieces),
        depth(round_up(call->D, kEach<F>)),
        length(keys.panels * kPanel),
        width(round_up(call->E, kPanel)),
        heads(call->B * call->G),
        k(pieces.take<F>(heads * length * depth)),
        v(pieces.take<F>(heads * length * width)) {}

  template <typename T>
  void pack(const Prefill* call, int64_t task) {
    int64_t head = task / keys.panels, panel = task % keys.panels, b = head / call->G, g = head % call->G;
    int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, call->S - first);
    pack_columns(row_at<T>(call->k, b, g, first), call->k.steps[2], count, call->D, k + (head * length + first) * depth);
    F* out = v + head * length * width + first * kPanel;
    pack_rows(row_at<T>(call->v, b, g, first), call->v.steps[2], count, call->E, out, length * kPanel);
    if (g == 0 && b < keys.rows) keys.survey(call, b, panel);
  }
};

// The memory of one thread: the queries, scores, weights and sums of a block.
template <typename F>
struct ForwardBlock {
  Scratch<F> q;                 // [rows, depth]
  Scratch<float> s;             // [rows, kTileKeys]
  Scratch<F> rounded;           // [rows, kTileKeys] where weights are rounded
  F* p;                         // the weights, which replace the scores where they are not rounded
  Scratch<float> acc;           // [rows, width]
  Scratch<float> tops, totals;  // of each row, the largest score and the sum of weights

  ForwardBlock(const Packed<F>& packed, int64_t rows)
      : q(rows * packed.depth),
        s(rows * kTileKeys, false),
        rounded(kEach<F> == 1 ? 0 : rows * kTileKeys, false),
        acc(rows * packed.width, false),
        tops(rows),
        totals(rows) {
    if constexpr (kEach<F> == 1) {
      p = s.data();
    } else {
      p = rounded.data();
    }
  }
};

// Converts n scores s of row r to weights e^(scale s - top), where top is the largest scaled score of the row so far, and
// rescales the earlier sums to this maximum.
template <typename F>
static void online_softmax(ForwardBlock<F>& m, int64_t r, int64_t at, int64_t n, float scale, int64_t width) {
  const float* s = m.s + r * kTileKeys + at;
  float largest = scale * largest_score(s, n);
  if (largest > m.tops[r]) {
    float shrink = exp1(m.tops[r] - largest);
    m.totals[r] *= shrink;
    float* acc = m.acc + r * width;
    for (int64_t e = 0; e < width; e += kLanes) store(acc + e, load(acc + e) * shrink);
    m.tops[r] = largest;
  }
  float base = m.tops[r] > -INFINITY ? m.tops[r] : 0.0f;
  m.totals[r] += weigh_scores(s, m.p + r * kTileKeys + at, n, scale, base);
}

// Adds the weighted values of the tile that begins at panel `first` to the sums of a block.
template <typename F>
static void attend_tile(const Prefill* call, const Packed<F>& packed, const Block& block, int64_t first, const Survey& survey,
                        ForwardBlock<F>& m) {
  int64_t depth = packed.depth, length = packed.length, width = packed.width, pair = block.b * call->G + block.g;
  const F *k = packed.k + pair * length * depth, *v = packed.v + pair * length * width;
  for (int64_t panel = 0; panel < kTilePanels; panel++) {
    for (int64_t group = 0; group < survey.groups; group++) {
      if (survey.seen[group][panel] == kNothing) continue;
      const F* q = m.q + group * kRows * depth;
      float* s = m.s + group * kRows * kTileKeys + panel * kPanel;
      multiply_long(q, depth, k + (first + panel) * kPanel * depth, depth, s, kTileKeys);
    }
  }
  const int64_t* positions = packed.keys.positions + packed.keys.at(block.b, first) * kPanel;
  for (int64_t r = 0; r < block.rows; r++) {
    int64_t group = r / kRows, start = survey.starts[group], stop = survey.stops[group], n = (stop - start) * kPanel;
    if (start >= stop) continue;
    float* s = m.s + r * kTileKeys;
    float scale = adjust_scores(call, block, r, positions + start * kPanel, s + start * kPanel, n);
    for (int64_t panel = start; panel < stop; panel++) {
      if (survey.seen[group][panel] == kEverything) continue;
      Ranges ranges = ranges_of(call, block, r);
      hide_outside(s + panel * kPanel, positions + panel * kPanel, ranges.starts, ranges.stops, ranges.n);
    }
    online_softmax(m, r, start * kPanel, n, scale, width);
  }
  for (int64_t e = 0; e < call->E; e += kPanel) {
    for (int64_t group = 0; group < survey.groups; group++) {
      int64_t start = survey.starts[group], n = (survey.stops[group] - start) * kPanel, r = group * kRows;
      if (n <= 0) continue;
      const F* values = v + e * length + (first + start) * kPanel * kPanel;
      multiply<true>(m.p + r * kTileKeys + start * kPanel, kTileKeys, values, n, m.acc + r * width + e, width, call->E - e);
    }
  }
}

// Divides the sums of each row of a block by the total of its weights and writes them; a row that saw no key gets the output
// 0, the largest score 0 and the total 0.
template <typename T, typename F>
static void write_block(const PrefillForward* call, const Block& block, ForwardBlock<F>& m, int64_t width) {
  for (int64_t r = 0; r < block.rows; r++) {
    int64_t row = (block.b * call->H + block.head(r)) * call->T + block.query(r);
    bool sees_nothing = m.totals[r] == 0;
    if (sees_nothing) std::fill_n(m.acc + r * width, width, 0.0f);
    call->max_score.data[row] = sees_nothing ? 0.0f : m.tops[r];
    call->scaled_sum.data[row] = m.totals[r];
    float factor = sees_nothing ? 0.0f : 1 / m.totals[r];
    write_row<T>(m.acc + r * width, factor, call->E, call->out, row * call->E, call->is_wide);
  }
}

// Keys and values are packed first, one panel a task; then each task is a block, beginning with the last queries.
template <typename T>
static void prefill(PrefillForward* call) {
  using F = Factor<T>;
  Packed<F> packed(call);
  if (call->memory == nullptr) {
    call->bytes = packed.pieces.bytes();
    return;
  }
  int64_t pairs = packed.heads, rows = call->T * (call->H / call->G);
  int64_t step = std::min(kMaxBlockRows, round_up((pairs * rows + call->threads - 1) / call->threads, kRows));
  int64_t blocks = (rows + step - 1) / step, packing = pairs * packed.keys.panels;
  ForwardBlock<F> m(packed, step);
  Survey survey(call);
  for (int64_t task; (task = take_task(call)) < packing + pairs * blocks; finish_task(call)) {
    if (task < packing) {
      packed.template pack<T>(call, task);
      continue;
    }
    wait_until_finished(call, packing);
    int64_t index = task - packing;
    Block block = block_of(call, index % pairs, blocks - 1 - index / pairs, step);
    load_block<T>(call->q, block, call->D, m.q.data(), packed.depth);
    survey.begin(block);
    std::fill_n(m.acc.data(), step * packed.width, 0.0f);
    std::fill_n(m.tops.data(), step, -INFINITY);
    std::fill_n(m.totals.data(), step, 0.0f);
    for (int64_t first = 0; first < packed.keys.panels; first += kTilePanels) {
      if (survey.tile(packed.keys, first)) attend_tile(call, packed, block, first, survey, m);
    }
    write_block<T>(call, block, m, packed.width);
  }
}
REGARD_ENTRIES(prefill, PrefillForward, prefill)

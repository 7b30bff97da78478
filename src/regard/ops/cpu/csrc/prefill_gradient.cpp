// The entry of the gradient of prefill: blocks of rows are combined with one panel of keys after another, and the weights are
// computed again.
//
//   p = e^(s - m) / l        dp = dO v^T        ds = p (dp - shift) slope        shift = dO O - dlse
//   dv += p^T dO             dk += ds^T q       dq += ds k
//
// Here m is the largest score of a row, l the sum of e^(s - m), dO the gradient of the output O, and slope the derivative of
// the softcap. dv and dk are summed transposed, as dv^T = dO^T p and dk^T = q^T ds: p and ds [rows, kPanel] then are right
// factors, and only q and dO are transposed, once per block.
//
// Source: Dao et al. 2022 (arXiv 2205.14135), algorithm 4; Dao 2023 (arXiv 2307.08691), section 3.1.
#include "prefill.h"

// About the largest number of rows that one product sums. A sum of partial sums rounds less than one long sum, and so many
// rows of a panel stay in the L1 cache.
constexpr int64_t kRowsPerSum = 60;
static_assert(kRowsPerSum % kRows == 0 && kRows % 2 == 0);

// How many tasks there should be, so that many threads have some. The number does not depend on the threads, because the
// tasks of one head sum its gradients of keys and values, which are then summed over the tasks.
constexpr int64_t kTasks = 32;

// What the threads of a call share: keys and values as columns of panels, for products over dimensions; keys as rows, for
// products over tokens; and the sums of the gradients of keys and values, transposed, of each split of the blocks.
template <typename F>
struct Shared {
  Pieces pieces;
  Keys keys;
  int64_t heads, length, step, blocks, splits;
  int64_t k_depth, v_depth, k_width, k_height, v_height;
  F *k, *v, *k_rows;  // [heads, panels, depth, kPanel] twice, and [heads, panels of D, length, kPanel]
  float *d_k, *d_v;   // [splits, heads, panels, height, kPanel]

  explicit Shared(const Prefill* call)
      : pieces(call->memory), keys(call, pieces), heads(call->B * call->G), length(keys.panels * kPanel) {
    int64_t n = call->H / call->G, rows = call->T * n;
    step = std::min(kMaxBlockRows, round_up(rows, kRows));
    blocks = (rows + step - 1) / step;
    splits = std::min({(kTasks + heads - 1) / heads, std::max<int64_t>(4, n), blocks});
    k_depth = round_up(call->D, kEach<F>), v_depth = round_up(call->E, kEach<F>), k_width = round_up(call->D, kPanel);
    k_height = round_up(call->D, kRows), v_height = round_up(call->E, kRows);
    k = pieces.take<F>(heads * length * k_depth);
    v = pieces.take<F>(heads * length * v_depth);
    k_rows = pieces.take<F>(heads * length * k_width);
    d_k = pieces.take<float>(splits * heads * length * k_height);
    d_v = pieces.take<float>(splits * heads * length * v_height);
  }

  template <typename T>
  void pack(const Prefill* call, int64_t task) {
    int64_t head = task / keys.panels, panel = task % keys.panels, b = head / call->G, g = head % call->G;
    int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, call->S - first), at = head * length + first;
    const T *x = row_at<T>(call->k, b, g, first), *y = row_at<T>(call->v, b, g, first);
    pack_columns(x, call->k.steps[2], count, call->D, k + at * k_depth);
    pack_columns(y, call->v.steps[2], count, call->E, v + at * v_depth);
    pack_rows(x, call->k.steps[2], count, call->D, k_rows + head * length * k_width + first * kPanel, length * kPanel);
    if (g == 0 && b < keys.rows) keys.survey(call, b, panel);
  }
};

// Rows of a block [rows, width] and their transpose [width, rows], with zeros around them.
template <typename F>
struct Rows {
  int64_t rows, width;
  Scratch<F> x, turned;

  Rows(int64_t step, int64_t size)
      : rows(round_up(step, kLanes * kEach<F>)),
        width(round_up(size, kLanes * kEach<F>)),
        x(rows * width),
        turned(round_up(width, kRows) * rows) {}

  // Loads the rows of a block from a tensor [B,H,T,n] of type T or fp32; `turn` transposes them.
  template <typename T>
  void load(const Strided& tensor, bool is_wide, const Block& block, int64_t n) {
    is_wide ? load_block<float>(tensor, block, n, x.data(), width) : load_block<T>(tensor, block, n, x.data(), width);
    std::memset((void*)(x + block.rows * width), 0, (rows - block.rows) * width * sizeof(F));
  }
  void turn() { transpose_matrix(x.data(), rows, width, turned.data()); }
};

// The memory of one thread. Where factors are rounded, scores are those of one group, and the weights p and the gradients ds
// of the scores are kept as words of two rows each, and ds row by row, too, for dq; otherwise they replace the scores.
template <typename F>
struct BackwardBlock {
  static constexpr bool kRounds = kEach<F> == 2;
  Rows<F> q, d_out;
  Scratch<float> s, d;
  Scratch<float> slopes;                                        // [kPanel], the derivatives of the softcap
  Scratch<F> rounded_p, rounded_ds, rounded_rows;               // [rows, kPanel]
  F *p, *ds, *ds_rows;                                          // these, or s and d
  Scratch<float> d_q;                                           // [rows, k_width]
  Scratch<float> tops, shares, shifts, lse_gradients, numbers;  // of each row m, 1/l, shift, dlse; and of one row O and dO

  BackwardBlock(const Prefill* call, const Shared<F>& shared)
      : q(shared.step, call->D),
        d_out(shared.step, call->E),
        s((kRounds ? kRows : shared.step) * kPanel),
        d((kRounds ? kRows : shared.step) * kPanel),
        slopes(kPanel),
        rounded_p(kRounds ? shared.step * kPanel : 0),
        rounded_ds(rounded_p.size()),
        rounded_rows(rounded_p.size()),
        d_q(shared.step * shared.k_width),
        tops(shared.step),
        shares(shared.step),
        shifts(shared.step),
        lse_gradients(shared.step),
        numbers(2 * call->E) {
    if constexpr (kRounds) {
      p = rounded_p, ds = rounded_ds, ds_rows = rounded_rows;
    } else {
      p = s, ds = ds_rows = d;
    }
  }
};

// The dot product of rows of dO and O, each of type T or fp32.
template <typename T>
static float row_dot(const PrefillGradient* call, const Block& block, int64_t r, float* numbers) {
  int64_t b = block.b, h = block.head(r), t = block.query(r), E = call->E;
  auto read = [&](const Strided& x, bool is_wide, float* y) {
    is_wide ? convert_row(row_at<float>(x, b, h, t), E, y) : convert_row(row_at<T>(x, b, h, t), E, y);
  };
  read(call->d_out, call->d_out_is_wide, numbers);
  read(call->out, call->is_wide, numbers + E);
  vf total = {};
  for (int64_t i = 0; i < E; i += kLanes) {
    vf x = E - i >= kLanes ? load(numbers + i) : load_first(numbers + i, E - i);
    vf y = E - i >= kLanes ? load(numbers + E + i) : load_first(numbers + E + i, E - i);
    total = fma(x, y, total);
  }
  return sum(total);
}

// Loads the queries and output gradients of a block, and the numbers of its rows.
template <typename T, typename F>
static void load_rows(const PrefillGradient* call, const Block& block, BackwardBlock<F>& m) {
  m.q.template load<T>(call->q, false, block, call->D);
  m.d_out.template load<T>(call->d_out, call->d_out_is_wide, block, call->E);
  for (int64_t r = 0; r < block.rows; r++) {
    int64_t row = (block.b * call->H + block.head(r)) * call->T + block.query(r);
    bool sees_nothing = call->scaled_sum.data[row] == 0;
    m.tops[r] = call->max_score.data[row];
    m.shares[r] = sees_nothing ? 0.0f : 1 / call->scaled_sum.data[row];
    m.lse_gradients[r] = sees_nothing ? 0.0f : call->d_lse.data[row];
    m.shifts[r] = sees_nothing ? 0.0f : row_dot<T>(call, block, r, m.numbers) - call->d_lse.data[row];
    // its output is 0 whatever the inputs are, so the gradient of the output has no effect
    if (sees_nothing) std::memset((void*)(m.d_out.x + r * m.d_out.width), 0, m.d_out.width * sizeof(F));
  }
  m.q.turn();
  m.d_out.turn();
}

// Computes the weights of a group of rows for a panel of keys, and the gradients of its scores; rows after the last one of the
// block get zeros.
template <typename F>
static void weigh_group(const Prefill* call, const Shared<F>& shared, const Block& block, int64_t panel, int64_t group, Seen seen,
                        BackwardBlock<F>& m) {
  int64_t first = group * kRows, pair = block.b * call->G + block.g, key = pair * shared.length + panel * kPanel;
  const int64_t* positions = shared.keys.positions + shared.keys.at(block.b, panel) * kPanel;
  float *s = m.s + (m.kRounds ? 0 : first * kPanel), *d = m.d + (m.kRounds ? 0 : first * kPanel);
  if (seen != kNothing) {
    const F *k = shared.k + key * shared.k_depth, *v = shared.v + key * shared.v_depth;
    multiply_long(m.q.x + first * m.q.width, m.q.width, k, shared.k_depth, s, kPanel);
    multiply_long(m.d_out.x + first * m.d_out.width, m.d_out.width, v, shared.v_depth, d, kPanel);
  }
  for (int64_t r = first; r < first + kRows; r++) {
    float *scores = s + (r - first) * kPanel, *gradients = d + (r - first) * kPanel, cap = call->softcap;
    if (seen == kNothing || r >= block.rows) {
      std::fill_n(scores, kPanel, 0.0f);
      std::fill_n(gradients, kPanel, 0.0f);
      continue;
    }
    if (cap > 0) softcap_slopes(scores, call->scale, cap, m.slopes);
    float scale = adjust_scores(call, block, r, positions, scores, kPanel);
    if (seen == kPart) {
      Ranges ranges = ranges_of(call, block, r);
      hide_outside(scores, positions, ranges.starts, ranges.stops, ranges.n);
    }
    weigh_with_gradient(scores, gradients, scale, m.tops[r], m.shares[r], m.shifts[r], m.lse_gradients[r]);
    if (cap > 0) {
      for (int j = 0; j < kPanel; j += kLanes) store(gradients + j, load(gradients + j) * load(m.slopes + j));
    }
  }
  if constexpr (BackwardBlock<F>::kRounds) {
    for (int64_t r = 0; r < kRows; r += 2) {
      round_pairs(s + r * kPanel, s + (r + 1) * kPanel, m.p + (first + r) * kPanel);
      round_pairs(d + r * kPanel, d + (r + 1) * kPanel, m.ds + (first + r) * kPanel);
    }
    for (int64_t i = 0; i < kRows * kPanel; i += kLanes) {
      store_bits(m.ds_rows + first * kPanel + i, as_factors(load(d + i), F{}));
    }
  }
}

// Adds what a block and a panel of keys contribute to dq, dk and dv.
template <typename F>
static void combine(const Prefill* call, const Shared<F>& shared, const Block& block, int64_t panel, int64_t split, const Survey& survey,
                    BackwardBlock<F>& m) {
  int64_t low = survey.groups, high = 0, in_tile = panel % kTilePanels;
  for (int64_t group = 0; group < survey.groups; group++) {
    if (survey.seen[group][in_tile] != kNothing) low = std::min(low, group), high = group + 1;
  }
  for (int64_t group = low; group < high; group++) {
    weigh_group(call, shared, block, panel, group, survey.seen[group][in_tile], m);
  }
  int64_t pair = block.b * call->G + block.g, first = low * kRows, last = high * kRows;
  int64_t key = (split * shared.heads + pair) * shared.length + panel * kPanel;
  auto add_transposed = [&](Rows<F>& x, int64_t height, const F* weights, float* sums) {  // sums += x^T weights
    for (int64_t r = first; r < last; r += kRowsPerSum) {
      for (int64_t e = 0; e < height; e += kRows) {
        const F* left = x.turned + e * x.rows + r;
        multiply<true>(left, x.rows, weights + r * kPanel, std::min(kRowsPerSum, last - r), sums + e * kPanel, kPanel);
      }
    }
  };
  add_transposed(m.d_out, shared.v_height, m.p, shared.d_v + key * shared.v_height);
  add_transposed(m.q, shared.k_height, m.ds, shared.d_k + key * shared.k_height);
  const F* k_rows = shared.k_rows + pair * shared.length * shared.k_width + panel * kPanel * kPanel;
  for (int64_t i = 0; i < call->D; i += kPanel) {
    for (int64_t r = first; r < last; r += kRows) {
      float* d_q = m.d_q + r * shared.k_width + i;
      multiply<true>(m.ds_rows + r * kPanel, kPanel, k_rows + i * shared.length, kPanel, d_q, shared.k_width, call->D - i);
    }
  }
}

// Computes the blocks of one head and one split.
template <typename T, typename F>
static void compute_split(const PrefillGradient* call, const Shared<F>& shared, int64_t pair, int64_t split, Survey& survey,
                          BackwardBlock<F>& m) {
  int64_t key = (split * shared.heads + pair) * shared.length, panels = shared.keys.panels;
  std::fill_n(shared.d_k + key * shared.k_height, shared.length * shared.k_height, 0.0f);
  std::fill_n(shared.d_v + key * shared.v_height, shared.length * shared.v_height, 0.0f);
  for (int64_t number = split; number < shared.blocks; number += shared.splits) {
    Block block = block_of(call, pair, number, shared.step);
    load_rows<T>(call, block, m);
    survey.begin(block);
    std::fill_n(m.d_q.data(), m.d_q.size(), 0.0f);
    for (int64_t tile = 0; tile < panels; tile += kTilePanels) {
      if (!survey.tile(shared.keys, tile)) continue;
      for (int64_t panel = tile; panel < std::min(tile + kTilePanels, panels); panel++) {
        combine(call, shared, block, panel, split, survey, m);
      }
    }
    for (int64_t r = 0; r < block.rows; r++) {
      int64_t row = (block.b * call->H + block.head(r)) * call->T + block.query(r);
      write_row<T>(m.d_q + r * shared.k_width, call->scale, call->D, call->d_q, row * call->D, call->results_are_wide);
    }
  }
}

// Writes the gradient of the first `rows` keys of a panel, or of their values: a factor times the sum over the splits of
// [splits, heads, panels, height, kPanel], from row `at` of out [B G S, n] on.
template <typename T, typename F>
static void write_panel(const PrefillGradient* call, const Shared<F>& shared, const float* sums, int64_t height, int64_t task,
                        int64_t n, float factor, void* out) {
  int64_t panel = task % shared.keys.panels, rows = std::min<int64_t>(kPanel, call->S - panel * kPanel);
  int64_t at = task / shared.keys.panels * call->S + panel * kPanel, distance = shared.heads * shared.length * height;
  sums += task * kPanel * height;
  for (int64_t j = 0; j < rows; j += kLanes) {
    for (int64_t i = 0; i < n; i += kLanes) {
      vu words[kLanes];
      for (int64_t w = 0; w < kLanes; w++) {
        vf total = {};
        for (int64_t split = 0; split < shared.splits && i + w < n; split++) {
          total += load(sums + split * distance + (i + w) * kPanel + j);
        }
        words[w] = (vu)total;
      }
      transpose(words);
      for (int64_t w = 0; w < std::min<int64_t>(kLanes, rows - j); w++) {
        float numbers[kLanes];
        store_bits(numbers, words[w]);
        int64_t count = std::min<int64_t>(kLanes, n - i);
        write_row<T>(numbers, factor, count, out, (at + j + w) * n + i, call->results_are_wide);
      }
    }
  }
}

// Keys and values are packed first, one panel a task; then each task is all blocks of one head and one split; and then each
// task writes one panel of the gradients of keys and values.
template <typename T>
static void prefill_gradient(PrefillGradient* call) {
  using F = Factor<T>;
  Shared<F> shared(call);
  if (call->memory == nullptr) {
    call->bytes = shared.pieces.bytes();
    return;
  }
  int64_t panels = shared.heads * shared.keys.panels, computed = panels + shared.heads * shared.splits;
  BackwardBlock<F> m(call, shared);
  Survey survey(call);
  for (int64_t task; (task = take_task(call)) < computed + panels; finish_task(call)) {
    if (task < panels) {
      shared.template pack<T>(call, task);
    } else if (task < computed) {
      wait_until_finished(call, panels);
      int64_t index = task - panels;
      compute_split<T>(call, shared, index / shared.splits, index % shared.splits, survey, m);
    } else {
      wait_until_finished(call, computed);
      write_panel<T>(call, shared, shared.d_k, shared.k_height, task - computed, call->D, call->scale, call->d_k);
      write_panel<T>(call, shared, shared.d_v, shared.v_height, task - computed, call->E, 1.0f, call->d_v);
    }
  }
}
REGARD_ENTRIES(prefill_gradient, PrefillGradient, prefill_gradient)

// One decoded token for each row of a batch through a whole model, in one call.
//
// A layer has phases, each divided into tasks that the threads take one after another:
//
//   1. norm, queries, keys and values: a task is one head. It computes the rows of the head, its norm and its rotation, and
//      writes queries to a buffer, keys and values to the cache. A norm over all heads needs the rows of all of them: they
//      are stored, and one more phase norms and rotates them.
//   2. attention: the tasks of `decode`, and of `decode_quantized` for slots that a cache stores as codes
//   3. output map: a task is a block of rows
//   4. norm, gate, up and activation: a task is a block of hidden units
//   5. down: a task is a block of rows
//
// In a mixture of experts the phases 4 and 5 are the router, the experts' gate and up, and their maps down. An expert reads
// its weights once for all of its tokens. Every thread adds the results of the experts of a token when it needs the sum, in
// the order of the module, ascending.
//
// After the last layer come the norm and the head. Between two phases a thread waits until all tasks of the phase are
// finished. This needs no number of threads: a step is right with any number of them, also if one begins late or never,
// because the others take its tasks. What all tasks of a phase need (the sum with the last sublayer's result, the norm, the
// vectors in fp32) each thread computes for itself, when it takes its first task of the phase: while it holds the task, no
// other thread can go on and overwrite the inputs. The first of them stores the new hidden states for the next phase.
#include "step.h"

#include "decode.h"
#include "entry.h"
#include "gemv.h"
#include "stored.h"
#include "tasks.h"

constexpr int64_t kStepTaskBytes = 1 << 16;  // the size of the rows of a weight in one task of a layer; a phase waits for
                                             // its last task, so that tasks are small
constexpr int64_t kHeadTaskBytes = 1 << 18;  // the same for the head
constexpr int64_t kVectorBlock = 128;  // sizes of vectors in fp32 are multiples of it, as codes may be padded; the numbers
                                       // behind a vector are 0

constexpr int64_t kStoredRows = 256;  // the rows of a stored matrix that are multiplied at a time

enum HeadKind { kQueries, kKeys, kValues };

// R vectors of M numbers in fp32, `distance` apart.
struct Vectors {
  float* data;
  int64_t R, M, distance;

  Vectors(float* memory, int64_t R, int64_t M) : data(memory), R(R), M(M), distance(padded_width(M)) {}
  float* row(int64_t r) const { return data + r * distance; }
  static int64_t padded_width(int64_t M) { return (M + kVectorBlock - 1) / kVectorBlock * kVectorBlock; }
  static int64_t size(int64_t R, int64_t M) { return padded_count(R) * padded_width(M); }

  // Writes row r, and zeros behind it.
  template <typename T>
  void write(int64_t r, const T* x) const {
    float* y = row(r);
    for_each_vector(M, [&](auto get, auto put) { put(y, get(x)); });
    std::fill(y + M, y + distance, 0.0f);
  }
};

// What one thread computes of a step, and its memory.
template <typename T>
class StepThread {
 public:
  explicit StepThread(Step* step)
      : step_(*step),
        R(step->R),
        M(step->M),
        thread_(take_task(step)),
        counters_(step->counters),
        total_(R * M),
        normed_(R * M),
        first_(R * block_size()),
        second_(R * block_size()),
        joined_(R * step->flat),
        wide_(Vectors::size(R, step->width)),
        few_(Vectors::size(R, step->width)),
        stored_(R, Vectors::padded_width(step->width)),
        sums_(R * kStoredRows) {}

  void run() {
    const StepLayer* last = nullptr;
    for (int64_t i = 0; i < step_.L; i++) {
      StepLayer& layer = step_.layers[i];
      project_heads(layer, last);
      if (layer.q.flat.kind || layer.k.flat.kind) finish_heads(layer);
      attend_to_cache(layer);
      map_output(layer);
      if (layer.mixture.n) {
        route_tokens(layer);
        open_experts(layer);
        map_experts_down(layer);
      } else {
        open_network(layer);
        map_down(layer);
      }
      last = &layer;
    }
    compute_logits(last);
  }

 private:
  Step& step_;
  const int64_t R, M, thread_;
  TasksInRuns* counters_;  // of the next phase
  Scratch<T> total_;       // [R,M], hidden states
  Scratch<T> normed_;      // [R,M]
  Scratch<T> first_;       // the rows of a head, or of a block of hidden units
  Scratch<T> second_;
  Scratch<T> joined_;      // queries and keys after a norm over all heads
  Scratch<float> wide_;    // the vectors of a product
  Scratch<float> few_;     // those of an expert, and sums over experts
  StoredRows stored_;     // products with a matrix that is stored in fewer bits
  Scratch<float> sums_;   // [R,kStoredRows]

  // Codes have at least 4 bits, so that a block has at most this number of rows.
  int64_t block_size() const { return std::max(step_.head, 2 * kStepTaskBytes / M + 1); }

  // Takes the tasks of a phase, and returns when all are finished. `begin` is called in each thread that has a task, and
  // told whether the thread is the first one; `end` once, after the last task.
  template <typename Begin, typename Work, typename End>
  void run_phase(int64_t tasks, Begin begin, Work work, End end) {
    TasksInRuns* counters = counters_++;
    int64_t task = take_next(counters, tasks, thread_, step_.runs);
    if (task < tasks) begin(take_task(counters) == 0);
    while (task < tasks) {
      work(task);
      if (finish_task(counters) == tasks - 1) {
        end();
        finish_task(counters);
      }
      task = take_next(counters, tasks, thread_, step_.runs);
    }
    wait_until_finished(counters, tasks + 1);
  }
  template <typename Begin, typename Work>
  void run_phase(int64_t tasks, Begin begin, Work work) {
    run_phase(tasks, begin, work, [] {});
  }

  // ---- linear maps

  // The number of rows of a map from n numbers in one task.
  static int64_t rows_per_task(const StepMap& map, int64_t n, int64_t bytes = kStepTaskBytes) {
    return std::max<int64_t>(1, bytes / (map.stored ? map.stored->row_bytes : n * int64_t(sizeof(T))));
  }
  static int64_t rows_per_task(const StepNetwork& network, int64_t n) {
    int64_t rows = rows_per_task(network.up, n);
    return has_gate(network) ? std::min(rows, rows_per_task(network.gate, n)) : rows;
  }
  static bool is_given(const StepMap& map) { return map.w != nullptr || map.stored != nullptr; }
  static bool has_gate(const StepNetwork& network) { return is_given(network.gate); }
  static int64_t blocks(int64_t n, int64_t rows) { return (n + rows - 1) / rows; }

  // The rows first <= n < last of W x + b. Row n of vector r is written to y[r * distance + n - first].
  template <typename Out>
  void map_rows(const StepMap& map, int64_t first, int64_t last, const Vectors& x, Out* y, int64_t distance) {
    auto w = static_cast<const T*>(map.w), b = static_cast<const T*>(map.b);
    if (map.stored == nullptr) return multiply_rows(w, b, first, last, x.data, x.distance, x.R, x.M, y, distance);
    for (int64_t n = first; n < last; n += kStoredRows) {
      int64_t rows = std::min(kStoredRows, last - n);
      stored_.multiply(*map.stored, n, n + rows, x.R, x.data, x.distance, sums_, kStoredRows);
      for (int64_t r = 0; r < x.R; r++) {
        for (int64_t i = 0; i < rows; i++) {
          float bias = b == nullptr ? 0.0f : to_float(b[n + i]);
          y[r * distance + n - first + i] = rounded<Out>(sums_[r * kStoredRows + i] + bias);
        }
      }
    }
  }

  // A phase that computes the N rows of a map, y [R,N]; `begin` writes its vectors.
  template <typename Begin>
  void map_in_blocks(const StepMap& map, int64_t N, const Vectors& x, T* y, int64_t bytes, Begin begin) {
    int64_t rows = rows_per_task(map, x.M, bytes);
    run_phase(blocks(N, rows), begin, [&](int64_t task) {
      int64_t n = task * rows;
      map_rows(map, n, std::min(N, n + rows), x, y + n, N);
    });
  }

  void write_vectors(const T* x, const Vectors& vectors) {
    for (int64_t r = 0; r < vectors.R; r++) vectors.write(r, x + r * vectors.M);
    stored_.vectors_changed();
  }

  // ---- hidden states

  // Writes to total_ the hidden states x and the norm of a sublayer's result y, [R,M].
  void add_result(const T* x, T* y, const StepNorm& norm) {
    add_rows<T>(x, apply_norm<T>(norm, y, R, M, total_), R * M, total_);
  }

  // Writes to total_ the hidden states after a layer, or before the first one.
  void leave_layer(const StepLayer* layer) {
    if (layer == nullptr) return copy_row<T>(static_cast<const T*>(step_.embedded), total_, R * M);
    T* y = static_cast<T*>(step_.y);
    if (layer->mixture.n) {
      add_experts(layer->mixture, normed_);
      y = normed_;
    }
    add_result(static_cast<const T*>(step_.x_mid), y, layer->ff_after);
  }

  // Writes the input of a layer's network to vectors, given the hidden states after the attention.
  void write_network_input(const StepLayer& layer, T* after_attention, const Vectors& vectors) {
    T* source = layer.parallel ? static_cast<T*>(step_.x) : after_attention;
    write_vectors(apply_norm<T>(layer.ff_before, source, R, M, normed_), vectors);
  }

  // The beginning of phase 4: the sum with the attention's result, and the vectors.
  void enter_network(const StepLayer& layer, bool is_first, const Vectors& vectors) {
    add_result(static_cast<const T*>(step_.x), static_cast<T*>(step_.y), layer.after);
    if (is_first) copy_row<T>(total_, static_cast<T*>(step_.x_mid), R * M);
    write_network_input(layer, total_, vectors);
  }

  // ---- attention

  static const StepHeads& heads_of(const StepLayer& layer, HeadKind kind) {
    return kind == kQueries ? layer.q : kind == kKeys ? layer.k : layer.v;
  }

  // Calls f(kind, i) for task number `task` of the heads of these kinds, in their order.
  template <typename F>
  static void with_head(const StepLayer& layer, bool queries, bool keys, int64_t task, F f) {
    if (queries && task < layer.q.n) return f(kQueries, task);
    if (queries) task -= layer.q.n;
    if (keys && task < layer.k.n) return f(kKeys, task);
    f(kValues, keys ? task - layer.k.n : task);
  }

  // Where the rows of a head before a norm over all heads are in step.raw and joined_: queries [R,H,D], then keys [R,G,D].
  int64_t place_in_flat(const StepLayer& layer, HeadKind kind, int64_t i, int64_t r) const {
    const StepHeads& heads = heads_of(layer, kind);
    return (kind == kQueries ? 0 : R * layer.q.n * layer.q.size) + (r * heads.n + i) * heads.size;
  }

  void project_heads(StepLayer& layer, const StepLayer* last) {
    Vectors vectors(wide_, R, M);
    auto begin = [&](bool is_first) {
      leave_layer(last);
      if (is_first) copy_row<T>(total_, static_cast<T*>(step_.x), R * M);
      write_vectors(apply_norm<T>(layer.before, total_, R, M, normed_), vectors);
    };
    run_phase(layer.q.n + layer.k.n + layer.v.n, begin, [&](int64_t task) {
      with_head(layer, true, true, task, [&](HeadKind kind, int64_t i) {
        const StepHeads& heads = heads_of(layer, kind);
        int64_t n = heads.size, row = (heads.first + i / heads.run * heads.step + i % heads.run) * n;
        map_rows<T>(heads.map, row, row + n, vectors, first_, n);  // [R,n]
        if (layer.clip > 0) clip_rows<T>(first_, float(layer.clip), R * n);
        if (heads.flat.kind == kNoNorm) return finish_head(layer, kind, i);
        for (int64_t r = 0; r < R; r++) {
          copy_row(first_ + r * n, static_cast<T*>(step_.raw) + place_in_flat(layer, kind, i, r), n);
        }
      });
    });
  }

  // The phase after a norm over all heads: that norm, then the steps of each head.
  void finish_heads(StepLayer& layer) {
    bool queries = layer.q.flat.kind, keys = layer.k.flat.kind;
    auto begin = [&](bool) {
      for (HeadKind kind : {kQueries, kKeys}) {
        const StepHeads& heads = heads_of(layer, kind);
        int64_t place = place_in_flat(layer, kind, 0, 0);
        apply_norm(heads.flat, static_cast<T*>(step_.raw) + place, R, heads.n * heads.size, joined_ + place);
      }
    };
    run_phase(queries * layer.q.n + keys * layer.k.n, begin, [&](int64_t task) {
      with_head(layer, queries, keys, task, [&](HeadKind kind, int64_t i) {
        int64_t n = heads_of(layer, kind).size;
        for (int64_t r = 0; r < R; r++) copy_row(joined_ + place_in_flat(layer, kind, i, r), first_ + r * n, n);
        finish_head(layer, kind, i);
      });
    });
  }

  // Applies the norm and the rotation of a head to its rows first_ [R,n], and writes them to the queries or to the cache.
  void finish_head(StepLayer& layer, HeadKind kind, int64_t i) {
    const StepHeads& heads = heads_of(layer, kind);
    DecodePlain& attention = layer.attention;
    int64_t n = heads.size;
    T* x = apply_norm<T>(heads.norm, first_, R, n, second_);
    for (int64_t r = 0; r < R; r++) {
      T* row = x + r * n;
      if (kind != kValues && layer.pairs) {
        int64_t first = std::min(r, layer.tables - 1) * layer.pairs;
        auto cos = static_cast<const T*>(layer.cos), sin = static_cast<const T*>(layer.sin);
        rotate_row(row, cos + first, sin + first, layer.pairs, layer.interleaved);
      }
      if (kind == kQueries) {
        float* q = attention.q.data + (r * heads.n + i) * n;
        for_each_vector(n, [&](auto get, auto put) { put(q, get(row)); });
      } else {
        const Strided& cache = kind == kKeys ? attention.k : attention.v;
        int64_t slot = slot_in_memory(attention, r, layer.slots[r]);
        auto memory = static_cast<T*>(const_cast<void*>(cache.data));
        copy_row(row, memory + r * cache.steps[0] + i * cache.steps[1] + slot * cache.steps[2], n);
      }
    }
  }

  void attend_to_cache(StepLayer& layer) {
    bool has_codes = layer.codes.S > 0;
    if (has_codes) decode_quantized<T>(&layer.codes);
    decode<T>(&layer.attention);
    if (has_codes) wait_until_finished(&layer.codes, decode_tasks(layer.codes));
    wait_until_finished(&layer.attention, decode_tasks(layer.attention));
  }

  // Copies the output of a row of a call of attention to out[:E], and returns its lse; split 0 has the result of all.
  static float read_row(const Decode& call, int64_t row, int64_t E, float* out) {
    int64_t splits = call.out.shape[1], heads = call.out.shape[2];
    int64_t place = row / heads * splits * heads + row % heads;
    copy_row(call.out.data + place * E, out, E);
    return call.lse.data[place];
  }

  void map_output(StepLayer& layer) {
    int64_t H = layer.q.n, E = layer.v.size;
    Vectors vectors(wide_, R, H * E);
    map_in_blocks(layer.out, M, vectors, static_cast<T*>(step_.y), kStepTaskBytes, [&](bool) {
      auto sink = static_cast<const T*>(layer.sink);
      Scratch<float> memory(2 * E);
      float* out = memory;  // [2,E]
      for (int64_t row = 0; row < R * H; row++) {
        float lse[2];
        if (layer.codes.S > 0) {
          lse[0] = read_row(layer.codes, row, E, out);
          lse[1] = read_row(layer.attention, row, E, out + E);
          join_row(out, lse, 2, E);
        } else {
          lse[0] = read_row(layer.attention, row, E, out);
        }
        vf share = splat(sink ? sink_share(lse[0], to_float(sink[row % H])) : 1.0f);
        float* y = vectors.row(row / H) + row % H * E;
        for_each_vector(E, [&](auto get, auto put) { put(y, rounded_lanes<T>(get(out) * share)); });
      }
      for (int64_t r = 0; r < R; r++) std::fill(vectors.row(r) + H * E, vectors.row(r) + vectors.distance, 0.0f);
      stored_.vectors_changed();
    });
  }

  // ---- a network

  // The hidden units first <= n < last of some vectors: gate, up and activation. Unit n of vector r is written to
  // hidden[r * F + n].
  void open_rows(const StepNetwork& network, int64_t first, int64_t last, const Vectors& vectors, T* hidden) {
    int64_t n = last - first;
    T* gate = has_gate(network) ? first_.data() : nullptr;
    if (gate) map_rows(network.gate, first, last, vectors, gate, n);
    map_rows<T>(network.up, first, last, vectors, second_, n);
    for (int64_t r = 0; r < vectors.R; r++) {
      activate(network, gate ? gate + r * n : gate, second_ + r * n, hidden + r * network.F + first, n);
    }
  }

  void open_network(StepLayer& layer) {
    const StepNetwork& network = layer.network;
    Vectors vectors(wide_, R, M);
    int64_t rows = rows_per_task(network, M);
    auto begin = [&](bool is_first) { enter_network(layer, is_first, vectors); };
    run_phase(blocks(network.F, rows), begin, [&](int64_t task) {
      open_rows(network, task * rows, std::min(network.F, (task + 1) * rows), vectors, static_cast<T*>(step_.hidden));
    });
  }

  void map_down(StepLayer& layer) {
    Vectors vectors(wide_, R, layer.network.F);
    map_in_blocks(layer.network.down, M, vectors, static_cast<T*>(step_.y), kStepTaskBytes,
                  [&](bool) { write_vectors(static_cast<const T*>(step_.hidden), vectors); });
  }

  // ---- a mixture

  // The logits of the experts, and their choice by the thread that finishes last.
  void route_tokens(StepLayer& layer) {
    const StepMixture& mixture = layer.mixture;
    Vectors vectors(wide_, R, M);
    int64_t n = mixture.n, rows = rows_per_task(mixture.router, M), own = blocks(n, rows);
    auto begin = [&](bool is_first) { enter_network(layer, is_first, vectors); };
    auto work = [&](int64_t task) {
      if (task == own) return map_rows(mixture.shared_weight, 0, 1, vectors, step_.router_logits + R * n, 1);
      int64_t first = task * rows;
      map_rows(mixture.router, first, std::min(n, first + rows), vectors, step_.router_logits + first, n);
    };
    run_phase(own + is_given(mixture.shared_weight), begin, work,
              [&] { choose_experts<T>(mixture, R, step_.router_logits, step_.shares); });
  }

  // An expert and its pairs; the last one is the network for all tokens, if there is one.
  struct Expert {
    const StepNetwork& network;
    int64_t pair, n;  // its first pair, and their number
  };
  Expert expert_at(const StepMixture& mixture, const Routing& routing, int64_t i) const {
    if (i == routing.used) return {mixture.shared, R * mixture.k, R};
    return {mixture.experts[routing.experts[i]], routing.firsts[i], routing.firsts[i + 1] - routing.firsts[i]};
  }

  // A phase of all used experts, of which each has some blocks of rows. `work(expert, block, is_other)` is told whether the
  // thread's last task was of another expert.
  template <typename Blocks, typename Begin, typename Work>
  void run_experts(const StepMixture& mixture, Blocks blocks_of, Begin begin, Work work) {
    Routing routing(mixture, R);
    int64_t experts = routing.used + (mixture.shared.F > 0), tasks = 0, current = -1;
    for (int64_t i = 0; i < experts; i++) tasks += blocks_of(expert_at(mixture, routing, i).network);
    run_phase(tasks, begin, [&](int64_t task) {
      for (int64_t i = 0; i < experts; i++) {
        Expert expert = expert_at(mixture, routing, i);
        int64_t own = blocks_of(expert.network);
        if (task < own) {
          work(expert, task, current != i);
          current = i;
          return;
        }
        task -= own;
      }
    });
  }

  // Norm, then gate, up and activation of each used expert for its tokens.
  void open_experts(StepLayer& layer) {
    const StepMixture& mixture = layer.mixture;
    Vectors vectors(wide_, R, M);
    const int64_t* tokens = Routing(mixture, R).tokens;
    int64_t width = mixture.experts[0].F;
    auto blocks_of = [&](const StepNetwork& network) { return blocks(network.F, rows_per_task(network, M)); };
    auto begin = [&](bool) { write_network_input(layer, static_cast<T*>(step_.x_mid), vectors); };
    run_experts(mixture, blocks_of, begin, [&](const Expert& expert, int64_t block, bool is_other) {
      bool all = expert.n == R;
      Vectors own(all ? wide_ : few_, expert.n, M);
      if (is_other && !all) {
        for (int64_t j = 0; j < expert.n; j++) copy_row(vectors.row(tokens[expert.pair + j]), own.row(j), own.distance);
      }
      if (is_other && R > 1) stored_.vectors_changed();
      int64_t rows = rows_per_task(expert.network, M), first = block * rows;
      T* hidden = static_cast<T*>(step_.hidden) + expert.pair * width;
      open_rows(expert.network, first, std::min(expert.network.F, first + rows), own, hidden);
    });
  }

  // The maps from the hidden units of each used expert.
  void map_experts_down(StepLayer& layer) {
    const StepMixture& mixture = layer.mixture;
    int64_t width = mixture.experts[0].F;
    auto blocks_of = [&](const StepNetwork& network) { return blocks(M, rows_per_task(network.down, network.F)); };
    run_experts(mixture, blocks_of, [](bool) {}, [&](const Expert& expert, int64_t block, bool is_other) {
      const StepNetwork& network = expert.network;
      Vectors own(wide_, expert.n, network.F);
      if (is_other) write_vectors(static_cast<const T*>(step_.hidden) + expert.pair * width, own);
      int64_t rows = rows_per_task(network.down, network.F), first = block * rows;
      T* parts = static_cast<T*>(step_.parts) + expert.pair * M + first;
      map_rows(network.down, first, std::min(M, first + rows), own, parts, M);
    });
  }

  // Writes to `out` the sums over the experts of each token, in ascending order, and over the network for all tokens.
  void add_experts(const StepMixture& mixture, T* out) {
    int64_t pairs = R * mixture.k;
    const int64_t* tokens = Routing(mixture, R).tokens;
    auto parts = static_cast<const T*>(step_.parts);
    float* sums = few_;
    std::fill(sums, sums + R * M, 0.0f);
    for (int64_t p = 0; p < pairs; p++) {
      float *row = sums + tokens[p] * M, share = step_.shares[p];
      const T* part = parts + p * M;
      for_each_vector(M, [&](auto get, auto put) { put(row, get(row) + get(part) * share); });
    }
    for (int64_t r = 0; mixture.shared.F && r < R; r++) {
      float *row = sums + r * M, gate = 1;
      if (is_given(mixture.shared_weight)) {
        double logit = rounded_float<T>(step_.router_logits[R * mixture.n + r]);
        gate = rounded_float<T>(float(1 / (1 + std::exp(-logit))));
      }
      const T* part = parts + (pairs + r) * M;
      for_each_vector(M, [&](auto get, auto put) { put(row, get(row) + rounded_lanes<T>(gate * get(part))); });
    }
    for_each_vector(R * M, [&](auto get, auto put) { put(out, get(sums)); });
  }

  // ---- the end

  void compute_logits(const StepLayer* last) {
    Vectors vectors(wide_, R, M);
    map_in_blocks(step_.head_map, step_.V, vectors, static_cast<T*>(step_.logits), kHeadTaskBytes, [&](bool) {
      leave_layer(last);
      T* normed = apply_norm<T>(step_.norm, total_, R, M, normed_);
      write_vectors(apply_norm<T>(step_.scale, normed, R, M, normed_), vectors);
    });
  }
};

template <typename T>
static void step(Step* call) {
  StepThread<T>(call).run();
}
REGARD_ENTRIES(step, Step, step)

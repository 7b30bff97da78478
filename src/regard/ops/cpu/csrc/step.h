// The parts of a decoding step that are chosen by data: norms, activations, rotations, and the choice of experts. Every
// number that the modules of a model would store is rounded to the dtype of the weights here as well.
#pragma once
#include <algorithm>

#include "activations.h"
#include "arguments.h"
#include "norm.h"
#include "scratch.h"

enum StepNormKind { kNoNorm, kRmsNorm, kLayerNorm, kFactor };
enum StepActivation { kSilu, kGeluTanh, kRelu, kClippedSilu, kGelu, kReluSquared };

// ---- rows of numbers

// Calls f(i, load, store) for all vectors of n numbers; the last one may be short.
template <typename F>
inline void for_each_vector(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    f([&](auto* p) { return load(p + i); }, [&](auto* p, vf x) { store(p + i, x); });
  }
  if (i < n) {
    f([&](auto* p) { return load_first(p + i, n - i); }, [&](auto* p, vf x) { store_first(p + i, x, n - i); });
  }
}

template <typename T>
inline void copy_row(const T* x, T* y, int64_t n) {
  std::memcpy(y, x, n * sizeof(T));
}

// x + y; `out` may be one of them.
template <typename T>
void add_rows(const T* x, const T* y, int64_t n, T* out) {
  for_each_vector(n, [&](auto get, auto put) { put(out, get(x) + get(y)); });
}

// Clips n numbers to [-limit, limit], with the limit rounded as they are; NaN stays NaN.
template <typename T>
void clip_rows(T* x, float limit, int64_t n) {
  vf most = splat(rounded_float<T>(limit));
  for_each_vector(n, [&](auto get, auto put) { put(x, clip(get(x), most)); });
}

// y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (w + offset) + b, in fp32; w + offset is rounded, as the modules
// store it.
template <typename T>
void layer_norm_row(const T* x, const StepNorm& norm, int64_t M, T* y) {
  vf total{}, squares{};
  for_each_vector(M, [&](auto get, auto) { total += get(x); });
  vf mean = splat(sum(total) / float(M));
  int64_t whole = M / kLanes * kLanes, i = 0;
  for (; i < whole; i += kLanes) {
    vf a = load(x + i) - mean;
    squares = fma(a, a, squares);
  }
  float all = sum(squares);
  for (; i < M; i++) all += (to_float(x[i]) - mean[0]) * (to_float(x[i]) - mean[0]);
  vf scale = splat(float(1 / std::sqrt(double(all) / double(M) + norm.eps))), offset = splat(float(norm.offset));
  auto w = static_cast<const T*>(norm.w), b = static_cast<const T*>(norm.b);
  for_each_vector(M, [&](auto get, auto put) {
    vf normed = (get(x) - mean) * scale;
    if (w != nullptr) normed *= rounded_lanes<T>(get(w) + offset);
    if (b != nullptr) normed += get(b);
    put(y, normed);
  });
}

// Applies a norm to R rows of M numbers, and returns where the result is: y, or x without a norm.
template <typename T>
T* apply_norm(const StepNorm& norm, T* x, int64_t R, int64_t M, T* y) {
  if (norm.kind == kNoNorm) return x;
  for (int64_t r = 0; r < R; r++) {
    T *row = x + r * M, *out = y + r * M;
    if (norm.kind == kRmsNorm) {
      rms_norm_row(row, static_cast<const T*>(norm.w), M, norm.eps, float(norm.offset), out);
    } else if (norm.kind == kLayerNorm) {
      layer_norm_row(row, norm, M, out);
    } else {
      for_each_vector(M, [&](auto get, auto put) { put(out, get(row) * float(norm.offset)); });
    }
  }
  return y;
}

// The pairs (a, b) of a head rotated by the angles of a token, in place; every product and every sum is rounded.
template <typename T>
void rotate_row(T* x, const T* cos, const T* sin, int64_t pairs, bool interleaved) {
  auto turn = [](auto a, auto b, auto c, auto s, auto stored, auto& first, auto& second) {
    first = stored(a * c) - stored(b * s);
    second = stored(b * c) + stored(a * s);
  };
  int64_t i = 0;
  for (; !interleaved && i + kLanes <= pairs; i += kLanes) {
    vf a, b;
    turn(load(x + i), load(x + pairs + i), load(cos + i), load(sin + i), [](vf y) { return rounded_lanes<T>(y); }, a, b);
    store(x + i, a);
    store(x + pairs + i, b);
  }
  for (; i < pairs; i++) {
    T &first = x[interleaved ? 2 * i : i], &second = x[interleaved ? 2 * i + 1 : pairs + i];
    float a, b;
    turn(to_float(first), to_float(second), to_float(cos[i]), to_float(sin[i]),
         [](float y) { return rounded_float<T>(y); }, a, b);
    first = rounded<T>(a);
    second = rounded<T>(b);
  }
}

// ---- feed-forward networks

// f(gate) * up, where f(gate) is rounded before it is multiplied; f(up) where gate is nullptr.
template <typename T, typename F>
inline void activate_with(F f, const T* gate, const T* up, T* out, int64_t n) {
  for_each_vector(n, [&](auto get, auto put) {
    if (gate == nullptr) {
      put(out, f(get(up)));
    } else {
      put(out, rounded_lanes<T>(f(get(gate))) * get(up));
    }
  });
}

// The hidden units of a network from its maps, or from the map up if gate is nullptr.
template <typename T>
void activate(const StepNetwork& network, const T* gate, const T* up, T* out, int64_t n) {
  switch (network.activation) {
    case kSilu: return activate_with([](vf x) { return silu(x); }, gate, up, out, n);
    case kGeluTanh: return activate_with([](vf x) { return gelu_tanh(x); }, gate, up, out, n);
    case kRelu: return activate_with([](vf x) { return relu(x); }, gate, up, out, n);
    case kGelu: return activate_with([](vf x) { return gelu(x); }, gate, up, out, n);
    case kReluSquared: return activate_with([](vf x) { return relu(x) * relu(x); }, gate, up, out, n);
  }
  // kClippedSilu: (clip(up) + 1) * x sigmoid(alpha x) with x = min(gate, limit)
  vf limit = splat(rounded_float<T>(float(network.limit)));
  auto stored = [](vf x) { return rounded_lanes<T>(x); };
  for_each_vector(n, [&](auto get, auto put) {
    vf x = get(gate), u = clip(get(up), limit);
    x = x > limit ? limit : x;
    vf share = stored(sigmoid(stored(float(network.alpha) * x)));
    put(out, stored(u + 1.0f) * stored(x * share));
  });
}

// ---- mixtures of experts

// Which experts compute for which tokens. A pair is an expert and a token; pairs are ordered by the expert, and then by
// the token. The memory belongs to one mixture, as a thread that is late may read it while others are in later layers.
struct Routing {
  int64_t& used;     // the number of experts with a token
  int64_t* experts;  // their numbers
  int64_t* firsts;   // the first pair of each, and one past the last pair
  int64_t* tokens;   // the token of each pair

  Routing(const StepMixture& mixture, int64_t R)
      : used(mixture.routing[0]),
        experts(mixture.routing + 1),
        firsts(experts + R * mixture.k),
        tokens(firsts + R * mixture.k + 1) {}
};

// Whether a score a is chosen before a later score b: NaN counts as the largest.
template <typename Number>
inline bool comes_first(Number a, Number b) {
  return a > b || (a != a && b == b);
}

// Marks the k best of n scores, where of equal ones the first is the best.
inline void mark_best(const float* scores, int64_t n, int64_t k, bool* marks) {
  for (int64_t j = 0; j < k; j++) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++) {
      if (!marks[i] && (best < 0 || comes_first(scores[i], scores[best]))) best = i;
    }
    marks[best] = true;
  }
}

// Sets the scores of experts to -inf whose group is none of the best; groups are compared by the sums of the best numbers
// of `by` in each.
inline void hide_groups(const StepMixture& mixture, const float* by, float* scores) {
  int64_t groups = mixture.groups, size = mixture.n / groups;
  Scratch<float> sums(groups);
  Scratch<bool> marks(mixture.n), allowed(groups);
  for (int64_t i = 0; i < groups; i++) {
    mark_best(by + i * size, size, mixture.group_best, marks + i * size);
    for (int64_t e = i * size; e < (i + 1) * size; e++) {
      if (marks[e]) sums[i] += by[e];
    }
  }
  mark_best(sums, groups, mixture.group_topk, allowed);
  for (int64_t e = 0; e < mixture.n; e++) {
    if (!allowed[e / size]) scores[e] = -INFINITY;
  }
}

// Marks the experts of a token by their logits [n], and writes the weights of the marked ones.
template <typename T>
void weigh_experts(const StepMixture& mixture, const float* logits, bool* marks, float* weights) {
  int64_t n = mixture.n;
  Scratch<float> scores(n), by(n);
  Scratch<double> wide(n);
  // e^(logit - largest logit) of the experts that `counts` allows
  auto exponentials = [&](auto counts) {
    int64_t top = -1;
    for (int64_t e = 0; e < n; e++) {
      if (counts(e) && (top < 0 || comes_first(logits[e], logits[top]))) top = e;
    }
    for (int64_t e = 0; e < n; e++) wide[e] = std::exp(double(logits[e]) - double(logits[top]));
  };
  if (mixture.sigmoid) {
    auto narrow = static_cast<const T*>(mixture.correction);
    auto fp32 = static_cast<const float*>(mixture.correction);
    for (int64_t e = 0; e < n; e++) {
      wide[e] = 1 / (1 + std::exp(-double(logits[e])));
      scores[e] = by[e] = float(wide[e]) + (mixture.wide_correction ? fp32[e] : to_float(narrow[e]));
    }
  } else {
    exponentials([](int64_t) { return true; });
    double total = 0;
    for (int64_t e = 0; e < n; e++) total += wide[e];
    for (int64_t e = 0; e < n; e++) {
      wide[e] /= total;
      scores[e] = logits[e];
      by[e] = float(wide[e]);
    }
  }
  if (mixture.groups) hide_groups(mixture, by, scores);
  mark_best(scores, n, mixture.k, marks);
  // the softmax over the chosen ones
  if (mixture.normalize && !mixture.sigmoid) exponentials([&](int64_t e) { return marks[e]; });
  double total = mixture.sigmoid ? 1e-20 : 0;
  for (int64_t e = 0; e < n; e++) total += marks[e] ? wide[e] : 0;
  for (int64_t e = 0; e < n; e++) {
    if (marks[e]) weights[e] = float(mixture.normalize ? wide[e] / total : wide[e]) * float(mixture.scale);
  }
}

// Chooses the experts of R tokens by their logits [R,n], and writes the pairs and the weight of each.
template <typename T>
void choose_experts(const StepMixture& mixture, int64_t R, const float* logits, float* shares) {
  int64_t n = mixture.n, pairs = 0;
  Scratch<bool> marks(R * n);
  Scratch<float> weights(R * n);
  for (int64_t r = 0; r < R; r++) weigh_experts<T>(mixture, logits + r * n, marks + r * n, weights + r * n);
  Routing routing(mixture, R);
  routing.used = 0;
  for (int64_t e = 0; e < n; e++) {
    routing.firsts[routing.used] = pairs;
    for (int64_t r = 0; r < R; r++) {
      if (!marks[r * n + e]) continue;
      routing.tokens[pairs] = r;
      shares[pairs++] = weights[r * n + e];
    }
    if (pairs > routing.firsts[routing.used]) routing.experts[routing.used++] = e;
  }
  routing.firsts[routing.used] = pairs;
}

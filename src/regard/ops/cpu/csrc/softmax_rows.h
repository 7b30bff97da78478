// The softmax of one row of scores in prefill, and its gradient: a row is read twice. It consists of whole panels.
#pragma once
#include "activations.h"
#include "matmul.h"

// kLanes numbers as factors of a product; a bf16 number that would be subnormal becomes 0.
inline vf as_factors(vf x, float) { return x; }
#if defined(__AVX512BF16__)
inline vh as_factors(vf x, bf16) { return (vh)_mm512_cvtneps_pbh((__m512)x); }
#else
inline vh as_factors(vf x, bf16) { return to_bits(x, bf16{}); }
#endif

// The largest of n numbers, ignoring NaN; -inf if all are NaN.
inline float largest_score(const float* s, int64_t n) {
  vf best[kRegisters];
  for (vf& x : best) x = splat(-INFINITY);
  for (int64_t i = 0; i < n; i += kPanel) {
    for (int v = 0; v < kRegisters; v++) best[v] = larger(load(s + i + v * kLanes), best[v]);
  }
  for (int v = 1; v < kRegisters; v++) best[0] = larger(best[0], best[v]);
  return largest(best[0]);
}

// Writes the weights e^(scale s - base) of n scores to p, which may be s, and returns their sum before they are rounded.
// scale s is rounded before base is subtracted, so that the weight of the largest score is exactly 1.
template <typename F>
inline float weigh_scores(const float* s, F* p, int64_t n, float scale, float base) {
  vf total[kRegisters] = {};
  for (int64_t i = 0; i < n; i += kPanel) {
    for (int v = 0; v < kRegisters; v++) {
      vf weight = exp(load(s + i + v * kLanes) * scale - base);
      store_bits(p + i + v * kLanes, as_factors(weight, F{}));
      total[v] += weight;
    }
  }
  for (int v = 1; v < kRegisters; v++) total[0] += total[v];
  return sum(total[0]);
}

// Replaces the scores s of a panel by their weights p = e^(scale s - top) share, and the gradients d of the weights by those
// of the scaled scores, p (d - shift).
//
// Where a weight is exactly 1, the other weights of the row are lost in rounding. Then dp and dO O are the same number, summed
// in another order, and their difference is set to 0: what remains of p (d - shift) is `alone`, the gradient of the lse. Where
// p = 0, 0 is selected, because p (d - shift) would be NaN if a masked key has NaN in d; a NaN in d of a visible key stays.
inline void weigh_with_gradient(float* s, float* d, float scale, float top, float share, float shift, float alone) {
  for (int v = 0; v < kPanel; v += kLanes) {
    vf p = exp(load(s + v) * scale - top) * share, change = load(d + v) - shift;
    vf gradient = ((p == 1.0f) & (change == change)) ? splat(alone) : p * change;
    store(s + v, p);
    store(d + v, p == 0.0f ? vf{} : gradient);
  }
}

// The derivatives 1 - tanh(x)^2 of the softcap, x = scale s / cap, of the scores s of a panel before they are scaled, as
// 4e / (1 + e)^2 with e = e^(-2|x|), which loses no digits where tanh is near 1.
inline void softcap_slopes(const float* s, float scale, float cap, float* out) {
  for (int v = 0; v < kPanel; v += kLanes) {
    vf e = exp(-2.0f * magnitude(load(s + v) * scale / cap));
    store(out + v, 4.0f * e / ((1.0f + e) * (1.0f + e)));
  }
}

// Sets the scores of a panel to -inf where the position of the key is in none of n ranges, or below 0: an empty slot.
inline void hide_outside(float* s, const int64_t* positions, const int64_t* starts, const int64_t* stops, int64_t n) {
  int32_t seen[kPanel] = {};
  for (int64_t i = 0; i < n; i++) {
    int64_t start = std::max<int64_t>(0, starts[i]), length = std::max<int64_t>(0, stops[i] - start);
    for (int j = 0; j < kPanel; j++) seen[j] |= uint64_t(positions[j] - start) < uint64_t(length) ? -1 : 0;
  }
  for (int j = 0; j < kPanel; j++) s[j] = seen[j] ? s[j] : -INFINITY;
}

// Rounds two rows of a panel to words that hold a number of each.
inline void round_pairs(const float* even, const float* odd, bf16* words) {
  for (int v = 0; v < kPanel; v += kLanes) {
    vu low = widen(as_factors(load(even + v), bf16{})), high = widen(as_factors(load(odd + v), bf16{}));
    store_bits(words + 2 * v, low | high << 16);
  }
}

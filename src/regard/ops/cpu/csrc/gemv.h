// The product of a matrix and a few vectors, y = W x + b. Each number of W is read once, in the order of its memory, one row
// after another: a core that reads four rows at once reaches half of the memory bandwidth.
#pragma once
#include <algorithm>

#include "simd.h"

constexpr int64_t kGemvAhead = 8192;      // the distance in bytes from what is read to what is prefetched
constexpr int64_t kGemvVectors = 4;       // the most vectors that are multiplied with a number of W in a register
constexpr int64_t kGemvTaskBytes = 1 << 17;  // the size of the rows of W in one task

// The number of vectors in whose memory R vectors are read: a single one, or a multiple of four.
inline int64_t padded_count(int64_t R) { return R == 1 ? 1 : (R + kGemvVectors - 1) / kGemvVectors * kGemvVectors; }

// The dot products of a row of W with R vectors x, which are `distance` numbers apart.
template <int R, typename T>
inline void row_dot(const T* w, const float* x, int64_t distance, int64_t M, float* out) {
  constexpr int kSums = sizeof(T) == 4 ? 1 : kGemvVectors / R;  // independent sums for each vector: one cache line of fp32
  constexpr int kWide = kSums * kLanes;
  vf total[R][kSums] = {};
  int64_t i = 0;
  for (; i + kWide <= M; i += kWide) {
    prefetch((const char*)(w + i) + kGemvAhead, kWide * sizeof(T));
    for (int u = 0; u < kSums; u++) {
      vf k = load(w + i + u * kLanes);
      for (int r = 0; r < R; r++) total[r][u] = fma(k, load(x + r * distance + i + u * kLanes), total[r][u]);
    }
  }
  for (; i + kLanes <= M; i += kLanes) {
    vf k = load(w + i);
    for (int r = 0; r < R; r++) total[r][0] = fma(k, load(x + r * distance + i), total[r][0]);
  }
  for (int r = 0; r < R; r++) {
    for (int u = 1; u < kSums; u++) total[r][0] += total[r][u];
    out[r] = sum(total[r][0]);
  }
  for (; i < M; i++) {
    for (int r = 0; r < R; r++) out[r] += to_float(w[i]) * x[r * distance + i];
  }
}

// The rows first <= n < last of W x + b for R vectors x [padded_count(R), >= M] in fp32. Row n of vector r is written to
// y[r * y_distance + n - first].
template <typename T, typename Out>
void multiply_rows(const T* w, const T* b, int64_t first, int64_t last, const float* x, int64_t distance, int64_t R, int64_t M,
                   Out* y, int64_t y_distance) {
  for (int64_t n = first; n < last; n++) {
    float bias = b == nullptr ? 0.0f : to_float(b[n]);
    for (int64_t r = 0; r < R; r += kGemvVectors) {
      float products[kGemvVectors];
      if (R == 1) {
        row_dot<1>(w + n * M, x, distance, M, products);
      } else {
        row_dot<kGemvVectors>(w + n * M, x + r * distance, distance, M, products);
      }
      for (int64_t j = 0; j < std::min(kGemvVectors, R - r); j++) {
        y[(r + j) * y_distance + n - first] = rounded<Out>(products[j] + bias);
      }
    }
  }
}

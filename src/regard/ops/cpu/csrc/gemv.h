// The product of a matrix and a few vectors, y = W x + b. Each number of W is read once, in the order of its memory: one
// row after another for one vector. For more, loading the vectors takes longer than loading W; a few rows at a time share
// what is loaded, and the rows behind are prefetched in order, because a core that reads four rows at once reaches half
// of the memory bandwidth.
#pragma once
#include <algorithm>

#include "simd.h"

constexpr int64_t kGemvAhead = 8192;            // the least distance in bytes from what is read to what is prefetched
constexpr int64_t kGemvVectors = 4;             // the most vectors that are multiplied with a number of W in a register
constexpr int kGemvRows = kLanes == 8 ? 2 : 4;  // the rows that share loads of vectors; AVX2 has half as many registers
constexpr int64_t kGemvTaskBytes = 1 << 17;     // the size of the rows of W in one task

// The number of vectors for which there is memory where R vectors of codes are multiplied four at a time.
inline int64_t padded_count(int64_t R) { return R == 1 ? 1 : (R + kGemvVectors - 1) / kGemvVectors * kGemvVectors; }

// The dot products of kRows rows of W [kRows, M] with R vectors x, which are `distance` numbers apart. The sum of a row
// does not depend on the rows beside it.
template <int kRows, int R, typename T>
inline void row_dots(const T* w, const float* x, int64_t distance, int64_t M, float (&out)[kRows][kGemvVectors]) {
  constexpr int kSums = sizeof(T) == 4 ? 1 : kGemvVectors / R;  // independent sums of a product
  constexpr int kWide = kSums * kLanes;
  auto ahead = (const char*)w + std::max<int64_t>(kGemvAhead, kRows > 1 ? kRows * M * sizeof(T) : 0);
  vf total[kSums][kRows * R] = {};  // of row i / R and vector i % R
  int64_t m = 0;
  for (; m + kWide <= M; m += kWide) {
    prefetch(ahead + kRows * m * sizeof(T), kRows * kWide * sizeof(T));
    for (int u = 0; u < kSums; u++) {
      vf numbers[kRows];
      for (int n = 0; n < kRows; n++) numbers[n] = load(w + n * M + m + u * kLanes);
      for (int i = 0; i < kRows * R; i++) {
        total[u][i] = fma(numbers[i / R], load(x + i % R * distance + m + u * kLanes), total[u][i]);
      }
    }
  }
  for (; m + kLanes <= M; m += kLanes) {
    for (int i = 0; i < kRows * R; i++) total[0][i] = fma(load(w + i / R * M + m), load(x + i % R * distance + m), total[0][i]);
  }
  for (int i = 0; i < kRows * R; i++) {
    for (int u = 1; u < kSums; u++) total[0][i] += total[u][i];
    out[i / R][i % R] = sum(total[0][i]);
  }
  for (; m < M; m++) {
    for (int i = 0; i < kRows * R; i++) out[i / R][i % R] += to_float(w[i / R * M + m]) * x[i % R * distance + m];
  }
}

// The rows first <= n < last of W x + b for R vectors x [R, >= M] in fp32. Row n of vector r is written to
// y[r * y_distance + n - first].
template <typename T, typename Out>
void multiply_rows(const T* w, const T* b, int64_t first, int64_t last, const float* x, int64_t distance, int64_t R, int64_t M,
                   Out* y, int64_t y_distance) {
  auto multiply = [&](auto rows, int64_t n) {
    constexpr int kRows = decltype(rows)::value;
    for (int64_t r = 0; r < R; r += kGemvVectors) {
      int64_t count = std::min(kGemvVectors, R - r);
      const T* from = w + n * M;
      const float* vectors = x + r * distance;
      float products[kRows][kGemvVectors];
      if (count == 1) row_dots<kRows, 1>(from, vectors, distance, M, products);
      if (count == 2) row_dots<kRows, 2>(from, vectors, distance, M, products);
      if (count == 3) row_dots<kRows, 3>(from, vectors, distance, M, products);
      if (count == 4) row_dots<kRows, 4>(from, vectors, distance, M, products);
      for (int i = 0; i < kRows; i++) {
        float bias = b == nullptr ? 0.0f : to_float(b[n + i]);
        for (int64_t j = 0; j < count; j++) y[(r + j) * y_distance + n + i - first] = rounded<Out>(products[i][j] + bias);
      }
    }
  };
  int64_t n = first;
  for (; R > 1 && n + kGemvRows <= last; n += kGemvRows) multiply(std::integral_constant<int, kGemvRows>(), n);
  for (; n < last; n++) multiply(std::integral_constant<int, 1>(), n);
}

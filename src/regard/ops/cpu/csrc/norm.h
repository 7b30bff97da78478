// The RMS norm of rows: y = x / sqrt(mean(x^2) + eps) * (w + offset), in fp32, rounded once.
#pragma once
#include "simd.h"

template <typename T>
void rms_norm_row(const T* x, const T* w, int64_t M, double eps, float offset, T* y) {
  vf total[4] = {};
  int64_t whole = M / kLanes * kLanes, i = 0;
  for (; i + 4 * kLanes <= M; i += 4 * kLanes) {
    for (int u = 0; u < 4; u++) {
      vf a = load(x + i + u * kLanes);
      total[u] = fma(a, a, total[u]);
    }
  }
  for (; i < whole; i += kLanes) {
    vf a = load(x + i);
    total[0] = fma(a, a, total[0]);
  }
  float squares = sum((total[0] + total[1]) + (total[2] + total[3]));
  for (i = whole; i < M; i++) squares += to_float(x[i]) * to_float(x[i]);
  float scale = float(1 / std::sqrt(double(squares) / double(M) + eps));
  for (i = 0; i < whole; i += kLanes) store(y + i, load(x + i) * scale * (load(w + i) + offset));
  for (; i < M; i++) y[i] = rounded<T>(to_float(x[i]) * scale * (to_float(w[i]) + offset));
}

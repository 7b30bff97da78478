// The activations of feed-forward networks, for vectors of fp32 numbers; NaN stays NaN.
#pragma once
#include "simd.h"

// The polynomial of a list of coefficients, the highest power first.
template <int N>
inline vf polynomial(vf x, const float (&coefficients)[N]) {
  vf p = splat(coefficients[0]);
  for (int i = 1; i < N; i++) p = fma(p, x, splat(coefficients[i]));
  return p;
}

inline vf magnitude(vf x) { return x < vf{} ? -x : x; }

// tanh x, by the odd polynomial of Cephes' tanhf near 0, otherwise by the exponential.
inline vf tanh(vf x) {
  vf a = magnitude(x), z = x * x, e = exp(-2.0f * a), far = (1.0f - e) / (1.0f + e);
  vf p = polynomial(z, {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f});
  return a < splat(0.625f) ? fma(x * z, p, x) : (x < vf{} ? -far : far);
}

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
inline vf relu(vf x) { return x < vf{} ? vf{} : x; }
inline vf clip(vf x, vf limit) { return x > limit ? limit : (x < -limit ? -limit : x); }

// 1 / (1 + e^-x) without an overflow: with e = e^-|x| it is 1 / (1 + e) from 0 on, and e / (1 + e) below.
inline vf sigmoid(vf x) {
  vf e = exp(-magnitude(x));
  return (x >= vf{} ? splat(1.0f) : e) / (1.0f + e);
}

// x / (1 + e^-x), in the same way.
inline vf silu(vf x) {
  vf e = exp(-magnitude(x));
  return (x >= vf{} ? x : x * e) / (1.0f + e);
}

// tanh x, by the odd polynomial of Cephes' tanhf near 0, otherwise by the exponential.
inline vf tanh(vf x) {
  vf a = magnitude(x), z = x * x, e = exp(-2.0f * a), far = (1.0f - e) / (1.0f + e);
  vf p = polynomial(z, {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f});
  return a < splat(0.625f) ? fma(x * z, p, x) : (x < vf{} ? -far : far);
}

// The approximation of GELU by tanh: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
inline vf gelu_tanh(vf x) {
  vf inner = 0.79788456080286536f * fma(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + tanh(inner));
}

// x Phi(x), with the distribution function Phi of the normal distribution, accurate to about one rounding.
//
//   Phi(-a) = t p(t) e^(-a^2 / 2),  t = 1 / (1 + 0.3 a),  a = |x|
//
// The polynomial p was fitted for this file to e^(a^2 / 2) erfc(a / sqrt(2)) / 2; its largest relative error for
// 0 <= a <= 13.3 is 3.5e-9. Beyond that the exponential is 0.
inline vf gelu(vf x) {
  vf a = magnitude(x), t = 1.0f / (1.0f + 0.3f * a);
  vf p = polynomial(t, {-0.020584655925631523f, 0.11221713572740555f, -0.22767959535121918f, 0.19104212522506714f,
                        -0.07877779752016068f, 0.09579329937696457f, 0.07852185517549515f, 0.11020554602146149f,
                        0.1195756122469902f, 0.11968648433685303f});
  vf tail = x * (p * t * exp(-0.5f * a * a));
  return x < vf{} ? tail : x - tail;
}

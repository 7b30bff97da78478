// Runs the kernels without Python, against loops in double: for processors that are emulated, for a debugger and for
// valgrind. A kernel joins by a function that is called in `main`. Prints one line for each kernel and dtype.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "arguments.h"
#include "numbers.h"

#define ENTRIES(name) extern "C" void name##_f32(void*), name##_bf16(void*), name##_fp16(void*)
ENTRIES(gemv);
ENTRIES(rms_norm);
ENTRIES(gated_product);
ENTRIES(decode);

template <typename T>
struct Stored;  // the numbers of one dtype: their name, their precision, and which of three entries is theirs
template <>
struct Stored<float> {
  static constexpr const char* name = "f32";
  static constexpr double unit = 0x1p-24;
  static constexpr int entry = 0;
};
template <>
struct Stored<bf16> {
  static constexpr const char* name = "bf16";
  static constexpr double unit = 0x1p-8;
  static constexpr int entry = 1;
};
template <>
struct Stored<fp16> {
  static constexpr const char* name = "fp16";
  static constexpr double unit = 0x1p-11;
  static constexpr int entry = 2;
};

using Entry = void (*)(void*);
static int failures = 0;

// n random numbers of about normal distribution, in memory of exactly their size.
template <typename T>
std::vector<T> numbers(int64_t n) {
  static uint64_t state = 88172645463325252u;
  std::vector<T> x(n);
  for (auto& y : x) {
    double sum = 0;
    for (int i = 0; i < 4; i++) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      sum += double(state >> 11) * 0x1p-53 - 0.5;
    }
    y = rounded<T>(float(1.7 * sum));
  }
  return x;
}

// Whether a result is exact but for its rounding, and for some roundings of fp32 numbers as large as `size`.
template <typename T>
void check(const char* what, int64_t i, T found, double exact, double size, const char* dtype = Stored<T>::name) {
  double allowed = Stored<T>::unit * std::fabs(exact) + 0x1p-24 * size + 0x1p-24;  // the last: fp16's subnormal numbers
  double error = std::fabs(to_float(found) - exact);
  if (!(error <= allowed) && failures++ < 20) {
    std::printf("%s_%s: number %lld is %.9g, not %.9g (error %.3g, allowed %.3g)\n", what, dtype, (long long)i, to_float(found),
                exact, error, allowed);
  }
}

template <typename T>
void test_gemv(const Entry* entries) {
  for (int64_t R : {1, 2, 4, 5, 9}) {
    for (int64_t M : {1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 70, 300}) {
      int64_t N = 1 + (R * 7 + M) % 37;
      auto x = numbers<T>(R * M), w = numbers<T>(N * M), b = numbers<T>(N), y = numbers<T>(R * N);
      Gemv call = {};
      call.R = R, call.M = M, call.N = N, call.runs = 1;
      call.x = x.data(), call.w = w.data(), call.b = M % 2 ? b.data() : nullptr, call.y = y.data();
      entries[Stored<T>::entry](&call);
      for (int64_t r = 0; r < R; r++) {
        for (int64_t n = 0; n < N; n++) {
          double sum = M % 2 ? to_float(b[n]) : 0, size = std::fabs(sum);
          for (int64_t i = 0; i < M; i++) {
            double term = double(to_float(x[r * M + i])) * to_float(w[n * M + i]);
            sum += term, size += std::fabs(term);
          }
          check("gemv", r * N + n, y[r * N + n], sum, size * double(M));
        }
      }
    }
  }
}

template <typename T>
void test_rms_norm(const Entry* entries) {
  for (int64_t M : {1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 70, 300}) {
    int64_t R = 1 + M % 5;
    auto x = numbers<T>(R * M), w = numbers<T>(M), y = numbers<T>(R * M);
    RmsNorm call = {};
    call.R = R, call.M = M, call.x = x.data(), call.w = w.data(), call.y = y.data(), call.eps = 1e-5, call.offset = M % 2;
    entries[Stored<T>::entry](&call);
    for (int64_t r = 0; r < R; r++) {
      double squares = 0;
      for (int64_t i = 0; i < M; i++) squares += std::pow(double(to_float(x[r * M + i])), 2);
      for (int64_t i = 0; i < M; i++) {
        double size = to_float(x[r * M + i]) / std::sqrt(squares / double(M) + call.eps);
        double exact = size * (to_float(w[i]) + call.offset);
        // the weight and its offset are added in fp32; the sum of M squares adds M roundings
        check("rms_norm", r * M + i, y[r * M + i], exact, double(M + 8) * (std::fabs(exact) + std::fabs(size)));
      }
    }
  }
}

template <typename T>
void test_gated_product(const Entry* entries) {
  for (int64_t n : {1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 70, 300}) {
    auto gate = numbers<T>(n), up = numbers<T>(n), out = numbers<T>(n);
    for (int64_t i = 0; i < n; i++) gate[i] = rounded<T>(to_float(gate[i]) * (i % 3 ? 1.0f : 40.0f));
    GatedProduct call = {};
    call.n = n, call.gate = gate.data(), call.up = up.data(), call.out = out.data();
    entries[Stored<T>::entry](&call);
    for (int64_t i = 0; i < n; i++) {
      double x = to_float(gate[i]), silu = x / (1 + std::exp(-x)), exact = silu * to_float(up[i]);
      // silu is rounded to the dtype first, and computed in a few roundings of fp32
      double first = Stored<T>::unit * std::fabs(exact) * 0x1p24 + 0x1p0 * std::fabs(to_float(up[i]));
      check("gated_product", i, out[i], exact, first + 8 * std::fabs(exact));
    }
  }
}

// A contiguous array as a field of a struct.
template <typename N>
Array<N> array(std::vector<N>& x, int64_t b, int64_t h, int64_t t, int64_t n) {
  return {x.data(), {b, h, t, n}};
}

// Query t sees the keys S/3 <= j < S - t, in one or two splits, with a softcap, ALiBi or neither.
template <typename T>
void test_decode(const Entry* entries) {
  for (int64_t S : {1, 3, 17, 64, 65, 200}) {
    for (int64_t D : {1, 7, 16, 33, 70}) {
      int64_t G = 2, heads = 1 + S % 3, t = 1 + D % 2, rows = heads * t, E = 1 + (3 * D + S) % 41, P = 1 + S % 2;
      auto given = numbers<T>(G * rows * D), k = numbers<T>(G * S * D), v = numbers<T>(G * S * E);
      std::vector<float> q(given.size()), out(G * P * rows * E), lse(G * P * rows), slopes(G * heads, 0.01f), none(1);
      for (size_t i = 0; i < q.size(); i++) q[i] = to_float(given[i]);
      std::vector<int64_t> starts(t), stops(t), positions(t), nothing(1);
      for (int64_t i = 0; i < t; i++) starts[i] = S / 3, stops[i] = S - i, positions[i] = S - i - 1;
      std::vector<uint8_t> visible(1);
      bool capped = D % 3 == 0, sloped = D % 3 == 1;
      DecodePlain call = {};
      call.T = t, call.S = S, call.scale = 0.3, call.softcap = capped ? 2 : 0, call.page_size = 1;
      call.q = array(q, 1, G, rows, D), call.out = array(out, G, P, rows, E), call.lse = array(lse, 1, G, P, rows);
      call.starts = array(starts, 1, 1, t, 1), call.stops = array(stops, 1, 1, t, 1);
      call.q_positions = array(positions, 1, 1, 1, t);
      call.slopes = array(slopes, 1, 1, 1, sloped ? G * heads : 0);
      call.k_positions = call.pages = array(nothing, 1, 1, 1, 0), call.bias = array(none, 1, 1, 1, 0);
      call.visible = {reinterpret_cast<bool*>(visible.data()), {1, 1, 1, 0}};
      call.k = {k.data(), {0, S * D, D}}, call.v = {v.data(), {0, S * E, E}};
      entries[Stored<T>::entry](&call);
      for (int64_t g = 0; g < G; g++) {
        for (int64_t r = 0; r < rows; r++) {
          std::vector<double> z(E), sizes(E);
          double total = 0;
          for (int64_t j = starts[r % t]; j < stops[r % t]; j++) {
            double s = 0;
            for (int64_t d = 0; d < D; d++) s += double(q[(g * rows + r) * D + d]) * to_float(k[(g * S + j) * D + d]);
            s = capped ? 2 * std::tanh(0.15 * s) : 0.3 * s;
            s -= sloped ? double(slopes[0]) * double(positions[r % t] - j) : 0;
            total += std::exp(s);
            for (int64_t e = 0; e < E; e++) {
              double value = to_float(v[(g * S + j) * E + e]);
              z[e] += std::exp(s) * value, sizes[e] += std::exp(s) * std::fabs(value);
            }
          }
          double terms = double(S + 4 * D + 16);  // the roundings of a score, of its exponential, and of the sums
          for (int64_t e = 0; e < E; e++) {
            int64_t i = (g * P * rows + r) * E + e;
            double exact = total > 0 ? z[e] / total : 0, size = total > 0 ? terms * sizes[e] / total : 0;
            check("decode", i, out[i], exact, size, Stored<T>::name);
          }
          float sum = lse[g * P * rows + r];
          if (total > 0) check("decode's lse", g * rows + r, sum, std::log(total), terms, Stored<T>::name);
          if (total == 0 && sum != -INFINITY) failures++, std::printf("decode_%s: an lse without keys\n", Stored<T>::name);
        }
      }
    }
  }
}

template <typename T>
void test_all() {
  const Entry gemvs[] = {gemv_f32, gemv_bf16, gemv_fp16};
  const Entry norms[] = {rms_norm_f32, rms_norm_bf16, rms_norm_fp16};
  const Entry products[] = {gated_product_f32, gated_product_bf16, gated_product_fp16};
  const Entry decodes[] = {decode_f32, decode_bf16, decode_fp16};
  test_gemv<T>(gemvs);
  test_rms_norm<T>(norms);
  test_gated_product<T>(products);
  test_decode<T>(decodes);
  std::printf("%s: %d failures\n", Stored<T>::name, failures);
}

// The conversions of every 16-bit number there and back, and of what lies between neighbours.
template <typename T>
void test_conversions() {
  for (uint32_t bits = 0; bits < 1 << 16; bits++) {
    T x = {uint16_t(bits)};
    float y = to_float(x);
    T back = rounded<T>(y);
    if (y != y ? to_float(back) == to_float(back) : back.bits != x.bits) {
      if (failures++ < 20) std::printf("%s: bits %04x became %04x\n", Stored<T>::name, bits, back.bits);
    }
  }
}

int main() {
  test_conversions<bf16>();
  test_conversions<fp16>();
  test_all<float>();
  test_all<bf16>();
  test_all<fp16>();
  return failures ? 1 : 0;
}

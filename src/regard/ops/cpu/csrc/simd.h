// Vectors of kLanes fp32 numbers, in the vector extension of GCC and Clang: one source for AVX-512 (16 lanes), AVX2 (8)
// and Arm (4). Operators work lane by lane; what they cannot express is a function here. The sources are compiled without
// contraction of a * b + c, so that `fma` stands where a product is not rounded, and nowhere else.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "numbers.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));  // the bits of 16-bit numbers
typedef int8_t vb __attribute__((vector_size(kLanes)));

inline vf splat(float x) { return x - vf{}; }

// Calls f with the constants 0, ..., kTimes - 1: a loop that is unrolled before GCC decides what stays in registers.
template <typename F, int... I>
__attribute__((always_inline)) inline void unroll(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}
template <int kTimes, typename F>
__attribute__((always_inline)) inline void unroll(F f) {
  unroll(f, std::make_integer_sequence<int, kTimes>());
}

// ---- loads and stores, of any alignment

template <typename Vector, typename T>
inline Vector load_bits(const T* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename T, typename Vector>
inline void store_bits(T* p, Vector v) {
  std::memcpy(p, &v, sizeof v);
}

// 16-bit numbers as 32-bit ones, and the lower halves of 32-bit numbers. (GCC 12 splits a vector to convert it.)
inline vu widen(vh h) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#else
  return __builtin_convertvector(h, vu);
#endif
}
inline vh lower_halves(vu x) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, vh);
#endif
}

// The first kBytes of kLanes bytes as 32-bit numbers, and zeros; nothing behind them is read.
template <int kBytes = kLanes>
inline vu widen_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  if constexpr (kBytes == 16) return (vu)_mm512_cvtepu8_epi32(load_bits<__m128i>(p));
  if constexpr (kBytes == 8) return (vu)_mm512_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__AVX2__)
  if constexpr (kBytes == 8) return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#endif
  vu x = {};
  for (int i = 0; i < kBytes; i++) x[i] = p[i];
  return x;
}

inline vf from_bits(vh h, bf16) { return (vf)(widen(h) << 16); }
inline vf from_bits(vh h, fp16) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16((float16x4_t)h);
#else
  vf v;
  for (int i = 0; i < kLanes; i++) v[i] = to_float(fp16{h[i]});
  return v;
#endif
}

inline vf load(const float* p) { return load_bits<vf>(p); }
template <typename T>
inline vf load(const T* p) {
  return from_bits(load_bits<vh>(p), T{});
}

// The bits of x, rounded to nearest, ties to even; NaN stays NaN.
inline vh to_bits(vf x, bf16) {
  vu bits = (vu)x;
  vu nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return lower_halves((x == x) ? nearest : (vu{} + 0x7FC0));
}
inline vh to_bits(vf x, fp16) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (vh)vcvt_f16_f32((float32x4_t)x);
#else
  vh h;
  for (int i = 0; i < kLanes; i++) h[i] = rounded<fp16>(x[i]).bits;
  return h;
#endif
}

inline void store(float* p, vf x) { store_bits(p, x); }
template <typename T>
inline void store(T* p, vf x) {
  store_bits(p, to_bits(x, T{}));
}

// The first n < kLanes numbers at p, and zeros; nothing behind them is read.
template <typename T>
inline vf load_first(const T* p, int64_t n) {
  T numbers[kLanes] = {};
  std::memcpy(numbers, p, n * sizeof(T));
  return load(numbers);
}
template <typename T>
inline void store_first(T* p, vf x, int64_t n) {
  T numbers[kLanes];
  store(numbers, x);
  std::memcpy(p, numbers, n * sizeof(T));
}

// x rounded to what a number of type T can hold.
template <typename T>
inline vf rounded_lanes(vf x) {
  return from_bits(to_bits(x, T{}), T{});
}
template <>
inline vf rounded_lanes<float>(vf x) {
  return x;
}

// Asks for the cache lines of some bytes, into the L2 cache.
inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

// ---- arithmetic

// a * b + c, rounded once.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  vf y;
  for (int i = 0; i < kLanes; i++) y[i] = std::fma(a[i], b[i], c[i]);
  return y;
#endif
}

// The greater of two numbers; y where x is NaN.
inline vf larger(vf x, vf y) { return x > y ? x : y; }
inline float larger(float x, float y) { return x > y ? x : y; }

// The lanes joined in halves: the order is the same for every number of threads.
typedef float v4f __attribute__((vector_size(16)));
template <typename Join>
inline float join_lanes(v4f v, Join join) {
  v4f pairs = join(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  return join(pairs, __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2))[0];
}
#if defined(__AVX2__)
typedef float v8f __attribute__((vector_size(32)));
template <typename Join>
inline float join_lanes(v8f v, Join join) {
  return join_lanes(join(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7)), join);
}
#endif
#if defined(__AVX512F__)
template <typename Join>
inline float join_lanes(vf v, Join join) {
  v8f low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  v8f high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return join_lanes(join(low, high), join);
}
#endif

inline float sum(vf v) {
  return join_lanes(v, [](auto x, auto y) { return x + y; });
}
inline float largest(vf v) {
  return join_lanes(v, [](auto x, auto y) { return x > y ? x : y; });
}

// e^x for x up to about 1, accurate to about one rounding: 0 below -87, where it would be subnormal, and NaN for NaN.
//
//   e^x = 2^n e^r,  n = round(x / ln 2),  r = x - n ln 2 in two parts
//
// n is rounded by adding 1.5 * 2^23, after which it is in the low bits of the sum. e^r is a polynomial of degree 7 with the
// coefficients of Cephes' expf.
inline vf exp(vf x) {
  const vf least = splat(-87.0f), magic = splat(12582912.0f);
  vf y = (x < least) ? least : x;
  vf shifted = fma(y, splat(1.4426950408889634f), magic), n = shifted - magic;
  vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), y));
  vf p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = fma(p, r, splat(c));
  }
  vf power = fma(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)  // multiplies by 2^n, and sets the other lanes to 0
  __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(normal, (__m512)power, (__m512)n);
#else
  vf two_to_n = (vf)(((vi)shifted << 23) + (127 << 23));
  return (x < least) ? vf{} : power * two_to_n;
#endif
}

inline float exp1(float x) { return exp(splat(x))[0]; }

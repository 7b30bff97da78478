// The numbers that tensors store, as types of their own: float, bfloat16 and float16.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

// The bits of x as a number of another type of the same size.
template <typename To, typename From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
inline float to_float(fp16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  return float(bits_as<__fp16>(x.bits));  // GCC 12 has no _Float16 for Arm in C++
#endif
}

// x rounded to nearest, ties to even; NaN stays NaN.
template <typename T>
T rounded(float x);

template <>
inline float rounded<float>(float x) {
  return x;
}

template <>
inline bf16 rounded<bf16>(float x) {
  if (x != x) return {0x7FC0};
  uint32_t bits = bits_as<uint32_t>(x);
  return {uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline fp16 rounded<fp16>(float x) {
#if defined(__F16C__)
  return {uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  return {bits_as<uint16_t>(__fp16(x))};
#endif
}

// x as a float that a number of type T can hold.
template <typename T>
inline float rounded_float(float x) {
  return to_float(rounded<T>(x));
}

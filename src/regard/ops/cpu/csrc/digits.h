// Products of 8-bit or 4-bit codes with vectors of 16-bit numbers, in integers: one instruction (VNNI's vpdpbusd) multiplies
// 64 codes with 64 signed bytes, and adds four neighbouring products to each of 16 exact sums.
//
// A block of a vector, as long as the columns of a scale or longer, becomes integers of 24 bits with a common factor, a power
// of two, and each integer three signed bytes, its digits:
//
//   x_i = f X_i,   X_i = 65536 d2_i + 256 d1_i + d0_i,   -128 <= d_ki <= 127
//   sum_i code_i x_i = f (65536 sum_i code_i d2_i + 256 sum_i code_i d1_i + sum_i code_i d0_i)
//
// Nothing is rounded where every number of the block is at least 2^-14 (bf16) or 2^-11 (fp16) of the largest; a smaller one
// may change by 2^-22 of the largest. `pack_digits` says which vectors have numbers that are not finite, or blocks with many
// rounded numbers: those are multiplied in fp32. Sums are joined in integers where 32 bits suffice, and otherwise in fp32.
//
// The instruction takes unsigned codes. An 8-bit code c becomes c + 128, as one bit is flipped, and a 4-bit code c is
// multiplied without its zero z. Corrections that depend on the vector make up for it:
//
//   sum_i c_i X_i = sum_i (c_i + 128) X_i - 128 sum_i X_i
//   sum_i (c_i - z) X_i = sum_i c_i X_i - z sum_i X_i
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (VPDPBUSD).
#pragma once
#include "gemv.h"
#include "simd.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define REGARD_HAS_DIGITS 1
#else
#define REGARD_HAS_DIGITS 0
#endif

constexpr int kInt4Block = 128;  // the columns whose 4-bit codes are stored together
constexpr int kDigits = 3;       // the signed bytes of an integer
constexpr int kRowsAtOnce = 4;   // the rows that are multiplied with the digits of a vector in registers

// The number of words of a block of digits: a vector for each digit of 64 columns, and then the corrections, for 8-bit codes
// those of the two lower digits and of the upper one, for 4-bit codes minus the sums of the integers.
constexpr int digit_words(int bits, int columns) { return (columns / 64 * kDigits + (bits == 4 ? 1 : 2)) * 16; }

constexpr int kDigitWords = 2 * digit_words(8, 64);  // the most words of 128 columns

// The digits of some vectors, from `pack_digits`.
struct Digits {
  const int32_t* words;
  int64_t vector_words;  // the words of a vector
  const float* factors;
  int64_t blocks;  // the factors of a vector

  Digits from(int64_t r) const { return {words + r * vector_words, vector_words, factors + r * blocks, blocks}; }
};

#if REGARD_HAS_DIGITS
inline vi add_byte_products(vi sums, vi codes, vi digits) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)digits);
}
inline vf integers_to_floats(vi x) { return (vf)_mm512_cvtepi32_ps((__m512i)x); }

// Writes the digits and corrections of the blocks of a vector to words, and their factors. The result is the number of
// blocks that must be multiplied in fp32: with numbers that are not finite, or where more than a fourth of the numbers that
// are not 0 is rounded. (Fewer, together, change a sum by less than the rounding of the result does.)
template <int kBits, int kColumns>
static int64_t pack_digits(const float* x, int64_t blocks, int32_t* words, float* factors) {
  constexpr int kVectors = kColumns / 16, kRoundedShare = 4;
  constexpr uint32_t kMargin = 1 << 17;  // a mantissa near 2 counts as the next power of two: 127 is the largest digit
  int64_t bad = 0;
  for (int64_t block = 0; block < blocks; block++, x += kColumns, words += digit_words(kBits, kColumns)) {
    __m512i largest_of = _mm512_setzero_si512();
    for (int i = 0; i < kVectors; i++) {
      __m512i bits = (__m512i)load_bits<vi>(x + 16 * i);
      largest_of = _mm512_max_epu32(largest_of, _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
    }
    uint32_t largest = _mm512_reduce_max_epu32(largest_of);
    // the largest number is below 2^(exponent - 126), and its integer below 2^23; the least factor is a normal number
    uint32_t exponent = std::max<uint32_t>((largest + kMargin) >> 23, 23), biased = exponent - 22;
    factors[block] = bits_as<float>(biased << 23);
    vf inverse = splat(bits_as<float>((254 - biased) << 23));
    vi bytes[kVectors], total = {};  // the lower three bytes are the digits
    bool finite = largest < 0x7F800000;  // otherwise all digits are 0, because integers of NaN would overflow in the sums
    int rounded = 0, others = 0;
    for (int i = 0; i < kVectors; i++) {
      vf number = load(x + 16 * i), quotient = number * inverse;
      vi integers = (vi)_mm512_maskz_cvtps_epi32(finite ? 0xFFFF : 0, (__m512)quotient);
      rounded += __builtin_popcount(
          _mm512_cmp_ps_mask(_mm512_cvtepi32_ps((__m512i)integers), (__m512)quotient, _CMP_NEQ_UQ));
      others += __builtin_popcount(_mm512_cmp_ps_mask((__m512)number, _mm512_setzero_ps(), _CMP_NEQ_UQ));
      bytes[i] = (integers + 0x808080) ^ 0x808080;
      total -= integers;
    }
    bad += rounded * kRoundedShare > others || !finite;
    if (kBits == 4) {  // byte b of word w has the codes 32 b + w and 32 b + 16 + w
      for (int half = 0; half < 2; half++) {
        for (int k = 0; k < kDigits; k++) {
          vi digits = {};
          for (int b = 0; b < 4; b++) digits |= ((bytes[2 * b + half] >> (8 * k)) & 255) << (8 * b);
          store_bits(words + (half * kDigits + k) * 16, digits);
        }
      }
      store_bits(words + 2 * kDigits * 16, total);
    } else {
      vi corrections[kDigits] = {}, middle = vi{} - 0x7F7F7F80;  // 128 in each byte
      for (int i = 0; i < kVectors / 4; i++) {
        for (int k = 0; k < kDigits; k++) {
          int32_t* place = words + (i * kDigits + k) * 16;
          for (int q = 0; q < 4; q++) {
            auto shifted = (__m512i)(bytes[4 * i + q] >> (8 * k));
            _mm_storeu_si128((__m128i*)(place + 4 * q), _mm512_cvtepi32_epi8(shifted));
          }
          corrections[k] = add_byte_products(corrections[k], middle, load_bits<vi>(place));
        }
      }
      int32_t* after = words + kVectors / 4 * kDigits * 16;
      store_bits(after, -(corrections[0] + (corrections[1] << 8)));
      store_bits(after + 16, -corrections[2]);
    }
  }
  return bad;
}

// The scale of each lane of the sums of a block. With groups of 32, the lower eight lanes have the first 32 codes.
template <int kGroup>
static inline vf lane_scales(const float* scales) {
  if (kGroup > 32) return splat(scales[0]);
  const __m512i order = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  return (vf)_mm512_permutexvar_ps(order, _mm512_castps128_ps512(_mm_castpd_ps(_mm_load_sd((const double*)scales))));
}

// The dot products of kRows rows of codes with kCount vectors. scales, zeros: those of the first row, in fp32 and as
// integers; the second half of the `row_scales` numbers of a row are its zeros.
template <int kBits, int kGroup, int kRows, int kCount>
static inline void digit_dots(const uint8_t* codes, int64_t row_bytes, const float* scales, const int32_t* zeros,
                              int64_t row_scales, Digits digits, float (&out)[kRows][kCount]) {
  constexpr int kColumns = kBits == 4 || kGroup == 128 ? 128 : 64, kRegisters = kColumns / 64;
  constexpr int kBytes = kColumns * kBits / 8, kWords = digit_words(kBits, kColumns);
  const int64_t ahead = std::max(kGemvAhead, kRows * row_bytes);  // behind the rows that are read now
  vf total[kRows][kCount] = {};
  for (int64_t block = 0; block < digits.blocks; block++) {
    vi code[kRows][kRegisters], zero[kRows];
    vf scale[kRows];
    for (int n = 0; n < kRows; n++) {
      const uint8_t* place = codes + n * row_bytes + block * kBytes;
      prefetch(place + ahead, kBytes);
      int64_t group = n * row_scales + block * (kColumns / kGroup);
      scale[n] = lane_scales<kGroup>(scales + group);
      if (kBits == 4) {
        vi both = load_bits<vi>(place);
        zero[n] = vi{} + zeros[group + row_scales / 2];
        code[n][0] = both & 0x0F0F0F0F;
        code[n][kRegisters - 1] = (both >> 4) & 0x0F0F0F0F;
      } else {
        for (int i = 0; i < kRegisters; i++) code[n][i] = load_bits<vi>(place + 64 * i) ^ -0x7F7F7F80;
      }
    }
    for (int r = 0; r < kCount; r++) {
      const int32_t* words = digits.words + r * digits.vector_words + block * kWords;
      vi correction = load_bits<vi>(words + kRegisters * kDigits * 16);
      vi upper = kBits == 4 ? vi{} : load_bits<vi>(words + (kRegisters * kDigits + (kBits == 8)) * 16);
      vi sums[kRows][kDigits];
      for (int n = 0; n < kRows; n++) {
        sums[n][0] = kBits == 4 ? correction * zero[n] : correction;
        sums[n][1] = vi{};
        sums[n][2] = upper;
      }
      for (int i = 0; i < kRegisters; i++) {
        for (int k = 0; k < kDigits; k++) {
          vi digit = load_bits<vi>(words + (i * kDigits + k) * 16);
          for (int n = 0; n < kRows; n++) sums[n][k] = add_byte_products(sums[n][k], code[n][i], digit);
        }
      }
      vf factor = splat(digits.factors[r * digits.blocks + block]);
      for (int n = 0; n < kRows; n++) {
        vf joined;
        if (kBits == 4) {
          joined = integers_to_floats(sums[n][0] + ((sums[n][1] + (sums[n][2] << 8)) << 8));
        } else {  // 8 products of 8 and 24 bits in a lane need 34 bits
          joined = fma(integers_to_floats(sums[n][2]), splat(65536.0f), integers_to_floats(sums[n][0] + (sums[n][1] << 8)));
        }
        total[n][r] = fma(joined, scale[n] * factor, total[n][r]);
      }
    }
  }
  for (int n = 0; n < kRows; n++) {
    for (int r = 0; r < kCount; r++) out[n][r] = sum(total[n][r]);
  }
}
#endif

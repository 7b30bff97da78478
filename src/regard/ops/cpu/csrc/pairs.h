// Products of 4-bit codes with vectors of fp32 numbers, in integers of 16 bits, for processors without tables of 16 numbers:
// AVX2's vpmaddwd multiplies 16 of them, and adds two neighbouring products to each of 8 exact sums.
//
// 128 numbers of a vector become integers of 31 bits with a common factor, a power of two, and each integer a pair:
//
//   x_i = f X_i,   X_i = 65536 u_i + l_i,   -32768 <= u_i, l_i <= 32767
//   sum_i (c_i - z) x_i = f (65536 (sum_i c_i u_i - z sum_i u_i) + (sum_i c_i l_i - z sum_i l_i))
//
// A number of at least 2^-7 of the largest is not rounded, and a smaller one changes by at most 2^-31 of the largest. Where
// more than a fourth of the numbers that are not 0 are rounded, or one is not finite, `pack_pairs` sets the factor to 0, and
// the 128 numbers are multiplied in fp32. (Fewer, together, change a sum by less than the rounding of the result does.)
//
// All sums of products and zeros that are whole numbers are below 2^24, so that they are exact in fp32, and codes that equal
// their zero give exactly 0.
//
// The codes come from words as follows. Of 128 codes, byte b of word w has code 32 b + w and, above it, 32 b + 16 + w. Each 16
// bytes are transposed, so that word j of them has byte j of four words: codes of the columns 32 j to 32 j + 31. Shifted by 0, 4,
// 8 and 12 bits, the 16-bit halves of a word have one code each in their lowest bits. A lane of the sums has the products of 32
// columns that share a scale.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (PMADDWD, PSHUFB).
#pragma once
#include "simd.h"

#if defined(__AVX512F__)
#define REGARD_HAS_PAIRS 0
#else
#define REGARD_HAS_PAIRS 1
#endif

constexpr int kPairColumns = 128;
constexpr int kPairWords = kPairColumns + 2 * kLanes;  // the pairs, and then the sums of u_i and of l_i in each lane

// The pairs of some vectors, from `pack_pairs`.
struct Pairs {
  const int32_t* words;
  const float* factors;
  int64_t blocks;  // the factors of a vector

  Pairs from(int64_t r) const { return {words + r * blocks * kPairWords, factors + r * blocks, blocks}; }
};

#if REGARD_HAS_PAIRS
// Adds the products of 16-bit integers to sums, those of two neighbours to each lane.
static inline void add_neighbours(vi a, vi b, vi& sums) {
#if defined(__AVX2__)
  sums += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  __asm__("" : "+x"(sums));  // now: GCC would multiply all numbers first, and keep the products in memory until it adds them
#else
  auto low = [](vi x) { return (vi)((vu)x << 16) >> 16; };
  sums += low(a) * low(b) + (a >> 16) * (b >> 16);
#endif
}

static inline vi nearest_integers(vf x) {
#if defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)x);
#else
  vi y;
  for (int i = 0; i < kLanes; i++) y[i] = int32_t(std::nearbyint(x[i]));
  return y;
#endif
}

// Each 16 bytes as a matrix of 4 rows of 4 bytes, transposed.
static inline vu transpose_bytes(vu x) {
  typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));
  auto bytes = (Bytes)x;
#if defined(__AVX2__)
  return (vu)__builtin_shufflevector(bytes, bytes, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                     16, 20, 24, 28, 17, 21, 25, 29, 18, 22, 26, 30, 19, 23, 27, 31);
#else
  return (vu)__builtin_shufflevector(bytes, bytes, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#endif
}

// The scale, or zero, of each lane of the sums of 128 columns.
template <int kGroup>
static inline vf pair_scales(const float* scales) {
  if (kGroup == 128) return splat(scales[0]);
  v4f four = {scales[0], scales[32 / kGroup], scales[64 / kGroup], scales[96 / kGroup]};
  if (kGroup == 32) four = load_bits<v4f>(scales);
#if defined(__AVX2__)
  return __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3);
#else
  return four;
#endif
}

// Writes the pairs of the blocks of a vector and their sums to words, and the factors of the blocks.
static void pack_pairs(const float* x, int64_t blocks, int32_t* words, float* factors) {
  constexpr int kRoundedShare = 4;
  constexpr uint32_t kMargin = 1 << 8;           // a mantissa near 2 counts as the next power of two: 32767 is the largest u_i
  constexpr uint32_t kLeast = 64, kEnd = 255;  // exponents; a smaller factor could be subnormal when a scale multiplies it
  for (int64_t block = 0; block < blocks; block++, x += kPairColumns, words += kPairWords) {
    vu largest_of = {};
    for (int i = 0; i < kPairColumns; i += kLanes) {
      vu bits = load_bits<vu>(x + i) & 0x7FFFFFFF;
      largest_of = bits > largest_of ? bits : largest_of;
    }
    uint32_t largest = 0;
    for (int lane = 0; lane < kLanes; lane++) largest = std::max<uint32_t>(largest, largest_of[lane]);
    // the largest number is below 2^(exponent - 126), and its integer below 2^31 - 2^15
    uint32_t exponent = (largest + kMargin) >> 23, biased = exponent - 30;
    bool fits = exponent >= kLeast && exponent < kEnd;
    vf inverse = splat(fits ? bits_as<float>((254 - biased) << 23) : 0.0f);
    int32_t integers[kPairColumns];
    vi rounded = {}, others = {};  // minus the counts
    for (int i = 0; i < kPairColumns; i += kLanes) {
      vf number = load(x + i), quotient = number * inverse;
      vi whole = nearest_integers(fits ? quotient : vf{});
      rounded += __builtin_convertvector(whole, vf) != quotient;
      others += number != vf{};
      store_bits(integers + i, whole);
    }
    int share = 0;
    for (int lane = 0; lane < kLanes; lane++) share += kRoundedShare * rounded[lane] - others[lane];
    fits = fits && share >= 0;
    factors[block] = fits ? bits_as<float>(biased << 23) : largest == 0 ? 1.0f : 0.0f;
    auto halves = reinterpret_cast<int16_t*>(words);
    for (int i = 0; i < kPairColumns; i++) {
      int w = i % 16, byte = i / 32, shift = w % 2 * 2 + i / 16 % 2, vector = w / kLanes * 4 + shift;
      int16_t* place = halves + vector * 4 * kLanes + (w % kLanes / 4 * 4 + byte) * 2 + w / 2 % 2;
      int32_t X = fits ? integers[i] : 0;
      place[2 * kLanes] = int16_t(X);
      place[0] = int16_t((X - int16_t(X)) >> 16);
    }
    vi sums[2] = {}, ones = vi{} + 0x00010001;
    for (int i = 0; i < kPairColumns / kLanes; i++) add_neighbours(load_bits<vi>(words + i * kLanes), ones, sums[i % 2]);
    for (int k = 0; k < 2; k++) store_bits(words + kPairColumns + k * kLanes, __builtin_convertvector(sums[k], vf));
  }
}

// Adds the products of kRows rows of a block of codes with kCount vectors to sums. scales: those of the block and the first row;
// its zeros are `row_scales` / 2 numbers behind them.
template <int kGroup, int kRows, int kCount>
static inline void add_pair_dots(const uint8_t* codes, int64_t row_bytes, const float* scales, int64_t row_scales, Pairs pairs,
                                 int64_t block, vf (&total)[kRows][kCount]) {
  const int32_t* words = pairs.words + block * kPairWords;
  const int64_t vector_words = pairs.blocks * kPairWords;
  vi upper[kRows][kCount] = {}, lower[kRows][kCount] = {};
  unroll<16 / kLanes>([&](auto part) {
    vu bytes[kRows];
    unroll<kRows>([&](auto n) { bytes[n] = transpose_bytes(load_bits<vu>(codes + n * row_bytes + 4 * kLanes * part)); });
    unroll<4 * kCount>([&](auto i) {
      constexpr int shift = i / kCount, r = i % kCount;
      const int32_t* place = words + r * vector_words + (part * 4 + shift) * 2 * kLanes;
      vi u = load_bits<vi>(place), l = load_bits<vi>(place + kLanes);
      unroll<kRows>([&](auto n) {
        auto code = (vi)((bytes[n] >> uint32_t(4 * shift)) & 0x000F000F);
        add_neighbours(code, u, upper[n][r]);
        add_neighbours(code, l, lower[n][r]);
      });
    });
  });
  for (int n = 0; n < kRows; n++) {
    const float* own = scales + n * row_scales;
    vf scale = pair_scales<kGroup>(own), zero = pair_scales<kGroup>(own + row_scales / 2);
    for (int r = 0; r < kCount; r++) {
      const int32_t* sums = words + r * vector_words + kPairColumns;
      vf u = fma(-zero, load_bits<vf>(sums), __builtin_convertvector(upper[n][r], vf));
      vf l = fma(-zero, load_bits<vf>(sums + kLanes), __builtin_convertvector(lower[n][r], vf));
      vf factor = splat(pairs.factors[r * pairs.blocks + block]);
      total[n][r] = fma(fma(u, splat(65536.0f), l), scale * factor, total[n][r]);
    }
  }
}
#endif

// Products of a few vectors with a matrix that is stored in fewer bits, and the conversion of its rows to plain numbers.
// `regard.ops.stored_weights` defines the forms:
//
//   8-bit codes: w = scale code.  4-bit codes: w = scale (code - zero); the scales of a row are followed by its zeros, and of
//   128 neighbouring codes, code c is in bits 4 (c / 16) to 4 (c / 16) + 3 of word c % 16.
#include "stored.h"

#include <algorithm>
#include <type_traits>

#include "digits.h"
#include "entry.h"
#include "gemv.h"
#include "pairs.h"
#include "tasks.h"

constexpr int64_t kScaledRows = 16;  // the rows whose scales are converted to fp32 at a time
constexpr int kLeastGroup = 32;      // the fewest columns that share a scale

// Calls a function with a number whose type is that of stored numbers: with_type(kBf16, f) is f(bf16{}).
template <typename Function>
static inline auto with_type(int64_t dtype, Function function) {
  return dtype == kFp32 ? function(float{}) : dtype == kBf16 ? function(bf16{}) : function(fp16{});
}

// Calls a function with the number of columns that share a scale, as a constant.
template <typename Function>
static inline void with_group(int64_t group, Function function) {
  if (group == 32) return function(std::integral_constant<int, 32>{});
  if (group == 64) return function(std::integral_constant<int, 64>{});
  function(std::integral_constant<int, 128>{});
}

static inline vf to_floats(vi x) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps((__m512i)x);
#else
  return __builtin_convertvector(x, vf);
#endif
}

// Signed bytes as fp32.
static inline vf load_codes(const int8_t* p) {
#if defined(__AVX512F__)
  return to_floats((vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return to_floats((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  return to_floats(__builtin_convertvector(load_bits<vb>(p), vi));
#endif
}

// scale (code - zero) for the lowest four bits of each word.
struct Int4Numbers {
  vf scale, zero;
  Int4Numbers() = default;
#if defined(__AVX512F__)
  vf table;
  Int4Numbers(float s, float z) : scale(splat(s)), zero(splat(z)) {
    const vf every = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    table = (every - zero) * scale;
  }
  vf operator()(vu words) const { return (vf)_mm512_permutexvar_ps((__m512i)words, (__m512)table); }
#else
  Int4Numbers(float s, float z) : scale(splat(s)), zero(splat(z)) {}
  vf operator()(vu words) const { return (to_floats((vi)(words & 15)) - zero) * scale; }
#endif
};

// ---- products in fp32

// Adds the products of kRows vectors of weights with those of kCount vectors x, which are `distance` numbers apart.
template <int kRows, int kCount>
static inline void add_products(const vf (&w)[kRows], const float* x, int64_t distance, vf (&total)[kRows][kCount]) {
  for (int r = 0; r < kCount; r++) {
    vf numbers = load(x + r * distance);
    for (int n = 0; n < kRows; n++) total[n][r] = fma(w[n], numbers, total[n][r]);
  }
}

// Adds the products of kRows rows of a block of 4-bit codes with kCount vectors to sums. scales: those of the block and the
// first row; its zeros are `row_scales` / 2 numbers behind them.
template <int kGroup, int kRows, int kCount>
static inline void add_int4_dots(const uint8_t* codes, int64_t row_bytes, const float* scales, int64_t row_scales,
                                 const float* x, int64_t distance, vf (&total)[kRows][kCount]) {
#pragma GCC unroll 4
  for (int part = 0; part < 16 / kLanes * (kInt4Block / kGroup); part++) {
    int64_t lanes = part % (16 / kLanes) * kLanes, group = part / (16 / kLanes);
    vu words[kRows];
    for (int n = 0; n < kRows; n++) words[n] = load_bits<vu>(codes + n * row_bytes + 4 * lanes);
    Int4Numbers numbers[kRows];
    for (int n = 0; n < kRows; n++) {
      const float* own = scales + n * row_scales + group;
      numbers[n] = {own[0], own[row_scales / 2]};
    }
#pragma GCC unroll 8
    for (int64_t j = group * kGroup / 16; j < (group + 1) * kGroup / 16; j++) {
      vf w[kRows];
      for (int n = 0; n < kRows; n++) w[n] = numbers[n](words[n] >> uint32_t(4 * j));
      add_products(w, x + 16 * j + lanes, distance, total);
    }
  }
}

// The dot products of kRows rows of codes with kCount vectors. scales: those of the first row, in fp32; the second half of the
// `row_scales` numbers of a row of 4-bit codes are its zeros. pairs: the vectors for 4-bit codes, see pairs.h. A product has one
// sum, whatever else is computed beside it.
template <int kBits, int kGroup, int kRows, int kCount>
static inline void code_dots(const uint8_t* codes, int64_t row_bytes, const float* scales, int64_t row_scales, const float* x,
                             int64_t distance, int64_t width, [[maybe_unused]] Pairs pairs, float (&out)[kRows][kCount]) {
  const int64_t ahead = std::max(kGemvAhead, kRows * row_bytes);  // behind the rows that are read now
  vf total[kRows][kCount] = {};
  if constexpr (kBits == 8) {
    for (int64_t g = 0; g < width / kGroup; g++) {
      for (int n = 0; n < kRows; n++) prefetch(codes + n * row_bytes + g * kGroup + ahead, kGroup);
      for (int j = 0; j < kGroup; j += kLanes) {
        vf w[kRows];
        for (int n = 0; n < kRows; n++) {
          w[n] = load_codes((const int8_t*)codes + n * row_bytes + g * kGroup + j) * scales[n * row_scales + g];
        }
        add_products(w, x + g * kGroup + j, distance, total);
      }
    }
  } else {
    for (int64_t block = 0; block < width / kInt4Block; block++) {
      const uint8_t* place = codes + block * (kInt4Block / 2);
      const float *own = scales + block * (kInt4Block / kGroup), *numbers = x + block * kInt4Block;
      for (int n = 0; n < kRows; n++) prefetch(place + n * row_bytes + ahead, kInt4Block / 2);
#if REGARD_HAS_PAIRS
      add_pair_dots<kGroup>(place, row_bytes, own, row_scales, pairs, block, total);
      for (int r = 0; r < kCount; r++) {
        if (pairs.from(r).factors[block] != 0.0f) continue;
        for (int n = 0; n < kRows; n++) {
          vf one[1][1] = {{total[n][r]}};
          add_int4_dots<kGroup>(place + n * row_bytes, row_bytes, own + n * row_scales, row_scales, numbers + r * distance,
                                distance, one);
          total[n][r] = one[0][0];
        }
      }
#else
      add_int4_dots<kGroup>(place, row_bytes, own, row_scales, numbers, distance, total);
#endif
    }
  }
  for (int n = 0; n < kRows; n++) {
    for (int r = 0; r < kCount; r++) out[n][r] = sum(total[n][r]);
  }
}

// Rows of a matrix, the vectors they are multiplied with, and where the sums go; see StoredRows::multiply.
struct Product {
  const StoredMatrix& matrix;
  int64_t first, last, R;
  const float* vectors;
  int64_t distance;
  float* sums;
  int64_t sums_distance;
  Pairs pairs;

  const uint8_t* row(int64_t n) const { return static_cast<const uint8_t*>(matrix.codes) + n * matrix.row_bytes; }
};

// Writes the scales, and zeros, of up to kScaledRows rows from row n on in fp32; asks for those of the next rows.
static void widen_scales(const Product& call, int64_t n, float* wide) {
  int64_t step = call.matrix.row_scales, count = std::min(kScaledRows, call.last - n) * step;
  with_type(call.matrix.dtype, [&](auto kind) {
    auto scales = static_cast<const decltype(kind)*>(call.matrix.scales) + n * step;
    prefetch(scales + kScaledRows * step, count * sizeof(kind));
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(wide + i, load(scales + i));
    if (i < count) store_first(wide + i, load_first(scales + i, count - i), count - i);
  });
}

// The products of kRows rows from row n on with all vectors, up to kMost of them at a time.
template <int kBits, int kGroup, int kRows, int kMost = kLanes == 16 ? 8 : 4>
static void multiply_code_rows(const Product& call, int64_t n, const float* scales) {
  const StoredMatrix& m = call.matrix;
  for (int64_t r = 0; r < call.R; r += kMost) {
    int64_t left = std::min<int64_t>(kMost, call.R - r);
    auto run = [&](auto rows, auto count) {  // fewer rows at a time, where the sums would not stay in registers
      for (int i = 0; i < kRows; i += rows) {
        float out[rows][count];
        code_dots<kBits, kGroup, rows, count>(call.row(n + i), m.row_bytes, scales + i * m.row_scales, m.row_scales,
                                              call.vectors + r * call.distance, call.distance, m.width,
                                              call.pairs.from(r), out);
        for (int j = 0; j < count; j++) {
          for (int k = 0; k < rows; k++) call.sums[(r + j) * call.sums_distance + n + i + k - call.first] = out[k][j];
        }
      }
    };
    constexpr bool kHasPairs = kBits == 4 && REGARD_HAS_PAIRS;  // two sums of each product
    constexpr std::integral_constant<int, kRows> all;
    constexpr std::integral_constant<int, std::min(kHasPairs ? 2 : kRows, kRows)> most;
    constexpr std::integral_constant<int, std::min(kHasPairs ? 1 : 2, kRows)> few;
    constexpr std::conditional_t<kLanes == 16, decltype(all), decltype(few)> some;
    if (left == 1) run(all, std::integral_constant<int, 1>());
    if (left == 2) run(most, std::integral_constant<int, 2>());
    if (left == 3) run(some, std::integral_constant<int, 3>());
    if (left == 4) run(some, std::integral_constant<int, 4>());
    if constexpr (kMost == 8) {
      if (left == 5) run(few, std::integral_constant<int, 5>());
      if (left == 6) run(few, std::integral_constant<int, 6>());
      if (left == 7) run(few, std::integral_constant<int, 7>());
      if (left == 8) run(few, std::integral_constant<int, 8>());
    }
  }
}

template <int kBits, int kGroup>
static void multiply_codes(const Product& call, float* wide) {
  for (int64_t begin = call.first; begin < call.last; begin += kScaledRows) {
    int64_t end = std::min(call.last, begin + kScaledRows), n = begin;
    widen_scales(call, begin, wide);
    auto scales = [&] { return wide + (n - begin) * call.matrix.row_scales; };
    for (; n + kRowsAtOnce <= end; n += kRowsAtOnce) multiply_code_rows<kBits, kGroup, kRowsAtOnce>(call, n, scales());
    for (; n < end; n++) multiply_code_rows<kBits, kGroup, 1>(call, n, scales());
  }
}

// ---- products in integers

#if REGARD_HAS_DIGITS
template <int kBits, int kGroup, int kRows, int kCount>
static inline void write_digit_dots(const Product& call, int64_t n, int64_t r, const float* wide, const int32_t* whole,
                                    const Digits& digits) {
  float out[kRows][kCount];
  digit_dots<kBits, kGroup, kRows, kCount>(call.row(n), call.matrix.row_bytes, wide, whole, call.matrix.row_scales,
                                           digits.from(r), out);
  for (int j = 0; j < std::min<int64_t>(kCount, call.R - r); j++) {
    for (int i = 0; i < kRows; i++) call.sums[(r + j) * call.sums_distance + n + i - call.first] = out[i][j];
  }
}

template <int kBits, int kGroup>
static void multiply_digits(const Product& call, const Digits& digits, float* wide, int32_t* whole) {
  const int64_t step = call.matrix.row_scales;
  for (int64_t begin = call.first; begin < call.last; begin += kScaledRows) {
    int64_t end = std::min(call.last, begin + kScaledRows);
    widen_scales(call, begin, wide);
    if (kBits == 4) {
      for (int64_t i = 0; i < (end - begin) * step; i++) whole[i] = int32_t(wide[i]);
    }
    int64_t n = begin;
    for (; n + kRowsAtOnce <= end; n += kRowsAtOnce) {
      const float* scales = wide + (n - begin) * step;
      const int32_t* zeros = whole + (n - begin) * step;
      if (call.R == 1) {
        write_digit_dots<kBits, kGroup, kRowsAtOnce, 1>(call, n, 0, scales, zeros, digits);
        continue;
      }
      for (int64_t r = 0; r < call.R; r += kGemvVectors) {
        if (call.R - r <= 2) {
          write_digit_dots<kBits, kGroup, kRowsAtOnce, 2>(call, n, r, scales, zeros, digits);
          continue;
        }
        for (int i = 0; i < kRowsAtOnce; i += 2) {
          write_digit_dots<kBits, kGroup, 2, kGemvVectors>(call, n + i, r, scales + i * step, zeros + i * step, digits);
        }
      }
    }
    for (; n < end; n++) {
      for (int64_t r = 0; r < call.R; r++) {
        write_digit_dots<kBits, kGroup, 1, 1>(call, n, r, wide + (n - begin) * step, whole + (n - begin) * step, digits);
      }
    }
  }
}
#endif

static int64_t whole_blocks(int64_t widest) { return (widest + kInt4Block - 1) / kInt4Block; }

StoredRows::StoredRows(int64_t R, int64_t widest)
    : words_(padded_count(R) * whole_blocks(widest) * kDigitWords),
      factors_(padded_count(R) * whole_blocks(widest) * 2),
      spread_(padded_count(R)),
      scales_(kScaledRows * 2 * whole_blocks(widest) * (kInt4Block / kLeastGroup)),
      zeros_(scales_.size()) {}

void StoredRows::multiply(const StoredMatrix& matrix, int64_t first, int64_t last, int64_t R, const float* vectors,
                          int64_t distance, float* sums, int64_t sums_distance) {
  if (matrix.form == kHalf) {
    return with_type(matrix.dtype, [&](auto kind) {
      auto w = static_cast<const decltype(kind)*>(matrix.codes);
      multiply_rows(w, (const decltype(kind)*)nullptr, first, last, vectors, distance, R, matrix.width, sums, sums_distance);
    });
  }
  bool is_int8 = matrix.form == kInt8 || matrix.form == kInt8Digits;
  Pairs pairs = {words_, factors_, matrix.width / kPairColumns};
  Product call = {matrix, first, last, R, vectors, distance, sums, sums_distance, pairs};
#if REGARD_HAS_PAIRS
  if (!is_int8 && packed_ != matrix.width) {
    for (int64_t r = 0; r < R; r++) {
      pack_pairs(vectors + r * distance, pairs.blocks, words_ + r * pairs.blocks * kPairWords, factors_ + r * pairs.blocks);
    }
    packed_ = matrix.width;
  }
#endif
  auto multiply_in_fp32 = [&](const Product& product) {
    with_group(matrix.group, [&](auto group) {
      is_int8 ? multiply_codes<8, group>(product, scales_) : multiply_codes<4, group>(product, scales_);
    });
  };
#if REGARD_HAS_DIGITS
  if (matrix.form == kInt8Digits || matrix.form == kInt4Digits) {
    int64_t columns = is_int8 && matrix.group < 128 ? 64 : 128, blocks = matrix.width / columns;
    int64_t block_words = is_int8 ? digit_words(8, columns) : digit_words(4, columns);
    Digits digits = {words_, blocks * block_words, factors_, blocks};
    int64_t wanted = 4 * matrix.width + 2 * is_int8 + (columns == 128);
    if (packed_ != wanted) {
      for (int64_t r = 0; r < R; r++) {
        const float* x = vectors + r * distance;
        auto pack = !is_int8 ? pack_digits<4, 128> : columns == 64 ? pack_digits<8, 64> : pack_digits<8, 128>;
        spread_[r] = pack(x, blocks, words_ + r * digits.vector_words, factors_ + r * blocks);
      }
      // the vectors that fill up a group are multiplied, too: what an earlier matrix left there would overflow
      std::fill(words_ + R * digits.vector_words, words_ + padded_count(R) * digits.vector_words, 0);
      std::fill(factors_ + R * blocks, factors_ + padded_count(R) * blocks, 0.0f);
      packed_ = wanted;
    }
    if (!is_int8) {
      multiply_digits<4, 128>(call, digits, scales_, zeros_);
    } else {
      with_group(matrix.group, [&](auto group) { multiply_digits<8, group>(call, digits, scales_, zeros_); });
    }
    for (int64_t r = 0; r < R; r++) {
      if (spread_[r]) {
        multiply_in_fp32({matrix, first, last, 1, vectors + r * distance, distance, sums + r * sums_distance, sums_distance, {}});
      }
    }
    return;
  }
#endif
  multiply_in_fp32(call);
}

// ---- entries

template <typename T>
static void stored_linear(StoredLinear* call) {
  constexpr int64_t kTaskBytes = 1 << 16;
  const StoredMatrix& matrix = *call->matrix;
  int64_t R = call->R, M = call->M, N = call->N, width = matrix.width;
  auto x = static_cast<const T*>(call->x), b = static_cast<const T*>(call->b);
  auto y = static_cast<T*>(call->y);
  int64_t step = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(1, matrix.row_bytes)), tasks = (N + step - 1) / step;
  Scratch<float> vectors(padded_count(R) * width), sums(R * step);
  for (int64_t r = 0; r < R; r++) {
    int64_t i = 0;
    for (; i + kLanes <= M; i += kLanes) store(vectors + r * width + i, load(x + r * M + i));
    for (; i < M; i++) vectors[r * width + i] = to_float(x[r * M + i]);
  }
  StoredRows rows(R, width);
  int64_t thread = take_task(call), task;
  while ((task = take_next(call, tasks, thread, call->runs)) < tasks) {
    int64_t first = task * step, count = std::min(N - first, step);
    rows.multiply(matrix, first, first + count, R, vectors, width, sums, step);
    for (int64_t r = 0; r < R; r++) {
      T* out = y + r * N + first;
      for (int64_t i = 0; i < count; i += kLanes) {
        int64_t n = std::min<int64_t>(kLanes, count - i);
        vf numbers = load_first(sums + r * step + i, n);
        store_first(out + i, b == nullptr ? numbers : numbers + load_first(b + first + i, n), n);
      }
    }
  }
}
REGARD_ENTRIES(stored_linear, StoredLinear, stored_linear)

// Writes kLanes numbers at y, or the first n of them.
template <typename T>
static inline void write_lanes(T* y, vf numbers, int64_t n) {
  n >= kLanes ? store(y, numbers) : store_first(y, numbers, std::max<int64_t>(0, n));
}

// Writes a row of M numbers in another type.
template <typename Scale, typename T>
static void convert_row(const Scale* numbers, int64_t M, T* y) {
  for (int64_t i = 0; i < M; i += kLanes) {
    write_lanes(y + i, M - i < kLanes ? load_first(numbers + i, M - i) : load(numbers + i), M - i);
  }
}

// Writes the first M numbers of a row of codes, each rounded once. zeros: of 4-bit codes.
template <int kBits, int kGroup, typename Scale, typename T>
static void dequantize_row(const uint8_t* codes, const Scale* scales, const Scale* zeros, int64_t M, T* y) {
  auto write_group = [&](int64_t start, int64_t g, int64_t count) {  // a constant count leaves no branches
    vf scale = splat(to_float(scales[g]));
    if (kBits == 8) {
#pragma GCC unroll 8
      for (int j = 0; j < kGroup; j += kLanes) {
        if (j < count) write_lanes(y + start + j, load_codes((const int8_t*)codes + start + j) * scale, count - j);
      }
      return;
    }
    Int4Numbers numbers(to_float(scales[g]), to_float(zeros[g]));
    auto words = codes + start / kInt4Block * (kInt4Block / 2);
    uint32_t first = start / 16 % 8;
#pragma GCC unroll 8
    for (int j = 0; j < kGroup; j += kLanes) {
      vu shifted = load_bits<vu>(words + 4 * (j % 16)) >> (4 * (first + j / 16));
      if (j < count) write_lanes(y + start + j, numbers(shifted), count - j);
    }
  };
  int64_t g = 0;
  for (; (g + 1) * kGroup <= M; g++) write_group(g * kGroup, g, kGroup);
  if (g * kGroup < M) write_group(g * kGroup, g, M - g * kGroup);
}

template <typename T>
static void dequantize(Dequantize* call) {
  constexpr int64_t kTaskNumbers = 1 << 15;
  int64_t N = call->N, step = std::max<int64_t>(1, kTaskNumbers / call->M);
  for (int64_t first; (first = take_task(call) * step) < N;) {
    with_type(call->dtype, [&](auto kind) {
      using Scale = decltype(kind);
      for (int64_t n = first; n < std::min(N, first + step); n++) {
        auto codes = static_cast<const uint8_t*>(call->codes) + n * call->row_bytes;
        auto scales = static_cast<const Scale*>(call->scales) + n * call->row_scales, zeros = scales + call->row_scales / 2;
        T* y = static_cast<T*>(call->y) + n * call->M;
        if (call->form == kHalf) {
          convert_row(reinterpret_cast<const Scale*>(codes), call->M, y);
          continue;
        }
        with_group(call->group, [&](auto group) {
          auto run = call->form == kInt8 ? dequantize_row<8, group, Scale, T> : dequantize_row<4, group, Scale, T>;
          run(codes, scales, zeros, call->M, y);
        });
      }
    });
  }
}
REGARD_ENTRIES(dequantize, Dequantize, dequantize)

// The matrix product that prefill consists of, and the packing of its factors. One product multiplies kRows rows of a with
// up to kPanel columns of b; the sums are fp32.
//
//   c_rj (+)= sum_k a_rk b_kj        r < kRows, j < kPanel
//
// All sums stay in registers during the loop over k: a word of a is broadcast to all lanes, and kPanel words of b are loaded
// at once. A word is one fp32 number, or with AVX512-BF16 a pair of bf16 numbers, of which one instruction adds both products
// to an fp32 sum without rounding in between.
//
// a is stored row by row, b in panels [k/each, kPanel, each] with `each` numbers in a word. A panel of keys is [D, kPanel]: a
// row has one dimension of kPanel keys. A panel of values is [keys, kPanel]: a row has kPanel dimensions of the value of one
// key. Missing keys and dimensions are zeros.
//
// Source: Goto and van de Geijn 2008 (ACM TOMS 34, 12), sections 4 and 5: panels, and the block of registers.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>

#include "simd.h"

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 4;  // the registers for the sums of one row, of 32
#else
constexpr int kRegisters = 2;  // of 16
#endif
constexpr int kPanel = kRegisters * kLanes;  // the columns of a panel of b
constexpr int kRows = 6;                     // the rows of a that one product multiplies

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// The type in which numbers of type T are multiplied, and how many of them are in a word.
template <typename T>
using Factor = std::conditional_t<kHasPairs && std::is_same_v<T, bf16>, bf16, float>;
template <typename F>
constexpr int kEach = 4 / sizeof(F);

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// ---- products

// sum + a b for each word of b and one word of a.
inline vf add_product(const float* a, vf b, vf sum) { return fma(splat(*a), b, sum); }
#if defined(__AVX512BF16__)
inline vf add_product(const bf16* a, vf b, vf sum) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(load_bits<int32_t>(a)), (__m512bh)b);
}
#endif

// c = a b, or c += a b, for a [kRows, k], whose rows are a_step numbers apart, a panel b [k, kPanel] and c [kRows, columns].
// k is a multiple of kEach<F>, and not 0. The fewest registers that hold the columns are used.
template <bool Adds, int R = kRegisters, typename F>
inline void multiply(const F* a, int64_t a_step, const F* b, int64_t k, float* c, int64_t c_step, int64_t columns = kPanel) {
  if constexpr (R > 1) {
    if (columns <= (R - 1) * kLanes) return multiply<Adds, R - 1>(a, a_step, b, k, c, c_step, columns);
  }
  vf sums[kRows][R] = {};
  int64_t i = 0;
  do {  // at least once: otherwise the compiler keeps the sums in memory, too
    vf y[R];
    for (int v = 0; v < R; v++) y[v] = load_bits<vf>(b + i * kPanel + v * kLanes * kEach<F>);
    for (int r = 0; r < kRows; r++) {
      for (int v = 0; v < R; v++) sums[r][v] = add_product(a + r * a_step + i, y[v], sums[r][v]);
    }
    i += kEach<F>;
  } while (i < k);
  for (int r = 0; r < kRows; r++) {
    for (int v = 0; v < R; v++) {
      float* to = c + r * c_step + v * kLanes;
      store(to, Adds ? load(to) + sums[r][v] : sums[r][v]);
    }
  }
}

// c = a b for any k, in sums of at most kLongestSum words each: a sum of partial sums rounds less than one long sum.
constexpr int64_t kLongestSum = 128;
template <typename F>
inline void multiply_long(const F* a, int64_t a_step, const F* b, int64_t k, float* c, int64_t c_step) {
  constexpr int64_t kPart = kLongestSum * kEach<F>;
  multiply<false>(a, a_step, b, std::min(kPart, k), c, c_step);
  for (int64_t i = kPart; i < k; i += kPart) multiply<true>(a + i, a_step, b + i * kPanel, std::min(kPart, k - i), c, c_step);
}

// ---- words

// The first n numbers at x as words, and zeros; nothing behind them is read.
template <typename F, typename T>
inline vu words_along(const T* x, int64_t n) {
  if constexpr (kEach<F> == 1) {
    return n >= kLanes ? (vu)load(x) : (vu)load_first(x, n);
  } else {
    if (n >= 2 * kLanes) return load_bits<vu>(x);
    T numbers[2 * kLanes] = {};
    std::memcpy(numbers, x, n * sizeof(T));
    return load_bits<vu>(numbers);
  }
}

// Words that hold kLanes numbers of kEach<F> neighbouring rows of x; `rows` of these and n numbers exist, the others are 0.
template <typename F, typename T>
inline vu words_across(const T* x, int64_t step, int64_t rows, int64_t n) {
  auto row = [&](int64_t r) {
    const T* numbers = x + r * step;
    return r >= rows || n <= 0 ? vu{} : n >= kLanes ? (vu)load(numbers) : (vu)load_first(numbers, n);
  };
  if constexpr (kEach<F> == 1) return row(0);
  return row(0) >> 16 | row(1);
}

template <size_t... I>
inline vu interleave(vu x, vu y, int half, std::index_sequence<I...>) {
  return half == 0 ? __builtin_shufflevector(x, y, (I / 2 + I % 2 * kLanes)...)
                   : __builtin_shufflevector(x, y, (I / 2 + I % 2 * kLanes + kLanes / 2)...);
}

// Transposes kLanes vectors of words. Each step rotates the bits of the place (row, lane) of a word by one.
inline void transpose(vu (&x)[kLanes]) {
  for (int step = 1; step < kLanes; step *= 2) {
    vu y[kLanes];
    for (int i = 0; i < kLanes; i++) {
      y[i] = interleave(x[i / 2], x[i / 2 + kLanes / 2], i % 2, std::make_index_sequence<kLanes>());
    }
    for (int i = 0; i < kLanes; i++) x[i] = y[i];
  }
}

// ---- packing

// Packs `rows` rows of x [rows, n] as the columns of a panel `out` [n, kPanel].
template <typename F, typename T>
void pack_columns(const T* x, int64_t step, int64_t rows, int64_t n, F* out) {
  for (int64_t i = 0; i < n; i += kLanes * kEach<F>) {
    for (int64_t j = 0; j < kPanel; j += kLanes) {
      vu words[kLanes];
      for (int64_t r = 0; r < kLanes; r++) {
        words[r] = j + r < rows ? words_along<F>(x + (j + r) * step + i, n - i) : vu{};
      }
      transpose(words);
      for (int64_t w = 0; w < kLanes; w++) {
        if (i + w * kEach<F> < n) store_bits(out + i * kPanel + (w * kPanel + j) * kEach<F>, words[w]);
      }
    }
  }
}

// Packs `rows` rows of x [rows, n] as kPanel rows of each of n/kPanel panels, which are `across` numbers apart.
template <typename F, typename T>
void pack_rows(const T* x, int64_t step, int64_t rows, int64_t n, F* out, int64_t across) {
  for (int64_t r = 0; r < kPanel; r += kEach<F>) {
    for (int64_t i = 0; i < round_up(n, kPanel); i += kLanes) {
      F* to = out + i / kPanel * across + r * kPanel + i % kPanel * kEach<F>;
      store_bits(to, words_across<F>(x + r * step + i, step, rows - r, n - i));
    }
  }
}

// out [n, rows] = the transpose of x [rows, n]; rows and n are multiples of kLanes kEach<F>.
template <typename F>
void transpose_matrix(const F* x, int64_t rows, int64_t n, F* out) {
  for (int64_t r = 0; r < rows; r += kLanes * kEach<F>) {
    for (int64_t i = 0; i < n; i += kLanes) {
      vu words[kLanes];
      for (int j = 0; j < kLanes; j++) words[j] = words_across<F>(x + (r + j * kEach<F>) * n + i, n, kEach<F>, kLanes);
      transpose(words);
      for (int j = 0; j < kLanes; j++) store_bits(out + (i + j) * rows + r, words[j]);
    }
  }
}

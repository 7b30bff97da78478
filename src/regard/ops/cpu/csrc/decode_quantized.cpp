// Decoding over keys and values that are stored as codes of 8, 4 or 2 bits, which are read where they are.
//
// Keys have one scale per channel for each group of tokens, values have one scale per token for each group of channels. A line
// is a run of numbers that share a scale and a zero, x = zero + code * scale: for keys the tokens of a group in one channel,
// for values a group of channels of one token. So both scores and weighted values are sums over lines:
//
//   out[r, c] (+)= sum_i w[r, i] (zero[i] + code[i, c] scale[i])
//              = sum_i (w[r, i] scale[i]) (code[i, c] - half) + sum_i w[r, i] (zero[i] + half scale[i])
//
// Codes are counted from the middle of their range, `half`: counted from 0, both sums would be larger than their total. Each
// code is read once for four rows. Codes are finite, so that a hidden one may be multiplied by a weight of 0.
#include "decode.h"

#include <type_traits>
#include <utility>

#include "decode_rows.h"
#include "entry.h"

constexpr int64_t kLeastTileTokens = 128;  // keeps the cost of the calls for each group of channels low

// `count` lines of `columns` codes each.
template <typename T>
struct Lines {
  const uint8_t* codes;
  int64_t step;  // from one line to the next
  int64_t count, columns, bits;
  const T *scale, *zero;
  int64_t scale_step;
  const uint8_t* next;  // what is read afterwards
};

// The weights of a sum over lines for some rows: w[r, i] scale[i], and the term that is added to every number of a row.
struct LineWeights {
  explicit LineWeights(int64_t rows, int64_t widest)
      : distance((widest + kLanes - 1) / kLanes * kLanes), scaled(rows * distance), added(rows), scale(distance), middle(distance),
        moved(2 * distance) {}

  template <typename T>
  void read(const Lines<T>& lines, const float* w, int64_t w_distance, int64_t rows) {
    vf half = splat(float(1 << (lines.bits - 1)));
    const T *scales = lines.scale, *zeros = lines.zero;
    if (lines.scale_step != 1) {
      T *near = reinterpret_cast<T*>(moved.data()), *more = near + distance;
      for (int64_t i = 0; i < lines.count; i++) {
        near[i] = scales[i * lines.scale_step], more[i] = zeros[i * lines.scale_step];
      }
      scales = near, zeros = more;
    }
    for (int64_t i = 0; i < lines.count; i += kLanes) {
      int64_t n = lines.count - i;
      vf x = n >= kLanes ? load(scales + i) : load_first(scales + i, n);
      store(scale + i, x);
      store(middle + i, fma(half, x, n >= kLanes ? load(zeros + i) : load_first(zeros + i, n)));
    }
    for (int64_t r = 0; r < rows; r++) {
      const float* row = w + r * w_distance;
      vf total = {};
      int64_t i = 0;
      for (; i + kLanes <= lines.count; i += kLanes) {
        vf x = load(row + i);
        store(scaled + r * distance + i, x * load(scale + i));
        total = fma(x, load(middle + i), total);
      }
      float sum_of_row = sum(total);
      for (; i < lines.count; i++) {
        scaled[r * distance + i] = row[i] * scale[i];
        sum_of_row += row[i] * middle[i];
      }
      added[r] = sum_of_row;
    }
  }

  const int64_t distance;
  Scratch<float> scaled, added;

 private:
  Scratch<float> scale, middle, moved;
};

// ---- sums in fp32

// The numbers a[0], b[0], a[1], b[1], ... of two vectors, as two vectors.
template <int... I>
inline std::pair<vf, vf> interleave(vf a, vf b, std::integer_sequence<int, I...>) {
  return {__builtin_shufflevector(a, b, (I / 2 + I % 2 * kLanes)...),
          __builtin_shufflevector(a, b, (kLanes / 2 + I / 2 + I % 2 * kLanes)...)};
}
inline std::pair<vf, vf> interleave(vf a, vf b) { return interleave(a, b, std::make_integer_sequence<int, kLanes>()); }

// Writes the codes of kLanes bytes, each with 8 / kBits codes, as numbers in the order of memory; parts[i] has code i of each byte.
template <int kCount>
inline void write_in_order(vf (&parts)[kCount], float* out) {
  if constexpr (kCount == 1) {
    store(out, parts[0]);
  } else if constexpr (kCount == 2) {
    auto [low, high] = interleave(parts[0], parts[1]);
    store(out, low), store(out + kLanes, high);
  } else {
    auto [a, b] = interleave(parts[0], parts[2]);
    auto [c, d] = interleave(parts[1], parts[3]);
    auto [x, y] = interleave(a, c);
    auto [z, w] = interleave(b, d);
    store(out, x), store(out + kLanes, y), store(out + 2 * kLanes, z), store(out + 3 * kLanes, w);
  }
}

// The first kBytes bytes at p, or `bytes` where kBytes is 0, as 32-bit numbers.
template <int kBytes>
inline vu widen_first(const uint8_t* p, int64_t bytes) {
#if defined(__AVX512VL__)
  __mmask16 read = (1u << (kBytes ? kBytes : bytes)) - 1;
  return (vu)_mm512_cvtepu8_epi32(kBytes == 8 ? _mm_loadl_epi64((const __m128i*)p) : _mm_maskz_loadu_epi8(read, p));
#else
  uint8_t bytes_read[kLanes] = {};
  std::memcpy(bytes_read, p, kBytes ? kBytes : bytes);
  return widen_bytes(bytes_read);
#endif
}

// Code i of each byte, counted from the middle of its range.
template <int kBits>
inline vf centered_codes(vu bytes, int i) {
  vu shifted = i == 0 ? bytes : bytes >> (kBits * i);
  constexpr int kHalf = 1 << (kBits - 1);
#if defined(__AVX512F__)
  if constexpr (kBits < 8) {  // a table of 16 numbers, by the low 4 bits
    constexpr auto at = [](int j) { return float(j % (2 * kHalf) - kHalf); };
    const vf table = {at(0), at(1), at(2),  at(3),  at(4),  at(5),  at(6),  at(7),
                      at(8), at(9), at(10), at(11), at(12), at(13), at(14), at(15)};
    return (vf)_mm512_permutexvar_ps((__m512i)shifted, (__m512)table);
  }
  return (vf)_mm512_cvtepi32_ps((__m512i)((vi)shifted - kHalf));
#else
  return __builtin_convertvector((vi)(shifted & (2 * kHalf - 1)) - kHalf, vf);
#endif
}

// The two halves of a vector in the other order.
inline vf swap_halves(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4E);
#else
  float numbers[2 * kLanes];
  store(numbers, x), store(numbers + kLanes, x);
  return load(numbers + kLanes / 2);
#endif
}

// 8 bytes in the lower half of a vector, and again in the upper half.
inline vu widen_twice(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32(_mm_set1_epi64x(load_bits<int64_t>(p)));
#else
  return widen_bytes(p);
#endif
}

// The sums of `bytes` bytes of each line, at most kLanes, for kRows rows: out[r * distance + column] (+)= ....
template <int kBits, int kRows, int kBytes, typename T>
void sum_bytes(const Lines<T>& lines, const uint8_t* first, int64_t bytes, const LineWeights& weights, int64_t r, float* out,
               int64_t distance, bool overwrite) {
  constexpr int kCodes = 8 / kBits;
  constexpr bool kFolded = kBits == 2 && kBytes == 8 && kLanes == 16;  // two codes of 8 bytes fill a vector
  constexpr int kVectors = kFolded ? kCodes / 2 : kCodes;
  const float* w = weights.scaled.data() + r * weights.distance;
  vf total[kRows * kVectors] = {};  // of row i / kVectors and code i % kVectors of each byte
  vu shift = {};
  for (int i = kLanes / 2; i < kLanes; i++) shift[i] = kBits;
  for (int64_t line = 0; line < lines.count; line++) {
    const uint8_t* p = first + line * lines.step;
    vf code[kVectors];
    if constexpr (kFolded) {
      vu wide = widen_twice(p) >> shift;
      unroll<kVectors>([&](auto i) { code[i] = centered_codes<kBits>(wide, 2 * i); });
    } else {
      vu wide = widen_first<kBytes>(p, bytes);
      unroll<kVectors>([&](auto i) { code[i] = centered_codes<kBits>(wide, i); });
    }
    unroll<kRows * kVectors>([&](auto i) {
      total[i] = fma(splat(w[i / kVectors * weights.distance + line]), code[i % kVectors], total[i]);
    });
  }
  unroll<kRows>([&](auto a) {
    float numbers[kCodes * kLanes];
    vf parts[kCodes];
    unroll<kCodes>([&](auto i) {
      vf sums = total[a * kVectors + (kFolded ? i / 2 : i)];
      parts[i] = (kFolded && i % 2 ? swap_halves(sums) : sums) + weights.added[r + a];
    });
    write_in_order(parts, numbers);
    float* z = out + (r + a) * distance;
    int64_t columns = (kBytes ? kBytes : bytes) * kCodes;
    for (int64_t c = 0; c < columns; c++) z[c] = overwrite ? numbers[c] : z[c] + numbers[c];
  });
}

template <int kBits, int kRows, typename T>
void sum_rows(const Lines<T>& lines, const LineWeights& weights, int64_t r, float* out, int64_t distance, bool overwrite) {
  int64_t bytes = lines.columns * kBits / 8;
  for (int64_t c = 0; c < bytes;) {
    float* z = out + c * (8 / kBits);
    const uint8_t* first = lines.codes + c;
    if (bytes - c >= kLanes) {
      sum_bytes<kBits, kRows, kLanes>(lines, first, kLanes, weights, r, z, distance, overwrite);
      c += kLanes;
    } else if (bytes - c >= kLanes / 2) {
      sum_bytes<kBits, kRows, kLanes / 2>(lines, first, kLanes / 2, weights, r, z, distance, overwrite);
      c += kLanes / 2;
    } else {
      sum_bytes<kBits, kRows, 0>(lines, first, bytes - c, weights, r, z, distance, overwrite);
      c = bytes;
    }
  }
}

// ---- sums of codes in integers

#if defined(__AVX512BW__)
// An instruction multiplies twice as many 16-bit integers as fp32 numbers. The weights of a row become integers W:
//
//   W[r, i] = round(w[r, i] scale[i] / f_r),   f_r = max_i |w[r, i] scale[i]| / 32767
//   out[r, c] = f_r (sum_i W[r, i] code[i, c] - half sum_i W[r, i]) + ...
//
// The 32-bit sums may wrap around; their difference is exact below 2^31, for up to kMostLines lines that contribute at most
// 2^22 each. Rounding changes a weight by at most 2^-16 of the largest of its row: less than the rounding of 16-bit inputs.
constexpr int64_t kMostLines = 511;

struct IntegerWeights {
  IntegerWeights(int64_t rows, int64_t distance) : whole(rows * distance), factor(rows), total(rows) {}

  // Rounds the weights, behind which are zeros up to a whole vector.
  void read(const LineWeights& weights, int64_t rows, int64_t count) {
    for (int64_t r = 0; r < rows; r++) {
      const float* w = weights.scaled.data() + r * weights.distance;
      vf most = {}, nan = {};
      for (int64_t i = 0; i < count; i += kLanes) {
        vf x = i + kLanes <= count ? load(w + i) : load_first(w + i, count - i);
        most = larger((vf)((vi)x & 0x7FFFFFFF), most);
        nan += x * 0.0f;  // 0, or NaN where a weight is not finite
      }
      float top = largest(most);
      factor[r] = top / 32767 + sum(nan);
      bool regular = top > 0 && factor[r] == factor[r];
      float inverse = regular ? 32767 / top : 0;
      __m512i sums = {};
      for (int64_t i = 0; i < count; i += kLanes) {
        vf x = i + kLanes <= count ? load(w + i) : load_first(w + i, count - i);
        __m512i integers = _mm512_cvtps_epi32((__m512)(regular ? x * inverse : vf{}));
        sums = _mm512_add_epi32(sums, integers);
        store_bits(whole + r * weights.distance + i, _mm512_cvtepi32_epi16(integers));
      }
      total[r] = _mm512_reduce_add_epi32(sums);
    }
  }

  Scratch<int16_t> whole;
  Scratch<float> factor;
  Scratch<int32_t> total;
};

// total + the products of 32 pairs of 16-bit integers, of which neighbours are added.
inline __m512i add_word_pairs(__m512i total, __m512i a, __m512i b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(total, a, b);
#else
  return _mm512_add_epi32(total, _mm512_madd_epi16(a, b));
#endif
}

// The kBytes bytes of each of 64 / kBytes lines.
template <int kBytes>
inline __m512i load_lines(const uint8_t* p, int64_t step) {
  if (step == kBytes) return load_bits<__m512i>(p);
  if constexpr (kBytes == 32) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_bits<__m256i>(p)), load_bits<__m256i>(p + step), 1);
  } else if constexpr (kBytes == 16) {
    __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(load_bits<__m128i>(p)), load_bits<__m128i>(p + step), 1);
    __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(load_bits<__m128i>(p + 2 * step)),
                                        load_bits<__m128i>(p + 3 * step), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
  } else {
    __m256i half[2];
    unroll<2>([&](auto i) {
      auto at = [&](int line) { return load_bits<int64_t>(p + (4 * i + line) * step); };
      half[i] = _mm256_set_epi64x(at(3), at(2), at(1), at(0));
    });
    return _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
  }
}

// Where the 16-bit words of a register of lines go, so that the words of two neighbouring lines alternate; and which pair of
// weights each of them is multiplied with.
template <int kBytes>
struct LineOrder {
  __m512i words, pairs;
  LineOrder() {
    constexpr int kWords = kBytes / 2;
    int16_t word[32];
    int32_t pair[16];
    for (int i = 0; i < 32; i++) word[i] = (2 * (i / (2 * kWords)) + i % 2) * kWords + i % (2 * kWords) / 2;
    for (int i = 0; i < 16; i++) pair[i] = i / kWords;
    words = load_bits<__m512i>(word), pairs = load_bits<__m512i>(pair);
  }
};

// The sums of kBytes bytes of each line for kRows rows. A 16-bit word holds 16 / kBits codes; a step reads 64 / kBytes lines.
template <int kBits, int kRows, int kBytes, typename T>
void sum_words(const Lines<T>& lines, int64_t first, const LineWeights& weights, const IntegerWeights& integers, int64_t r,
               const uint8_t* next, float* out, int64_t distance, bool overwrite) {
  constexpr int kCodes = 16 / kBits, kLines = 64 / kBytes;
  const LineOrder<kBytes> order;
  const __m512i mask = _mm512_set1_epi16((1 << kBits) - 1);
  const int16_t* w = integers.whole.data() + r * weights.distance;
  __m512i total[kRows * kCodes] = {};  // of row i / kCodes and code i % kCodes of each word
  for (int64_t line = 0; line < lines.count; line += kLines) {
    if (next) __builtin_prefetch(next + line * kBytes, 0, 2);
    __m512i x = _mm512_permutexvar_epi16(order.words, load_lines<kBytes>(lines.codes + first + line * lines.step, lines.step));
    __m512i code[kCodes], pair[kRows];
    unroll<kCodes>([&](auto i) {
      code[i] = i == 0 ? x : _mm512_srli_epi16(x, kBits * i);
      if (i < kCodes - 1) code[i] = _mm512_and_si512(code[i], mask);
    });
    unroll<kRows>([&](auto a) {
      const int16_t* p = w + a * weights.distance + line;
      if constexpr (kBytes == 32) pair[a] = _mm512_set1_epi32(load_bits<int32_t>(p));
      else {
        __m128i pairs = kBytes == 16 ? _mm_loadl_epi64((const __m128i*)p) : load_bits<__m128i>(p);
        pair[a] = _mm512_permutexvar_epi32(order.pairs, _mm512_castsi128_si512(pairs));
      }
    });
    unroll<kRows * kCodes>([&](auto i) { total[i] = add_word_pairs(total[i], code[i % kCodes], pair[i / kCodes]); });
  }
  unroll<kRows>([&](auto a) {
    vf parts[kCodes], zipped[kCodes];
    __m512i middle = _mm512_slli_epi32(_mm512_set1_epi32(integers.total[r + a]), kBits - 1);
    unroll<kCodes>([&](auto i) {
      __m512i x = total[a * kCodes + i];  // one sum for each word, in kLines / 2 parts
      if (kBytes <= 16) x = _mm512_add_epi32(x, _mm512_shuffle_i64x2(x, x, 0x4E));
      if (kBytes <= 8) x = _mm512_add_epi32(x, _mm512_shuffle_i64x2(x, x, 0xB1));
      parts[i] = (vf)_mm512_cvtepi32_ps(_mm512_sub_epi32(x, middle)) * integers.factor[r + a] + weights.added[r + a];
    });
    for (int half = kCodes / 2; half; half /= 2) {  // each pass moves the first half of the vectors between the second
      unroll<kCodes / 2>([&](auto i) {
        auto [low, high] = interleave(parts[i], parts[i + kCodes / 2]);
        zipped[2 * i] = low, zipped[2 * i + 1] = high;
      });
      unroll<kCodes>([&](auto i) { parts[i] = zipped[i]; });
    }
    float* z = out + (r + a) * distance;
    unroll<kBytes * 8 / kBits / kLanes>([&](auto i) {
      store(z + i * kLanes, overwrite ? parts[i] : load(z + i * kLanes) + parts[i]);
    });
  });
}

// Computes the sums of all columns for `rows` rows in integers; returns false, and nothing, where their sizes do not fit.
template <int kBits, typename T>
bool sum_in_integers(const Lines<T>& lines, const LineWeights& weights, IntegerWeights& integers, int64_t rows, float* out,
                     int64_t distance, bool overwrite) {
  // eight sums for each of four rows would not stay in registers: there sums in fp32 are faster
  constexpr int kMostRows = kBits == 2 ? 1 : 4;
  if (kBits == 2 && rows > 1) return false;
  int64_t bytes = lines.columns * kBits / 8, width = bytes % 32 == 0 ? 32 : bytes;
  if (!(width == 32 || (width == 16 && kBits <= 4) || (width == 8 && kBits == 2))) return false;
  if (lines.count % (64 / width) || lines.count > kMostLines) return false;
  integers.read(weights, rows, lines.count);
  for (int64_t c = 0; c < bytes; c += width) {
    float* z = out + c * 8 / kBits;
    for (int64_t r = 0; r < rows;) {
      const uint8_t* next = r ? nullptr : lines.next + c * lines.count;
      auto sum = [&](auto count) {
        constexpr int kRows = decltype(count)::value;
        if (width == 32) sum_words<kBits, kRows, 32>(lines, c, weights, integers, r, next, z, distance, overwrite);
        if constexpr (kBits <= 4) {
          if (width == 16) sum_words<kBits, kRows, 16>(lines, c, weights, integers, r, next, z, distance, overwrite);
        }
        if constexpr (kBits == 2) {
          if (width == 8) sum_words<kBits, kRows, 8>(lines, c, weights, integers, r, next, z, distance, overwrite);
        }
        r += kRows;
      };
      if (r + kMostRows <= rows) sum(std::integral_constant<int, kMostRows>());
      else sum(std::integral_constant<int, 1>());
    }
  }
  return true;
}
#endif

// Computes the sums over lines for `rows` rows of weights w [rows, w_distance]: out [rows, distance].
template <typename T>
class LineSums {
 public:
  LineSums(int64_t rows, int64_t widest)
      : rows_(rows),
        weights_(rows, widest)
#if defined(__AVX512BW__)
        ,
        integers_(rows, weights_.distance)
#endif
  {
  }

  void add(const Lines<T>& lines, const float* w, int64_t w_distance, float* out, int64_t distance, bool overwrite) {
    weights_.read(lines, w, w_distance, rows_);
#if defined(__AVX512BW__)
    if constexpr (sizeof(T) == 2) {  // the weights may be rounded to 16 bits, like the scales
      if (lines.bits == 8 ? sum_in_integers<8>(lines, weights_, integers_, rows_, out, distance, overwrite)
          : lines.bits == 4 ? sum_in_integers<4>(lines, weights_, integers_, rows_, out, distance, overwrite)
                            : sum_in_integers<2>(lines, weights_, integers_, rows_, out, distance, overwrite)) {
        return;
      }
    }
#endif
    prefetch(lines.next, lines.count * lines.columns * lines.bits / 8);
    if (lines.bits == 8) sum<8>(lines, out, distance, overwrite);
    else if (lines.bits == 4) sum<4>(lines, out, distance, overwrite);
    else sum<2>(lines, out, distance, overwrite);
  }

 private:
  template <int kBits>
  void sum(const Lines<T>& lines, float* out, int64_t distance, bool overwrite) {
    int64_t r = 0;
    for (; r + 4 <= rows_; r += 4) sum_rows<kBits, 4>(lines, weights_, r, out, distance, overwrite);
    for (; r < rows_; r++) sum_rows<kBits, 1>(lines, weights_, r, out, distance, overwrite);
  }

  int64_t rows_;
  LineWeights weights_;
#if defined(__AVX512BW__)
  IntegerWeights integers_;
#endif
};

template <typename T>
void decode_quantized(DecodeQuantized* call) {
  int64_t R = call->q.shape[2], D = call->q.shape[3], E = call->out.shape[3];
  int64_t padded = R % 4 < 2 ? R : (R + 3) / 4 * 4;  // four rows at a time share what is loaded
  const Quantized &k = call->k, &v = call->v;
  int64_t length = k.group * std::max<int64_t>(1, kLeastTileTokens / k.group);
  int64_t distance = (length + kLanes - 1) / kLanes * kLanes;
  Scratch<float> q(padded * D), scores(padded * distance);
  Scratch<bool> visible(R * length);
  Scratch<int64_t> index(length);
  RowSums sums(padded, E);
  LineSums<T> line_sums(padded, std::max(D, length));
  bool whole_tiles = judges_tiles(*call), has_terms = has_score_terms(*call);
  float *s = scores, scale = float(call->scale);

  auto is_visible = [&](const Head& head, const Tile& tile) {  // whether any row sees any key
    bool some = false;
    head.each_row([&](int64_t r, int64_t h, int64_t t) {
      row_visibility(*call, head.b, h, t, tile, visible + r * length);
      for (int64_t c = 0; c < tile.size(); c++) some |= visible[r * length + c];
    });
    return some;
  };
  auto at = [](const void* scales, const Quantized& x, int64_t b, int64_t g, int64_t row, int64_t line) {
    const int64_t* steps = x.scale_steps;
    return static_cast<const T*>(scales) + b * steps[0] + g * steps[1] + row * steps[2] + line * steps[3];
  };
  auto codes_at = [](const Quantized& x, int64_t b, int64_t g, int64_t row, int64_t line) {
    return x.data + b * x.steps[0] + g * x.steps[1] + row * x.steps[2] + line * x.steps[3];
  };

  run_splits(call, length, sums, [&](const Head& head, int64_t first, int64_t last, RowSums& sums) {
    int64_t b = head.b, g = head.g;
    const float* queries = call->q.data + (b * call->q.shape[1] + g) * R * D;
    for (int64_t i = 0; i < R * D; i++) q[i] = queries[i] * scale;
    for (int64_t i = first; i < last; i++) {
      Tile tile{i * length, std::min(call->S, (i + 1) * length)};
      Coverage coverage = whole_tiles ? tile_coverage(*call, head, tile) : Coverage::some;
      if (coverage == Coverage::none || (coverage == Coverage::some && !is_visible(head, tile))) continue;
      int64_t n = tile.size(), groups = n / k.group, whole = n * v.steps[2];
      for (int64_t j = 0; j < groups; j++) {  // keys: a row is a group of tokens, a line a channel
        int64_t row = tile.first / k.group + j;
        const uint8_t* codes = codes_at(k, b, g, row, 0);
        Lines<T> lines{codes, k.steps[3], D, k.group, k.bits, at(k.scale, k, b, g, row, 0), at(k.zero, k, b, g, row, 0),
                       k.scale_steps[3], codes + groups * k.steps[2]};
        line_sums.add(lines, q, D, s + j * k.group, distance, true);
      }
      if (has_terms) {
        for (int64_t c = 0; c < n; c++) index[c] = tile.first + c;
        add_score_terms(*call, head, index, n, s, distance);
      }
      for (int64_t r = 0; coverage == Coverage::some && r < R; r++) {
        for (int64_t c = 0; c < n; c++) s[r * distance + c] = visible[r * length + c] ? s[r * distance + c] : kHidden;
      }
      sums.weigh(s, distance, R, n);
      for (int64_t j = 0; j < E / v.group; j++) {  // values: a row is a token, a line one of its groups of channels
        const uint8_t* codes = codes_at(v, b, g, tile.first, j);
        const uint8_t* next = codes_at(v, b, g, tile.last, 0) + whole / (E / v.group) * j;
        Lines<T> lines{codes, v.steps[2], n, v.group, v.bits, at(v.scale, v, b, g, tile.first, j),
                       at(v.zero, v, b, g, tile.first, j), v.scale_steps[2], next};
        line_sums.add(lines, s, distance, sums.values + j * v.group, sums.width, false);
      }
    }
  });
}
REGARD_ENTRIES(decode_quantized, DecodeQuantized, decode_quantized)

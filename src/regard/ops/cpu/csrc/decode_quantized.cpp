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
      : distance((widest + kLanes - 1) / kLanes * kLanes), scaled(rows * distance), added(rows), scale(distance), middle(distance) {}

  template <typename T>
  void read(const Lines<T>& lines, const float* w, int64_t w_distance, int64_t rows) {
    float half = float(1 << (lines.bits - 1));
    for (int64_t i = 0; i < lines.count; i++) {
      scale[i] = to_float(lines.scale[i * lines.scale_step]);
      middle[i] = to_float(lines.zero[i * lines.scale_step]) + half * scale[i];
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
  Scratch<float> scale, middle;
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

// The sums of `bytes` bytes of each line, at most kLanes, for kRows rows: out[r * distance + column] (+)= ....
template <int kBits, int kRows, int kBytes, typename T>
void sum_bytes(const Lines<T>& lines, const uint8_t* first, int64_t bytes, const LineWeights& weights, int64_t r, float* out,
               int64_t distance, bool overwrite) {
  constexpr int kCodes = 8 / kBits;
  const float* w = weights.scaled.data() + r * weights.distance;
  vf total[kRows * kCodes] = {};  // of row i / kCodes and code i % kCodes of each byte
  for (int64_t line = 0; line < lines.count; line++) {
    vu wide;
    if constexpr (kBytes) {
      wide = widen_bytes<kBytes>(first + line * lines.step);
    } else {
      uint8_t read[kLanes] = {};
      std::memcpy(read, first + line * lines.step, bytes);
      wide = widen_bytes(read);
    }
    vf code[kCodes];
    for (int i = 0; i < kCodes; i++) {
      code[i] = __builtin_convertvector((vi)((wide >> (kBits * i)) & ((1 << kBits) - 1)) - (1 << (kBits - 1)), vf);
    }
    unroll<kRows * kCodes>([&](auto i) {
      total[i] = fma(splat(w[i / kCodes * weights.distance + line]), code[i % kCodes], total[i]);
    });
  }
  unroll<kRows>([&](auto a) {
    float numbers[kCodes * kLanes];
    vf parts[kCodes];
    unroll<kCodes>([&](auto i) { parts[i] = total[a * kCodes + i] + weights.added[r + a]; });
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

// ---- sums of 8-bit codes in integers

#if defined(__AVX512BW__)
// An instruction multiplies twice as many 16-bit integers as fp32 numbers. The weights of a row become integers W:
//
//   W[r, i] = round(w[r, i] scale[i] / f_r),   f_r = max_i |w[r, i] scale[i]| / 32767
//   out[r, c] = f_r (sum_i W[r, i] code[i, c] - 128 sum_i W[r, i]) + ...
//
// The 32-bit sums may wrap around; their difference is exact below 2^31, for up to kMostLines lines that contribute at most
// 2^22 each. Rounding changes a weight by at most 2^-16 of the largest of its row: less than the rounding of 16-bit inputs.
constexpr int64_t kMostLines = 511;

struct IntegerWeights {
  IntegerWeights(int64_t rows, int64_t distance) : whole(rows * distance), factor(rows), total(rows) {}

  void read(const LineWeights& weights, int64_t rows, int64_t count) {
    for (int64_t r = 0; r < rows; r++) {
      const float* w = weights.scaled.data() + r * weights.distance;
      float most = 0;
      bool finite = true;
      for (int64_t i = 0; i < count; i++) {
        float size = std::fabs(w[i]);
        most = size > most ? size : most;
        finite &= size < INFINITY;
      }
      factor[r] = finite ? most / 32767 : NAN;
      float inverse = finite && most > 0 ? 32767 / most : 0;
      int32_t sum_of_row = 0;
      for (int64_t i = 0; i < count; i++) {
        float shifted = (finite ? w[i] * inverse : 0.0f) + 12582912.0f;  // rounds to nearest: the low bits are the integer
        int32_t integer = bits_as<int32_t>(shifted) - bits_as<int32_t>(12582912.0f);
        whole[r * weights.distance + i] = int16_t(integer);
        sum_of_row += integer;
      }
      total[r] = sum_of_row;
    }
  }

  Scratch<int16_t> whole;
  Scratch<float> factor;
  Scratch<int32_t> total;
};

// The sums of kColumns columns, 64 or 32, for four rows, two lines at a time: the 16-bit words of two lines alternate in a
// register, and each word holds the codes of two columns.
template <int kColumns, typename T>
void sum_columns(const Lines<T>& lines, int64_t c, const LineWeights& weights, const IntegerWeights& integers, int64_t r,
                 const uint8_t* next, float* out, int64_t distance, bool overwrite) {
  const int16_t* w = integers.whole.data() + r * weights.distance;
  const __m512i low = _mm512_set1_epi16(0xFF);
  auto read = [&](int64_t line) {
    const uint8_t* p = lines.codes + c + line * lines.step;
    if constexpr (kColumns == 64) return load_bits<__m512i>(p);
    else return _mm512_zextsi256_si512(load_bits<__m256i>(p));
  };
  __m512i total[16] = {};  // of row i / 4; even and odd columns of the first and the second half of each 16
  for (int64_t line = 0; line < lines.count; line += 2) {
    if (next) prefetch(next + line * kColumns, 2 * kColumns);
    __m512i a = read(line), b = read(line + 1);
    __m512i first = _mm512_unpacklo_epi16(a, b), second = _mm512_unpackhi_epi16(a, b);
    __m512i code[4] = {_mm512_and_si512(first, low), _mm512_srli_epi16(first, 8), _mm512_and_si512(second, low),
                       _mm512_srli_epi16(second, 8)};
    unroll<16>([&](auto i) {
      __m512i pair = _mm512_set1_epi32(load_bits<int32_t>(w + i / 4 * weights.distance + line));
      total[i] = _mm512_add_epi32(total[i], _mm512_madd_epi16(code[i % 4], pair));
    });
  }
  unroll<4>([&](auto a) {
    __m512i even = total[4 * a], odd = total[4 * a + 1], even_after = total[4 * a + 2], odd_after = total[4 * a + 3];
    __m512i fours[4] = {_mm512_unpacklo_epi32(even, odd), _mm512_unpackhi_epi32(even, odd),
                        _mm512_unpacklo_epi32(even_after, odd_after),
                        _mm512_unpackhi_epi32(even_after, odd_after)};  // columns 4 i to 4 i + 3 of each 16
    int32_t in_order[64];
    for (int q = 0; q < 4; q++) {
      for (int i = 0; i < 4; i++) std::memcpy(in_order + 16 * q + 4 * i, (const int32_t*)&fours[i] + 4 * q, 16);
    }
    float* z = out + (r + a) * distance;
    vi middle = vi{} + (integers.total[r + a] << 7);
    for (int i = 0; i < kColumns; i += kLanes) {
      vf y = __builtin_convertvector(load_bits<vi>(in_order + i) - middle, vf) * integers.factor[r + a] +
             weights.added[r + a];
      store(z + i, overwrite ? y : load(z + i) + y);
    }
  });
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
    bool fits = lines.columns % 32 == 0 && lines.count % 2 == 0 && lines.count <= kMostLines && rows_ % 4 == 0;
    if (sizeof(T) == 2 && lines.bits == 8 && fits) {  // the weights may be rounded to 16 bits, like the scales
      integers_.read(weights_, rows_, lines.count);
      for (int64_t c = 0; c < lines.columns;) {
        bool wide = lines.columns - c >= 64;
        for (int64_t r = 0; r < rows_; r += 4) {
          const uint8_t* next = r ? nullptr : lines.next + c * lines.count;
          if (wide) sum_columns<64>(lines, c, weights_, integers_, r, next, out + c, distance, overwrite);
          else sum_columns<32>(lines, c, weights_, integers_, r, next, out + c, distance, overwrite);
        }
        c += wide ? 64 : 32;
      }
      return;
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

// Decoding over keys and values in full precision. While a tile of keys is computed, the cache lines of the next one are
// prefetched in order into the L2 cache, one beside each load, and those of the next keys and values of this tile into the
// L1 cache: a core that waits for every line reaches half of the memory bandwidth.
#include "decode.h"

#include <tuple>
#include <type_traits>
#include <utility>

#include "decode_rows.h"
#include "entry.h"

template <typename T>
constexpr int64_t kTile = 128 / sizeof(T);  // the keys of a tile; they and their values fit into the L1 cache

// Keys or values of a head.
template <typename T>
struct Tokens {
  const T* data;
  int64_t step;  // from one slot to the next
};

#if defined(__AVX512BF16__)
template <typename T>
constexpr bool kMultipliesPairs = std::is_same_v<T, bf16>;
inline vf add_pairs(const bf16* a, const bf16* b, vf total) {  // total + the products of two times 2 kLanes numbers
  return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)load_bits<__m512i>(a), (__m512bh)load_bits<__m512i>(b));
}
#else
template <typename T>
constexpr bool kMultipliesPairs = false;
inline vf add_pairs(const void*, const void*, vf total) { return total; }
#endif

// The rows of queries of a head in fp32, and where pairs are multiplied in bfloat16, which is exact for such queries. Behind
// each row of D numbers are zeros.
struct Queries {
  int64_t D, width;
  Scratch<float> floats;
  Scratch<bf16> pairs;

  Queries(int64_t rows, int64_t D)
      : D(D), width((D + 2 * kLanes - 1) / (2 * kLanes) * 2 * kLanes), floats(rows * width), pairs(rows * width) {}

  void read(const float* q, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t d = 0; d < D; d++) {
        floats[r * width + d] = q[r * D + d];
        pairs[r * width + d] = {uint16_t(bits_as<uint32_t>(q[r * D + d]) >> 16)};
      }
    }
  }
};

// ---- the sums of all lanes of kLanes vectors, as one vector

// The fold of two vectors, whose segments of kWidth lanes belong to one sum each: half a segment of p, half of q, and so on.
// Each lane is added to its partner, kWidth / 2 lanes away, after one blend and one shuffle.
template <int kWidth, int... I>
inline vf fold(vf p, vf q, std::integer_sequence<int, I...>) {
  constexpr int kHalf = kWidth / 2;
  return __builtin_shufflevector(p, q, (I / kHalf % 2 ? kLanes + I : I)...) +
         __builtin_shufflevector(p, q, (I / kHalf % 2 ? kLanes + I - kHalf : I + kHalf)...);
}
// The sums of v[kFirst], v[kFirst + kStep], v[kFirst + 2 kStep], ..., each in kStep neighbouring lanes.
template <int kFirst = 0, int kStep = 1>
__attribute__((always_inline)) inline vf lane_sums(const vf (&v)[kLanes]) {
  if constexpr (kStep == kLanes) {
    return v[kFirst];
  } else {
    vf even = lane_sums<kFirst, 2 * kStep>(v), odd = lane_sums<kFirst + kStep, 2 * kStep>(v);
    return fold<2 * kStep>(even, odd, std::make_integer_sequence<int, kLanes>());
  }
}

// The scores of kRows rows from row r on with the n keys at `places`, a multiple of kLanes / kRows.
template <int kRows, typename T>
void score_rows(const Queries& q, int64_t r, const Tokens<T>& keys, const int64_t* places, int64_t n, float scale, float* s) {
  constexpr int kKeys = kLanes / kRows;
  constexpr int64_t kLine = 64 / sizeof(T);  // the numbers of a cache line
  const float* x = q.floats.data() + r * q.width;
  const bf16* words = q.pairs.data() + r * q.width;
  int64_t ahead = keys.step * kTile<T>, D = q.D, width = q.width;
  for (int64_t j = 0; j < n; j += kKeys) {
    const T* k[kKeys];
    for (int i = 0; i < kKeys; i++) {
      k[i] = keys.data + places[j + i] * keys.step;
      asm("" : "+r"(k[i]));  // GCC would compute all addresses as one vector, and wait for its way back to scalars
    }
    vf total[kLanes] = {};  // of row i / kKeys and key i % kKeys; one loop for both, so that they stay in registers
    int64_t d = 0;
    if constexpr (kMultipliesPairs<T>) {
      for (; d + 2 * kLanes <= D; d += 2 * kLanes) {
        for (int i = 0; i < kKeys; i++) __builtin_prefetch(k[i] + d + ahead, 0, 2);
        for (int i = 0; i < kLanes; i++) total[i] = add_pairs(words + i / kKeys * width + d, k[i % kKeys] + d, total[i]);
      }
    }
    for (; d + kLanes <= D; d += kLanes) {
      if (d % kLine == 0) {
        for (int i = 0; i < kKeys; i++) __builtin_prefetch(k[i] + d + ahead, 0, 2);
        for (int i = 0; i < kKeys; i++) __builtin_prefetch(k[i] + d + kKeys * keys.step, 0, 3);
      }
      for (int i = 0; i < kLanes; i++) total[i] = fma(load(x + i / kKeys * width + d), load(k[i % kKeys] + d), total[i]);
    }
    if (d < D) {
      vf key[kKeys];
      for (int i = 0; i < kKeys; i++) key[i] = load_first(k[i] + d, D - d);
      for (int i = 0; i < kLanes; i++) total[i] = fma(load(x + i / kKeys * width + d), key[i % kKeys], total[i]);
    }
    vf dots = lane_sums(total) * scale;
    for (int a = 0; a < kRows; a++) std::memcpy(s + a * kTile<T> + j, (const char*)&dots + 4 * a * kKeys, 4 * kKeys);
  }
}

// Adds the values at `places`, times the weights s of kRows rows, to the columns e to e + kVectors kLanes of their sums.
// With `ahead`, the same part of the values in the next tile and two places on is prefetched beside each.
template <int kRows, int kVectors, bool kPartial, typename T>
void add_columns(const float* s, const Tokens<T>& values, const int64_t* places, int64_t n, int64_t e, int64_t left,
                 float* sums, int64_t width, bool ahead) {
  vf total[kRows * kVectors];  // of row i / kVectors and vector i % kVectors
  for (int i = 0; i < kRows * kVectors; i++) total[i] = load(sums + i / kVectors * width + e + i % kVectors * kLanes);
  for (int64_t c = 0; c < n; c++) {
    const T* value = values.data + places[c] * values.step + e;
    if (ahead) prefetch(value + kTile<T> * values.step, kVectors * kLanes * sizeof(T));
    for (int u = 0; ahead && u < kVectors * kLanes * int(sizeof(T)); u += 64) {
      __builtin_prefetch((const char*)(value + 2 * values.step) + u, 0, 3);
    }
    vf v[kVectors];
    for (int u = 0; u < kVectors; u++) v[u] = kPartial ? load_first(value + u * kLanes, left) : load(value + u * kLanes);
    for (int i = 0; i < kRows * kVectors; i++) {
      total[i] = fma(splat(s[i / kVectors * kTile<T> + c]), v[i % kVectors], total[i]);
    }
  }
  for (int i = 0; i < kRows * kVectors; i++) store(sums + i / kVectors * width + e + i % kVectors * kLanes, total[i]);
}

// Adds the weighted values of n keys to the sums of kRows rows.
template <int kRows, typename T>
void add_rows(const float* s, const Tokens<T>& values, const int64_t* places, int64_t n, int64_t E, float* sums, int64_t width,
              bool first) {
  constexpr int kVectors = kRows == 1 ? 8 : 4;
  int64_t e = 0;
  for (; e + kVectors * kLanes <= E; e += kVectors * kLanes) {
    add_columns<kRows, kVectors, false>(s, values, places, n, e, 0, sums, width, first);
  }
  for (; e + kLanes <= E; e += kLanes) add_columns<kRows, 1, false>(s, values, places, n, e, 0, sums, width, first);
  if (e < E) add_columns<kRows, 1, true>(s, values, places, n, e, E - e, sums, width, false);
}

// The same, row by row, without reading a value whose weight is 0: a hidden value may be NaN.
template <typename T>
void add_visible_values(const float* s, const Tokens<T>& values, const int64_t* places, int64_t n, int64_t rows, int64_t E,
                        float* sums, int64_t width) {
  for (int64_t r = 0; r < rows; r++, s += kTile<T>, sums += width) {
    int64_t shown[kTile<T>], count = 0;
    float weights[kTile<T>];
    for (int64_t c = 0; c < n; c++) {
      shown[count] = places[c], weights[count] = s[c];
      count += s[c] != 0;
    }
    if (count) add_rows<1>(weights, values, shown, count, E, sums, width, false);
  }
}

// Four rows at a time share what is loaded; one row is alone if only one remains.
inline int64_t padded_rows(int64_t R) { return R % 4 < 2 ? R : (R + 3) / 4 * 4; }

template <typename T>
void decode(DecodePlain* call) {
  int64_t R = call->q.shape[2], D = call->q.shape[3], E = call->out.shape[3], padded = padded_rows(R), fours = padded / 4 * 4;
  float scale = float(call->scale);
  Queries q(padded, D);
  RowSums sums(padded, E);
  Scratch<float> scores(padded * kTile<T>);
  Scratch<bool> visible(R * kTile<T>);
  int64_t index[kTile<T>], slots[kTile<T>];
  bool paged = call->pages.shape[3] > 0, whole_tiles = judges_tiles(*call), has_terms = has_score_terms(*call);
  int64_t* places = paged ? slots : index;  // where the keys of a tile are in memory
  float* s = scores;

  // Writes the slots of the keys that some row sees to `index`, and who sees which to the front of `visible`. Returns their
  // number, and whether every row sees all of them.
  auto gather = [&](const Head& head, const Tile& tile) {
    head.each_row([&](int64_t r, int64_t h, int64_t t) {
      row_visibility(*call, head.b, h, t, tile, visible + r * kTile<T>);
    });
    int64_t n = 0;
    bool full = true;
    for (int64_t c = 0; c < tile.size(); c++) {
      bool some = false, every = true;
      for (int64_t r = 0; r < R; r++) some |= visible[r * kTile<T> + c], every &= visible[r * kTile<T> + c];
      if (!some) continue;
      for (int64_t r = 0; r < R; r++) visible[r * kTile<T> + n] = visible[r * kTile<T> + c];
      index[n++] = tile.first + c;
      full &= every;
    }
    return std::pair(n, full);
  };

  run_splits(call, kTile<T>, sums, [&](const Head& head, int64_t first, int64_t last, RowSums& sums) {
    q.read(call->q.data + (head.b * call->q.shape[1] + head.g) * R * D, R);
    Tokens<T> keys{static_cast<const T*>(call->k.data) + head.b * call->k.steps[0] + head.g * call->k.steps[1], call->k.steps[2]};
    Tokens<T> values{static_cast<const T*>(call->v.data) + head.b * call->v.steps[0] + head.g * call->v.steps[1], call->v.steps[2]};
    for (int64_t i = first; i < last; i++) {
      Tile tile{i * kTile<T>, std::min(call->S, (i + 1) * kTile<T>)};
      Coverage coverage = whole_tiles ? tile_coverage(*call, head, tile) : Coverage::some;
      if (coverage == Coverage::none) continue;
      int64_t n = tile.size();
      bool full = true;
      if (coverage == Coverage::all) {
        for (int64_t c = 0; c < n; c++) index[c] = tile.first + c;
      } else {
        std::tie(n, full) = gather(head, tile);
        if (n == 0) continue;
      }
      int64_t read = (n + kLanes - 1) / kLanes * kLanes;  // the last key is read again in place of missing ones
      for (int64_t c = n; c < read; c++) index[c] = index[n - 1];
      for (int64_t c = 0; c < (paged ? read : 0); c++) slots[c] = slot_in_memory(*call, head.b, index[c]);
      for (int64_t r = 0; r < fours; r += 4) score_rows<4>(q, r, keys, places, read, scale, s + r * kTile<T>);
      if (fours < R) score_rows<1>(q, fours, keys, places, read, scale, s + fours * kTile<T>);
      if (has_terms) add_score_terms(*call, head, index, n, s, kTile<T>);
      for (int64_t r = 0; !full && r < R; r++) {
        for (int64_t c = 0; c < n; c++) s[r * kTile<T> + c] = visible[r * kTile<T> + c] ? s[r * kTile<T> + c] : kHidden;
      }
      sums.weigh(s, kTile<T>, R, n);
      float* z = sums.values;
      if (!full) {
        add_visible_values(s, values, places, n, R, E, z, sums.width);
        continue;
      }
      for (int64_t r = 0; r < fours; r += 4) add_rows<4>(s + r * kTile<T>, values, places, n, E, z + r * sums.width, sums.width, r == 0);
      if (fours < R) add_rows<1>(s + fours * kTile<T>, values, places, n, E, z + fours * sums.width, sums.width, fours == 0);
    }
  });
}
REGARD_ENTRIES(decode, DecodePlain, decode)

// Attention of a few queries to many keys, in which each key and value is read once.
#pragma once
#include <algorithm>
#include <cmath>

#include "arguments.h"
#include "numbers.h"
#include "tasks.h"

// Keys and values of type T, of any strides, or in pages.
template <typename T>
void decode(DecodePlain* call);

// Keys and values that are stored as codes with scales of type T.
template <typename T>
void decode_quantized(DecodeQuantized* call);

// The number of tasks of a call: each split of each head, and the join of the splits.
inline int64_t decode_tasks(const Decode& call) {
  int64_t splits = call.out.shape[1];
  return call.out.shape[0] * splits + (splits > 1);
}

// Where a slot of row b of the batch is in memory.
inline int64_t slot_in_memory(const DecodePlain& call, int64_t b, int64_t slot) {
  int64_t rows = call.pages.shape[2], pages = call.pages.shape[3];
  if (pages == 0) return slot;
  int64_t page = call.pages.data[(b < rows ? b : rows - 1) * pages + slot / call.page_size];
  return page * call.page_size + slot % call.page_size;
}

// Joins the results of a row over P splits, out [P,E] and lse [P], into split 0. The steps are the distances between splits.
inline void join_row(float* out, float* lse, int64_t P, int64_t E, int64_t out_step, int64_t lse_step) {
  constexpr int64_t kColumns = 16;
  float top = -INFINITY;
  for (int64_t p = 0; p < P; p++) {
    float x = lse[p * lse_step];
    if (x > top || x != x) top = x;
  }
  if (top == -INFINITY) return;
  double total = 0;
  for (int64_t p = 0; p < P; p++) total += std::exp(double(lse[p * lse_step]) - top);
  for (int64_t first = 0; first < E; first += kColumns) {
    int64_t count = std::min(kColumns, E - first);
    double z[kColumns] = {};
    for (int64_t p = 0; p < P; p++) {
      double weight = std::exp(double(lse[p * lse_step]) - top);
      if (weight == 0) continue;
      for (int64_t e = 0; e < count; e++) z[e] += weight * out[p * out_step + first + e];
    }
    for (int64_t e = 0; e < count; e++) out[first + e] = float(z[e] / total);
  }
  lse[0] = float(top + std::log(total));
}
inline void join_row(float* out, float* lse, int64_t P, int64_t E) { join_row(out, lse, P, E, E, 1); }

// The share of a softmax that its keys keep beside a sink: sigmoid(lse - sink). A row that sees no key keeps its output of 0.
inline float sink_share(float lse, float sink) {
  return lse == -INFINITY ? 1.0f : float(1 / (1 + std::exp(double(sink) - double(lse))));
}

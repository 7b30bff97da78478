// The entries of small layers: a linear map of a few vectors, an RMS norm, and the product of a gated network.
#include "activations.h"
#include "entry.h"
#include "gemv.h"
#include "norm.h"
#include "scratch.h"
#include "tasks.h"

template <typename T>
static void gemv(Gemv* call) {
  int64_t R = call->R, M = call->M, N = call->N;
  auto x = static_cast<const T*>(call->x), w = static_cast<const T*>(call->w), b = static_cast<const T*>(call->b);
  auto y = static_cast<T*>(call->y);
  Scratch<float> vectors(R * M);
  for (int64_t i = 0; i < R * M; i++) vectors[i] = to_float(x[i]);
  int64_t step = (kGemvTaskBytes / (M * int64_t(sizeof(T))) / kGemvRows + 1) * kGemvRows, tasks = (N + step - 1) / step;
  int64_t thread = take_task(call), task;
  while ((task = take_next(call, tasks, thread, call->runs)) < tasks) {
    int64_t n = task * step;
    multiply_rows(w, b, n, std::min(N, n + step), vectors, M, R, M, y + n, N);
  }
}
REGARD_ENTRIES(gemv, Gemv, gemv)

template <typename T>
static void rms_norm(RmsNorm* call) {
  constexpr int64_t kTaskNumbers = 1 << 13;
  int64_t R = call->R, M = call->M, step = std::max<int64_t>(1, kTaskNumbers / M);
  auto x = static_cast<const T*>(call->x), w = static_cast<const T*>(call->w);
  auto y = static_cast<T*>(call->y);
  for (int64_t first; (first = take_task(call) * step) < R;) {
    for (int64_t r = first; r < std::min(R, first + step); r++) {
      rms_norm_row(x + r * M, w, M, call->eps, float(call->offset), y + r * M);
    }
  }
}
REGARD_ENTRIES(rms_norm, RmsNorm, rms_norm)

// silu(gate) * up, where silu(gate) is rounded before it is multiplied, as by two operators of torch.
template <typename T>
static void gated_product(GatedProduct* call) {
  constexpr int64_t kTaskNumbers = 1 << 14;
  auto gate = static_cast<const T*>(call->gate), up = static_cast<const T*>(call->up);
  auto out = static_cast<T*>(call->out);
  int64_t n = call->n;
  for (int64_t i; (i = take_task(call) * kTaskNumbers) < n;) {
    int64_t stop = std::min(n, i + kTaskNumbers);
    for (; i + kLanes <= stop; i += kLanes) store(out + i, rounded_lanes<T>(silu(load(gate + i))) * load(up + i));
    if (i < stop) {
      vf product = rounded_lanes<T>(silu(load_first(gate + i, stop - i))) * load_first(up + i, stop - i);
      store_first(out + i, product, stop - i);
    }
  }
}
REGARD_ENTRIES(gated_product, GatedProduct, gated_product)

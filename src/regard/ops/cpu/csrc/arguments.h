// The arguments of the kernels, as structs of 8-byte fields. This is their only list: `regard.ops.cpu.arguments` reads it
// from this file to pack them. A field is int64_t, double, a pointer (nullptr where there is no such tensor), an array of
// these, or one of the structs that stand before it; one field a line.
#pragma once
#include <cstdint>

constexpr int kMaxRuns = 14;  // with `taken` and `done` two cache lines

// The counters that the threads of a call share.
struct Tasks {
  int64_t taken;  // the number of the next task; with runs, how many threads have begun
  int64_t done;   // how many tasks are finished
};

// The same, for tasks that form runs of neighbours.
struct TasksInRuns : Tasks {
  int64_t taken_of_runs[kMaxRuns];
};

// A contiguous tensor; a shape of fewer than four dimensions has leading ones.
template <typename T>
struct Array {
  T* data;
  int64_t shape[4];
};

// Keys or values [B,G,S,d] of any strides; the last dimension is contiguous.
struct Strided {
  const void* data;
  int64_t steps[3];  // from one row of the batch, head and slot to the next
};

// Keys or values that are stored as codes [B,G,R,lines,bytes] of a few bits.
struct Quantized {
  const uint8_t* data;
  int64_t steps[4];
  const void* scale;  // [B,G,R,lines,1], like `zero`
  const void* zero;
  int64_t scale_steps[4];
  int64_t group;  // the number of codes of a line
  int64_t bits;   // the number of bits of a code
};

// What decoding needs besides keys and values.
struct Decode : Tasks {
  int64_t T;       // the number of queries; row r of q is query r % T of head g H/G + r // T
  int64_t origin;  // the position of key 0, where the positions are contiguous
  double softcap;  // 0: none
  int64_t symmetric;  // whether ALiBi is symmetric
  double scale;
  Array<float> q;              // [B,G,R,D]
  Array<float> out;            // [B G,P,R,E], an output: the result of each of P splits
  Array<float> lse;            // [B,G,P,R], an output
  Array<int64_t> k_positions;  // [b,S], or [1,0] for positions from `origin` on
  Array<int64_t> starts;       // [b,h,t,n]: starts of the ranges that a query sees
  Array<int64_t> stops;        // [b,h,t,n]: one past the ends of these ranges
  Array<bool> visible;         // [b,h,t,S]: in place of ranges, which keys it sees, or [1,1,1,0]
  Array<float> slopes;         // [H], the slopes of ALiBi, or [0]
  Array<float> bias;           // [b,h,t,S], any other bias, or [1,1,1,0]
  Array<int64_t> q_positions;  // [b,T]
  int64_t S;                   // the number of keys
};

// Decoding over keys and values in full precision. With pages, slot s of row b is slot
// pages[b, s / page_size] page_size + s % page_size in memory.
struct DecodePlain : Decode {
  Array<int64_t> pages;  // [b,n], the pages of each row in order, or [1,0] without
  int64_t page_size;     // the number of slots of a page
  Strided k;
  Strided v;
};

// Decoding over keys and values that are stored as codes.
struct DecodeQuantized : Decode {
  Quantized k;
  Quantized v;
};

// y = W x + b for a few vectors x.
struct Gemv : TasksInRuns {
  int64_t R;      // the number of vectors
  int64_t M;      // the size of a vector of x
  int64_t N;      // the size of a vector of y
  const void* x;  // [R,M]
  const void* w;  // [N,M]
  const void* b;  // [N]
  void* y;        // [R,N]
  int64_t runs;   // the number of runs of tasks
};

// A matrix that is stored in fewer bits.
struct StoredMatrix : Tasks {
  int64_t form;        // the number of its form, in `regard.ops.stored_weights.FORMS`
  int64_t dtype;       // the number of the dtype of its scales, in `regard.ops.cpu.library.DTYPES`
  int64_t width;       // the number of columns in memory
  int64_t group;       // the number of columns for each scale
  int64_t row_bytes;   // the size in bytes of a row of codes
  int64_t row_scales;  // the number of scales, and zeros, of a row
  const void* codes;
  const void* scales;
};

// y = W x + b for a matrix that is stored in fewer bits.
struct StoredLinear : TasksInRuns {
  int64_t R;      // the number of vectors
  int64_t M;      // the size of a vector of x
  int64_t N;      // the size of a vector of y
  const void* x;  // [R,M]
  const StoredMatrix* matrix;
  const void* b;  // [N]
  void* y;        // [R,N]
  int64_t runs;   // the number of runs of tasks
};

// The numbers of some rows of codes.
struct Dequantize : Tasks {
  int64_t form;        // the number of its form, in `regard.ops.stored_weights.FORMS`; those of digits are not for this
  int64_t dtype;       // the number of the dtype of its scales, in `regard.ops.cpu.library.DTYPES`
  int64_t N;           // the number of rows
  int64_t M;           // the number of columns
  int64_t group;       // the number of columns for each scale
  int64_t row_bytes;   // the size in bytes of a row of codes
  int64_t row_scales;  // the number of scales, and zeros, of a row
  const void* codes;
  const void* scales;
  void* y;  // [N,M]
};

// The RMS norm of a few rows.
struct RmsNorm : Tasks {
  int64_t R;      // the number of rows
  int64_t M;      // the size of a row
  const void* x;  // [R,M]
  const void* w;  // [M]
  void* y;        // [R,M]
  double eps;     // added to the mean square
  double offset;  // added to the weight
};

// silu(gate) * up.
struct GatedProduct : Tasks {
  int64_t n;         // the number of elements
  const void* gate;  // [n]
  const void* up;    // [n]
  void* out;         // [n]
};

// Products of a few vectors with a matrix that is stored in fewer bits: plain numbers, 8-bit codes or 4-bit codes.
#pragma once
#include "arguments.h"
#include "scratch.h"

// The forms of a StoredMatrix. Those of digits multiply in integers, where the processor has the instruction for it.
enum StoredForm : int64_t { kHalf, kInt8, kInt8Digits, kInt4, kInt4Digits };

// The dtypes of numbers, in the order of `regard.ops.cpu.library.DTYPES`.
enum StoredDtype : int64_t { kFp32, kBf16, kFp16 };

// The memory for products of up to R vectors of at most `widest` numbers, and the digits of the vectors, which are kept from
// one product to the next.
class StoredRows {
 public:
  StoredRows(int64_t R, int64_t widest);
  // Notes that the next vectors are others than in the last call of `multiply`.
  void vectors_changed() { packed_ = 0; }
  // The rows first <= n < last of W x. vectors: fp32 [padded_count(R), distance], 0 behind the input size up to the width of
  // the matrix. Row n of vector r is written to sums[r * sums_distance + n - first].
  void multiply(const StoredMatrix& matrix, int64_t first, int64_t last, int64_t R, const float* vectors, int64_t distance,
                float* sums, int64_t sums_distance);

 private:
  int64_t packed_ = 0;      // which digits or pairs of the vectors are kept; 0: none
  Scratch<int32_t> words_;  // the digits of each vector and their corrections, or its pairs
  Scratch<float> factors_;  // the factors of the blocks of each vector
  Scratch<int64_t> spread_;  // for each vector, how many of its blocks must be multiplied in fp32
  Scratch<float> scales_;   // scales and zeros of some rows
  Scratch<int32_t> zeros_;  // the same as integers
};

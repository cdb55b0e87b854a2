// Arguments of the kernels of Strassen's product. Rows and lanes, or columns, are halved; a quarter
// is one half of both.
#pragma once

#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// Products of quarters, instead of eight.
inline constexpr int kStrassenProducts = 7;

// src quarters, and sums of them -> the left sides of the seven products:
//   [kStrassenProducts, vectors, rows, width]
struct StrassenSplit {
  const float *upper, *lower;          // the first row of each half
  std::int64_t row_step, vector_step;  // floats from a row, or vector of lanes, to the next
  std::int64_t rows, vectors;          // of a half
  std::int64_t all_vectors;            // of both; zeros follow if that is odd
  float* to;
};

// The products, [kStrassenProducts, rows, vectors * width] -> `vectors` vectors of each half of the
// columns of dst, of which the right one may have fewer:
//   dst = epilogue(sums of products + bias), zeros beyond `channels`
struct StrassenJoin {
  const float* products;
  std::int64_t rows, vectors, right_vectors;
  // Rows that both halves have are written once: the lower half begins after `common` of its rows.
  std::int64_t common;
  const float* bias;  // of the left half, or null; that of the right one is `half` floats on
  std::int64_t half;
  std::int64_t channels;  // from the first vector on, in both halves
  const float* residual;  // laid out as dst, which it may be; or null
  float* dst;
  std::int64_t row_step, vector_step, lower, right;  // floats in dst; the latter two to the halves
  Epilogue epilogue;
};

}  // namespace torch_blocked::kernels

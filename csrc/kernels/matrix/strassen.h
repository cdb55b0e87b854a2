// Arguments of the kernels of Strassen's product. Rows, lanes and columns are halved. A quarter of
// a matrix is a half along both dims.
#pragma once

#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// The products of quarters, instead of eight.
inline constexpr int kStrassenProducts = 7;

// Quarters of src and their sums -> the left sides of the seven products:
//   [kStrassenProducts, vectors, rows, width]
struct StrassenSplit {
  const float *upper, *lower;          // the first row of each half
  std::int64_t row_step, vector_step;  // floats from a row, or vector of lanes, to the next
  std::int64_t rows, vectors;          // of a half
  std::int64_t all_vectors;            // of both halves; if odd, zeros fill the last
  float* to;
};

// Products [kStrassenProducts, rows, vectors * width] -> `vectors` vectors of each half of the
// columns of dst. The right half may have fewer:
//   dst = epilogue(sums of products + bias), zeros beyond `channels`
struct StrassenJoin {
  const float* products;
  std::int64_t rows, vectors, right_vectors;
  // The halves overlap by `common` rows, which are written only once: the lower half skips them.
  std::int64_t common;
  const float* bias;  // of the left half, or null; the right half's is `half` floats further
  std::int64_t half;
  std::int64_t channels;  // from the first vector on, in both halves
  const float* residual;  // laid out as dst, which it may be; or null
  float* dst;
  std::int64_t row_step, vector_step, lower, right;  // floats in dst; the latter two to the halves
  Epilogue epilogue;
};

}  // namespace torch_blocked::kernels

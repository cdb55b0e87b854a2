// Arguments of the kernels of attention other than matrix products.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// Turns scores into powers, row by row: scores [rows, count] = exp(x - the row's greatest x), where
// x = scale scores + bias. factors [rows] = 1 / the sum of a row. Rows lie `stride` floats apart,
// with room for whole vectors. scale > 0.
struct ScoreRows {
  float* scores;
  std::int64_t rows, count, stride;
  float scale;
  const float* bias;  // [rows, count], `bias_stride` from row to row; or null
  std::int64_t bias_stride;
  float* factors;
};

// dst [rows, count] = factors [rows] src
struct ScaledRows {
  const float* src;
  std::int64_t rows, count, src_stride;
  const float* factors;
  float* dst;
  std::int64_t dst_stride;
};

}  // namespace torch_blocked::kernels

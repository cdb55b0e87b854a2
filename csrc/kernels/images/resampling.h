// Arguments of the kernels of resampling.
#pragma once

#include <array>
#include <cstdint>

namespace torch_blocked::kernels {

// dst[i] = sum over the rows of weights[row] * rows[row][i]. It interpolates between rows of an
// image, also of different planes.
struct WeighedRows {
  static constexpr std::size_t kMost = 4;
  std::array<const float*, kMost> rows;
  std::array<float, kMost> weights;
  std::int64_t count;   // of rows: 2 or 4
  std::int64_t length;  // of a row
  float* dst;
};

}  // namespace torch_blocked::kernels

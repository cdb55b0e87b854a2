// Arguments of the kernel that the gradients of weights add up their products with.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// sums[i, j] = sum over images, rows and pixels of a[.., i] * b[.., j], or adds it to sums. i
// counts channels of a, j vectors of b; channels lie in blocks, which are whole vectors of b.
struct OuterProducts {
  const float *a, *b;
  float* sums;
  std::int64_t images, rows, pixels;
  std::int64_t a_image, a_row, a_pixel, b_image, b_row, b_pixel;  // strides
  std::int64_t a_ahead, b_ahead;  // from a pixel to the one that the next call begins with
  std::int64_t a_count, a_block, a_block_stride;
  std::int64_t b_first, b_vectors, b_block, b_block_stride;  // from vector b_first on
  std::int64_t sums_row, sums_vector;
  bool add;
};

}  // namespace torch_blocked::kernels

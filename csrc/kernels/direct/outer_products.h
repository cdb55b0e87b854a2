// Arguments of the kernel that sums the products of weight gradients.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// sums[i, j] = sum over images, rows and pixels of a[.., i] * b[.., j]; with `add` this is added to
// sums. i counts channels of a, j vectors of b. Channels lie in blocks; those of b are whole
// vectors.
struct OuterProducts {
  const float *a, *b;
  float* sums;
  std::int64_t images, rows, pixels;
  std::int64_t a_image, a_row, a_pixel, b_image, b_row, b_pixel;  // strides
  std::int64_t a_ahead, b_ahead;  // from a pixel to the first one of the next call
  std::int64_t a_count, a_block, a_block_stride;
  std::int64_t b_first, b_vectors, b_block, b_block_stride;  // from vector b_first on
  std::int64_t sums_row, sums_vector;
  bool add;
};

}  // namespace torch_blocked::kernels

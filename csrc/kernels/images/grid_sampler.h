// Arguments of the kernels of grid_sampler.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// Pixels of one channel block as weighted sums of others: `taps` offsets and weights per pixel,
// [pixels, taps]; offsets count elements, of pixels of an image in the same channel block.
struct PixelTaps {
  const std::int64_t* offsets;
  const float* weights;
  std::int64_t taps, pixels, block;
};

}  // namespace torch_blocked::kernels

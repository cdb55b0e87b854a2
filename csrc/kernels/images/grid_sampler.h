// Arguments of the kernels of grid_sampler.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// Pixels of one channel block as weighted sums of others. Each has `taps` offsets and weights:
// [pixels, taps]. Offsets count elements within the same channel block of an image; -1 is no pixel.
struct PixelTaps {
  const std::int64_t* offsets;
  const float* weights;
  std::int64_t taps, pixels, block;
};

}  // namespace torch_blocked::kernels

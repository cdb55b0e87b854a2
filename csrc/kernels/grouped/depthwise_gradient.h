// Arguments of the kernel of the gradient of a depthwise weight.
#pragma once

#include <array>
#include <cstdint>

namespace torch_blocked::kernels {

// The gradient of a depthwise weight from one channel block of one image; sizes are d, h, w.
struct DepthwiseGradient {
  const float* src;       // [ID, IH, IW, block]
  const float* diff_dst;  // [OD, OH, OW, block]
  float* diff_weights;    // [KD, KH, KW, block], added to
  std::int64_t block;
  std::array<std::int64_t, 3> in, out, kernel, stride, padding, dilation;
};

}  // namespace torch_blocked::kernels

// Arguments of the kernel of max pooling.
#pragma once

#include <array>
#include <cstdint>

namespace torch_blocked::kernels {

// dst[image, d, h, w, lane] is the greatest of a window of src[image, d, h, w, lane]: float32, or
// unsigned bytes. Blocks of channels are images of `lanes` channels each; of channels-last all
// channels are lanes.
struct MaximumWindows {
  const void* src;
  void* dst;
  std::int64_t lanes;
  std::array<std::int64_t, 3> in, out, kernel, stride, padding, dilation;  // d, h, w
};

}  // namespace torch_blocked::kernels

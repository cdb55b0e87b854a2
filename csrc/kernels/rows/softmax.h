// Arguments of the kernels that reduce over the channels of a pixel, or over another dim.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// With `lanes`, an image [ceil(channels / block), pixels, block] that is reduced over the channels:
// over its blocks and the lanes of a pixel. Without `lanes`, any [channels / block, pixels, block]
// that is reduced over its first dim.
struct ChannelRows {
  std::int64_t channels, block, pixels;
  bool lanes;
};

// Rows [columns], one behind the other in src and in dst, which may be src.
struct SoftmaxRows {
  const float* src;
  float* dst;
  std::int64_t columns;
};

}  // namespace torch_blocked::kernels

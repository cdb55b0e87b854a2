// Arguments of the kernels that reduce over the channels of a pixel, or over another dim.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// With `lanes`, an image [ceil(channels / block), pixels, block] is reduced over its channels: over
// the blocks and the lanes of a pixel. Without `lanes`, a [channels / block, pixels, block] is
// reduced over its first dim.
struct ChannelRows {
  std::int64_t channels, block, pixels;
  bool lanes;
};

// Rows [columns], one after the other in src and in dst. dst may be src.
struct SoftmaxRows {
  const float* src;
  float* dst;
  std::int64_t columns;
};

}  // namespace torch_blocked::kernels

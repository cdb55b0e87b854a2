// Arguments of the kernels that reduce over the channels of a pixel, or over another dim.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// Rows of `pixels` times `block` values, reduced over the rows, and over the lanes of a pixel too
// if `lanes`: one image [ceil(channels / block), pixels, block], to be walked over its channels.
// Without `lanes`, any [channels / block, pixels, block].
struct ChannelRows {
  std::int64_t channels, block, pixels;
  bool lanes;
};

}  // namespace torch_blocked::kernels

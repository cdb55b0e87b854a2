// Arguments of the kernel that copies lanes.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// One channel block: dst[pixel, dst_lane + i] = src[pixel, src_lane + i] for i in [0, count) and
// all pixels; both are [pixels, block] of 4-byte elements. Other lanes of dst stay as they are.
struct LaneCopy {
  const float* src;
  float* dst;
  std::int64_t block, pixels, src_lane, dst_lane, count;
};

}  // namespace torch_blocked::kernels

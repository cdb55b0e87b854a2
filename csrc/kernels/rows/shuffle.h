// Arguments of the kernel that gathers lanes.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// A lane of dst comes from element `offset` of source `src`; it is zero if src is -1.
struct GatheredLane {
  std::int64_t src, offset;
};

// At every pixel each lane of dst comes from any lane of any source: dst[lane] = srcs[src][offset].
// Sources begin with a block and have the same stride between pixels. 4-byte elements.
struct LaneGather {
  const float* const* srcs;
  const GatheredLane* lanes;  // [block]
  float* dst;
  std::int64_t block, pixels, src_stride, dst_stride;
};

}  // namespace torch_blocked::kernels

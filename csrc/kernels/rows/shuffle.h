// Arguments of the kernel that gathers lanes.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// A lane of dst comes from element `offset` of source `src`; it is zero if src is -1.
struct GatheredLane {
  std::int64_t src, offset;
};

// At every pixel each lane of dst comes from any lane of any source: dst[lane] = srcs[src][offset].
// Sources begin with a block and have the same stride between pixels. Elements have four bytes, or
// two for the kernel named `short`; offsets and strides count elements.
struct LaneGather {
  const void* const* srcs;
  const GatheredLane* lanes;  // [block]
  void* dst;
  std::int64_t block, pixels, src_stride, dst_stride;
};

}  // namespace torch_blocked::kernels

// Arguments of the kernels that reorder between dense and blocked.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// A reorder of one image between dense and blocked [blocks, pixels, block], 4-byte elements.
struct ImageReorder {
  const float* src;
  float* dst;
  std::int64_t channels, block, pixels;
  bool stream;  // write past the cache
};

}  // namespace torch_blocked::kernels

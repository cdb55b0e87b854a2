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

// src [rows, columns] -> dst [columns, rows]; the strides are those of a row of either.
struct Transposition {
  const float* src;
  std::int64_t src_stride;
  float* dst;
  std::int64_t dst_stride, rows, columns;
};

}  // namespace torch_blocked::kernels

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

// Reorders the bytes of at most four channels of one image to [pixels, 4]. The strides are in
// bytes.
struct PictureReorder {
  const std::uint8_t* src;
  std::int64_t pixel_stride, channel_stride;
  std::uint8_t* dst;
  std::int64_t channels;
};

// src [rows, columns] -> dst [columns, rows]. The strides are the distances between rows.
struct Transposition {
  const float* src;
  std::int64_t src_stride;
  float* dst;
  std::int64_t dst_stride, rows, columns;
};

}  // namespace torch_blocked::kernels

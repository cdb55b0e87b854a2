// Arguments of the kernels of max pooling, and of averages of bytes.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/quantize.h"

namespace torch_blocked::kernels {

// dst[image, d, h, w, lane] is the greatest of a window of src[image, d, h, w, lane]: float32,
// bfloat16 or unsigned bytes. Blocks of channels are images of `lanes` channels each; of
// channels-last all channels are lanes.
struct MaximumWindows {
  const void* src;
  void* dst;
  std::int64_t lanes;
  std::array<std::int64_t, 3> in, out, kernel, stride, padding, dilation;  // d, h, w
};

// Averages of such windows of bytes: of the window, or of what of it lies in src.
struct AverageOfBytes {
  MaximumWindows windows;
  Quantizer src;
  const Quantizer* dst;  // null: float32
  bool of_window;        // else of what lies in src
};

}  // namespace torch_blocked::kernels

// Arguments of the kernels of pooling.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/rows/quantize.h"

namespace torch_blocked::kernels {

// Windows of src[image, d, h, w, lane]: float32, bfloat16 or unsigned bytes. Each makes
// dst[image, d, h, w, lane]. Blocks of channels are images of `lanes` channels each; of
// channels-last all channels are lanes.
struct PoolingWindows {
  const void* src;
  void* dst;
  std::int64_t lanes;
  std::array<std::int64_t, 3> in, out, kernel, stride, padding, dilation;  // d, h, w
};

// Averages of such windows.
struct Averages {
  PoolingWindows windows;
  // What a sum is divided by, in the order in which it counts: this number, unless it is 0; the
  // pixels of the window that lie in src or its padding; those that lie in src.
  std::int64_t divisor;
  bool of_window;
};

// Averages of bytes.
struct AveragesOfBytes {
  Averages averages;
  Quantizer src;
  const Quantizer* dst;  // null: float32
};

}  // namespace torch_blocked::kernels

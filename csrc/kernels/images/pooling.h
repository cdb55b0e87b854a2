// Arguments of the kernels of pooling.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/rows/quantize.h"

namespace torch_blocked::kernels {

// Windows of src[image, d, h, w, lane], of float32, bfloat16 or unsigned bytes. Each window makes
// one dst[image, d, h, w, lane]. In blocked formats each block counts as an image of `lanes`
// channels. In channels-last all channels are lanes.
struct PoolingWindows {
  const void* src;
  void* dst;
  std::int64_t lanes;
  std::array<std::int64_t, 3> in, out, kernel, stride, padding, dilation;  // d, h, w
};

// Averages of such windows.
struct Averages {
  PoolingWindows windows;
  // A sum is divided by this number unless it is 0. Otherwise it is divided by the pixels of the
  // window that lie in src or its padding if of_window, else by those that lie in src.
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

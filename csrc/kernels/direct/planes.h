// Arguments of the kernel of 1x1 convolutions of planes.
#pragma once

#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// A 1x1 convolution of one image in planes:
//   dst[oc, pixel] = epilogue(bias[oc] + sum over ic of weights[oc, ic] src[ic, pixel])
// where src and dst are [channels, pixels], dense.
struct MixedPlanes {
  const float *src, *weights;
  const float* bias;      // may be null
  const float* residual;  // laid out as dst, which it may be; or null
  float* dst;
  std::int64_t ic, oc, pixels;
  Epilogue epilogue;
};

}  // namespace torch_blocked::kernels

// Arguments of the kernel that multiplies by gates.
#pragma once

#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// The function that makes a channel's gate of the last layer's result.
enum class Gate : std::uint8_t { kSigmoid, kHardsigmoid };

// Pixels of one channel block: dst = epilogue(src * gate(gates)). src, residual and dst are
// [pixels, block]. There are `channels` gates, without the tail. dst may be src or residual.
struct GatedPixels {
  const void *src, *residual;  // float32, or bfloat16 for the kernel named `bfloats`; dst likewise
  const float* gates;
  void* dst;
  std::int64_t block, pixels, channels;
  Gate gate;
  Epilogue epilogue;
};

}  // namespace torch_blocked::kernels

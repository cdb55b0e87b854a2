// Arguments of the kernel of a linear layer of few rows.
#pragma once

#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// dst [rows, outputs] = activation(src [rows, inputs] times weights + bias) for blocks [begin, end)
// of outputs. float32 weights and bytes are [blocks, inputs, block], bfloat16 weights are [blocks,
// inputs / 2, block, 2]; blocks lie weights_stride numbers apart.
struct LinearRows {
  static constexpr std::int64_t kMostRows = 8, kMostVectors = 4;
  const void *src, *weights;
  const void* bias;     // or null
  const float* scales;  // of outputs, in whole blocks: what bytes stand for; else null
  void* dst;
  std::int64_t rows, inputs, outputs;
  std::int64_t block;           // whole vectors, at most kMostVectors
  std::int64_t weights_stride;  // numbers
  Activation activation;
};

}  // namespace torch_blocked::kernels

// Arguments of the kernel of a linear layer of few rows.
#pragma once

#include <cstdint>

#include "kernels/epilogue.h"

namespace torch_blocked::kernels {

// dst [rows, outputs] = activation(src [rows, inputs] times weights + bias) for blocks [begin, end)
// of outputs; weights [blocks, | inputs, block | + what is left of weights_stride].
struct LinearRows {
  static constexpr std::int64_t kMostRows = 8, kMostVectors = 4;
  const float *src, *weights;
  const float* bias;  // or null
  float* dst;
  std::int64_t rows, inputs, outputs;
  std::int64_t block, weights_stride;  // whole vectors, at most kMostVectors
  Activation activation;
};

}  // namespace torch_blocked::kernels

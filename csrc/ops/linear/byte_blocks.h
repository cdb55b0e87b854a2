// How signed bytes lie that are the weights of few rows (kernels/matrix/linear.h).
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/kernels.h"
#include "kernels/matrix/linear.h"

namespace torch_blocked {

// [blocks, inputs, block] bytes, then [blocks * block] scales.
struct ByteBlocks {
  std::int64_t inputs, outputs, block;

  std::int64_t blocks() const;
  std::int64_t all_bytes() const;  // a multiple of 32
  // weight: [outputs, inputs] int8; scales: [outputs] float32; to: all_bytes(), on 32.
  void pack(const at::Tensor& weight, const at::Tensor& scales, void* to) const;
  // Makes rows read what pack() has left at `packed`. Run them with linear_byte_rows.
  void give(kernels::LinearRows& rows, const void* packed) const;

 private:
  std::int64_t bytes() const;
};

}  // namespace torch_blocked

// Runs linear layers on kernels of convolution: rows are pixels whose channels lie in blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/convolution_problem.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

// Rows [rows, inputs] as the pixels of an image whose channels are one block. The channels of dst
// lie in blocks of `block`.
inline ConvolutionProblem pixels_of_rows(std::int64_t rows, std::int64_t inputs,
                                         std::int64_t outputs, std::int64_t block,
                                         at::ScalarType dtype, const Activation& activation) {
  return {.src_dims = {1, inputs, rows},
          .dst_dims = {1, outputs, rows},
          .weight_dims = {outputs, inputs, 1},
          .stride = {1},
          .padding = {0},
          .dilation = {1},
          .output_padding = {0},
          .groups = 1,
          .src_format = {Format::Kind::kBlocked, inputs},
          .dst_format = {Format::Kind::kBlocked, block},
          .transposed = false,
          .has_bias = true,
          .dtype = dtype,
          .epilogue = {.before = activation, .after = {}}};
}

struct RowsOfBlocks {
  std::int64_t rows, channels, block;
};

// [blocks, rows, block] -> [rows, channels]
template <typename Number>
void join_rows(const RowsOfBlocks& r, const void* blocks, void* dst) {
  parallel_units(r.rows, r.channels, [&](std::int64_t begin, std::int64_t end) {
    Number* to = static_cast<Number*>(dst) + begin * r.channels;
    for (std::int64_t row = begin; row < end; ++row) {
      const Number* from = static_cast<const Number*>(blocks) + row * r.block;
      for (std::int64_t first = 0; first < r.channels; first += r.block) {
        to = std::copy_n(from + first * r.rows, std::min(r.block, r.channels - first), to);
      }
    }
  });
}

}  // namespace torch_blocked

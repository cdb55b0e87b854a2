// Linear layers by kernels of convolution: rows are pixels, whose channels lie in blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "torch_blocked/threads.h"

namespace torch_blocked {

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

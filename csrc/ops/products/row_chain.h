// Runs a chain of convolutions by bands of rows. Each band goes through all convolutions while it
// lies in the caches of one thread, and the threads synchronise only once. Rows that two bands
// share are kept. If another thread has the other band, they are computed twice.
//
// In a chain, depthwise, grouped and dot-product kernels give the same bits as alone, and so does
// the direct kernel for a 1x1. A 1x1 that oneDNN would run takes the direct kernel in a chain,
// which takes about as long. graph/planning/chains.cpp decides which steps form a chain.
//
// On two cores of a Zen 4 MobileNetV2 took 0.95 of the time with chains, ShuffleNetV2 0.96,
// GhostNet 0.97, EfficientNet-Lite0 0.98. On one core chains gained nothing at 224x224, and took
// 0.96 of the time at 512x512. (This was measured with more chains than are made now.)
#pragma once

#include <functional>
#include <vector>

#include "ops/products/byte_rows.h"
#include "ops/window.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

// Some rows of an image in blocks of channels. In channels-last, all channels are one block.
struct BlockedRows {
  std::uint8_t* data;       // the first pixel of row `first`, in block 0
  std::int64_t first;       // negative if it lies in the padding
  std::int64_t block, row;  // bytes from block to block and from row to row

  std::uint8_t* at(std::int64_t index, std::int64_t y) const {
    return data + index * block + (y - first) * row;
  }
};

// A convolution of images that one thread can run a few rows at a time.
struct RowStage {
  Window window;  // along the rows
  ByteRows src;   // a row of src as it is read, with the padding that it needs
  std::int64_t n, src_rows, src_blocks, dst_rows, dst_columns, dst_blocks, dst_pixel_bytes;
  std::int64_t weight_bytes;
  bool reads_padding = true;  // false: it skips rows beyond src

  // Whether it can read an image in place, without padding around it.
  bool reads_images() const {
    const bool has_padding = window.padding > 0 || window.padding_end(src_rows, dst_rows) > 0;
    return src.columns == src.src_columns && !(has_padding && reads_padding);
  }
  std::int64_t src_plane() const { return src_rows * src.src_columns * src.pixel_bytes; }
  std::int64_t dst_row() const { return dst_columns * dst_pixel_bytes; }
  std::int64_t dst_plane() const { return dst_rows * dst_row(); }
};

// Makes rows of dst, in one thread. `residual` is null, or begins with the first of these rows and
// is laid out as dst.
using RunRows = std::function<void(const BlockedRows& src, const std::uint8_t* residual,
                                   const BlockedRows& dst, Range rows)>;

class RowChain {
 public:
  // Each stage reads what the one before it makes.
  explicit RowChain(std::vector<RowStage> stages);

  // The number of bands of an image, for torch's number of threads.
  std::int64_t bands() const;
  // The share of all products that belongs to rows computed twice.
  double made_twice() const;

  // `runs` has one for each stage. src of the first stage and dst of the last are whole images in
  // blocks.
  struct Operands {
    const std::uint8_t *src, *residual;
    std::uint8_t* dst;
  };
  void run(const std::vector<RunRows>& runs, const Operands& operands) const;

 private:
  class Walk;
  std::vector<std::int64_t> capacities(std::int64_t rows) const;
  std::int64_t bytes(std::int64_t rows) const;  // of the buffers

  std::vector<RowStage> stages_;
  std::int64_t most_rows_;  // of the last stage in a band
};

}  // namespace torch_blocked

// Convolutions one after the other, by bands of rows: each band goes through all of them while it
// lies in the caches of one thread, and threads meet once for all. The rows that two bands share
// are kept, or, where another thread has the other band, computed twice.
//
// Depthwise, grouped and dot-product kernels run so with the bits that they have alone, and so does
// the direct kernel for a 1x1; a 1x1 that oneDNN would run takes the direct kernel in a chain,
// which takes about as long. graph/planning/chains.cpp decides which steps form a chain. On two
// cores of a Zen 4 MobileNetV2 took 0.95 of the time with chains, ShuffleNetV2 0.96, GhostNet 0.97,
// EfficientNet-Lite0 0.98; on one core nothing at 224x224, and 0.96 at 512x512 (measured with more
// chains than are made now).
#pragma once

#include <functional>
#include <vector>

#include "ops/products/byte_rows.h"
#include "ops/window.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

// Some rows of an image in blocks of channels; with channels last, which are one block.
struct BlockedRows {
  std::uint8_t* data;       // the first pixel of row `first`, in block 0
  std::int64_t first;       // which may lie in the padding: then it is negative
  std::int64_t block, row;  // bytes from block to block and from row to row

  std::uint8_t* at(std::int64_t index, std::int64_t y) const {
    return data + index * block + (y - first) * row;
  }
};

// A convolution of images that a thread can run for some rows.
struct RowStage {
  Window window;  // along the rows
  ByteRows src;   // a row of src as it is read, with the padding that it must have around it
  std::int64_t n, src_rows, src_blocks, dst_rows, dst_columns, dst_blocks, dst_pixel_bytes;
  std::int64_t weight_bytes;
  bool reads_padding = true;  // rows of padding; else it leaves out those beyond src

  // Whether it reads src where an image lies, without anything around it.
  bool reads_images() const {
    return src.columns == src.src_columns && (window.padding == 0 || !reads_padding);
  }
  std::int64_t src_plane() const { return src_rows * src.src_columns * src.pixel_bytes; }
  std::int64_t dst_row() const { return dst_columns * dst_pixel_bytes; }
  std::int64_t dst_plane() const { return dst_rows * dst_row(); }
};

// Makes rows of dst, in one thread. `residual` is that of the first of them, and lies as dst does;
// or null.
using RunRows = std::function<void(const BlockedRows& src, const std::uint8_t* residual,
                                   const BlockedRows& dst, Range rows)>;

class RowChain {
 public:
  // Each stage reads what the one before it makes.
  explicit RowChain(std::vector<RowStage> stages);

  // Into how many bands an image is cut for the threads that there are.
  std::int64_t bands() const;
  // Products of the rows that two threads make, as a part of all products.
  double made_twice() const;

  // `runs`: of each stage. src and dst of the first and the last one are whole images in blocks.
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

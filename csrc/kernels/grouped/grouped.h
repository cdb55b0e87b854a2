// Arguments of the kernels of depthwise and grouped convolution.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// One spatial dim of a depthwise or grouped convolution: output o of `out` reads the input indices
// origin + o * stride + tap * dilation and goes to index dst_first + o * dst_step of dst.
struct GroupedAxis {
  std::int64_t in, out, dst, kernel;
  std::int64_t origin, stride, dilation;
  std::int64_t dst_first, dst_step;
};

// Which lanes of one vector of src the lanes of an output vector read. If several vectors of src
// are needed, each has an entry.
struct LaneSource {
  std::int64_t block;                  // of src
  std::int64_t count;                  // only in the first entry: the number of entries
  std::array<std::int32_t, 16> lanes;  // the src lane of each output lane; -1: not in this vector
};

// A convolution in which each output channel sees few input channels. The block must be one vector
// of the kernels' instruction set. In channels-last, which only depthwise kernels read, a block is
// one vector of a pixel's channels.
struct GroupedConvolution {
  std::array<GroupedAxis, 3> axes;  // d, h, w
  std::int64_t dst_blocks, oc;
  std::int64_t inputs;  // input channels that an output channel sees; depthwise: 1
  std::int64_t part;    // pixels of a row that form a unit of work
  // The distances in elements between pixels, rows, blocks and images of src and dst.
  std::int64_t src_pixel, src_row, src_plane, src_image;
  std::int64_t dst_pixel, dst_row, dst_plane, dst_image;
  // [dst_blocks, inputs, sources]: the vectors that hold an input for a vector of outputs
  const LaneSource* lanes;
  std::int64_t sources;
  const void* src;       // [N, blocks, ID, IH, IW, block], float32 or bfloat16
  const float* weights;  // [dst_blocks, KD, KH, inputs, KW, block]
  const float* bias;     // [oc], or null
  const void* residual;  // as dst, or null
  void* dst;             // [N, dst_blocks, OD, OH, OW, block], of the type of src
  Epilogue epilogue;
};

// Parts [begin, end) of output rows, numbered along w, then h, d, blocks and images.
using RunGrouped = void (*)(const GroupedConvolution& convolution, std::int64_t begin,
                            std::int64_t end);

}  // namespace torch_blocked::kernels

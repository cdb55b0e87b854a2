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

// Which lanes of one vector of src the lanes of an output vector read. Where several vectors of src
// are needed, there is an entry for each.
struct LaneSource {
  std::int64_t block;                  // of src
  std::int64_t count;                  // in the first entry: how many entries there are
  std::array<std::int32_t, 16> lanes;  // for each output lane a lane of src; -1: not in this vector
};

// A convolution whose output channels see few input channels each. The block must be a whole vector
// of the kernels' instruction set; in channels-last, which only depthwise ones read, a block is so
// many of a pixel's channels.
struct GroupedConvolution {
  std::array<GroupedAxis, 3> axes;  // d, h, w
  std::int64_t dst_blocks, oc;
  std::int64_t inputs;  // input channels that an output channel sees; depthwise: 1
  std::int64_t part;    // pixels of a row that are a unit of work
  // Elements from a pixel of src and dst to the next, from a row, from a block and from an image.
  std::int64_t src_pixel, src_row, src_plane, src_image;
  std::int64_t dst_pixel, dst_row, dst_plane, dst_image;
  // [dst_blocks, inputs, sources]: the vectors that hold an input for a vector of outputs
  const LaneSource* lanes;
  std::int64_t sources;
  const void* src;       // [N, blocks, ID, IH, IW, block], float32 or bfloat16
  const float* weights;  // [dst_blocks, KD, KH, inputs, KW, block]
  const float* bias;     // [oc], or null
  const void* residual;  // as dst, or null
  void* dst;             // [N, dst_blocks, OD, OH, OW, block], numbers as those of src
  Epilogue epilogue;
};

// Parts [begin, end) of output rows, numbered along w, then h, d, blocks and images.
using RunGrouped = void (*)(const GroupedConvolution& convolution, std::int64_t begin,
                            std::int64_t end);

}  // namespace torch_blocked::kernels

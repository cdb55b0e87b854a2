// Arguments of the kernels of direct convolution.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// Lanes of a pixel's src whose weights follow each other: src[offset] to src[offset + lanes - 1]
// meet the weights of lane `weights` on.
struct DirectSegment {
  std::int64_t offset, lanes, weights;
};

// A direct convolution of some pixels and at most 3 vectors of output channels:
//   dst[pixel, oc] = activation(bias[oc] + residual[pixel, oc] + sum over segments and lanes of
//                               src[pixel * step + offset + lane] * weights[first + lane, oc])
// where the step is one vector, or one float in planes, or src_step, and `first` the segment's
// first weight.
struct DirectTiles {
  const float* src;
  std::int64_t src_step;          // of direct_row_tiles
  const DirectSegment* segments;  // `count`, and one more, which is prefetched only
  std::int64_t count;
  const float* weights;   // [lanes, vectors * width]
  const float* bias;      // [channels], or null
  const float* residual;  // laid out as dst, which it may be; or null
  float* dst;
  std::int64_t pixels;    // at dst_step floats from each other
  std::int64_t vectors;   // of output channels
  std::int64_t channels;  // that are not tail, at most vectors * width
  // Of a single vector, the lanes that are written; those beside them stay as they are in dst.
  std::int64_t first_lane = 0, end_lane = 16;
  std::int64_t dst_step;
  std::array<std::int64_t, 3> dst_offsets;  // of the vectors
  // Where blocks are narrower than a vector: how many, of dst_step lanes each, the channels fill,
  // and their distance in dst. Then the sum has one part, no residual and no activation. 0: blocks
  // are at least as wide as a vector.
  std::int64_t parts, part_stride;
  // A sum in several parts, of some segments each, grows in dst. The first has bias and
  // residual, and overwrites dst; the last has the activation.
  bool first, last;
  // Floats from these weights to those that come next, as many, which the tiles prefetch in equal
  // shares; of the `rows` calls with these weights this is number `row`.
  std::int64_t ahead, row, rows;
  bool stream;  // write dst past the cache
  Activation activation;
};

// What the kernels of direct convolution are made for.
struct DirectSizes {
  std::int64_t width;                  // of a vector
  std::int64_t vectors;                // of output channels at a time, best
  std::array<std::int64_t, 3> pixels;  // at a time with 1, 2, 3 vectors
  std::int64_t lanes, tap_lanes;       // of one part of a sum: of 1x1, of larger kernels
  std::int64_t band_bytes;             // of src that are worked on at a time
};

// src positions first, first + stride, ... in `count` slots from `slot` on.
struct DirectRun {
  std::int64_t slot, count, first;
};

// The src under some output pixels, copied to slots, with its padding. Along each dim the positions
// that neighbouring output pixels meet at one tap lie side by side, whatever the stride.
struct DirectBand {
  const float* src;  // an image [blocks, d, h, w, block]
  float* slots;      // [vectors, d, h, w, width], planes [channels, d, h, w]
  std::int64_t channels, block, block_stride;
  std::array<std::int64_t, 3> in;  // src positions: d, h, w
  const std::int64_t *d, *h;       // position of each slot
  std::int64_t d_slots, h_slots, w_slots;
  const DirectRun* runs;  // of w
  std::int64_t run_count, w_stride;
};

}  // namespace torch_blocked::kernels

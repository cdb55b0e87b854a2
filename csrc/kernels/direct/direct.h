// Arguments of the kernels of direct convolution.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// Lanes of a pixel's src with consecutive weights: src[offset] to src[offset + lanes - 1] meet the
// weights from lane `weights` on.
struct DirectSegment {
  std::int64_t offset, lanes, weights;
};

// A direct convolution of some pixels and at most 3 vectors of output channels:
//   dst[pixel, oc] = activation(bias[oc] + residual[pixel, oc] + sum over segments and lanes of
//                               src[pixel * step + offset + lane] * weights[first + lane, oc])
// where the step is one vector, one float in planes, or src_step. `first` is the segment's first
// weight.
struct DirectTiles {
  const float* src;
  std::int64_t src_step;          // only for direct_row_tiles
  const DirectSegment* segments;  // `count`, plus one that is only prefetched
  std::int64_t count;
  const float* weights;   // [lanes, vectors * width]
  const float* bias;      // [channels], or null
  const float* residual;  // laid out as dst, which it may be; or null
  float* dst;
  std::int64_t pixels;    // at dst_step floats from each other
  std::int64_t vectors;   // of output channels
  std::int64_t channels;  // without the tail; at most vectors * width
  // The lanes of a single vector that are written. The others are not touched in dst.
  std::int64_t first_lane = 0, end_lane = 16;
  std::int64_t dst_step;
  std::array<std::int64_t, 3> dst_offsets;  // of the vectors
  // If blocks are narrower than a vector: how many blocks of dst_step lanes the channels fill,
  // and their distance in dst. The sum then has one part, no residual and no activation. 0:
  // blocks are at least as wide as a vector.
  std::int64_t parts, part_stride;
  // A sum may have several parts of some segments each, which add up in dst. The first part has
  // bias and residual and overwrites dst. The last part has the activation.
  bool first, last;
  // Floats from these weights to the next ones, which are as many. The tiles prefetch them in
  // equal shares. This is call `row` of the `rows` calls with these weights.
  std::int64_t ahead, row, rows;
  bool stream;  // write dst past the cache
  Activation activation;
};

// The sizes for which the kernels of direct convolution are made.
struct DirectSizes {
  std::int64_t width;                  // of a vector
  std::int64_t vectors;                // the best number of vectors of output channels at a time
  std::array<std::int64_t, 3> pixels;  // at a time with 1, 2, 3 vectors
  std::int64_t lanes, tap_lanes;       // of one part of a sum: for 1x1, for larger kernels
  std::int64_t band_bytes;             // of src that are worked on at a time
};

// src positions first, first + stride, ... in `count` slots from `slot` on.
struct DirectRun {
  std::int64_t slot, count, first;
};

// Copies the src under some output pixels to slots, with padding. Along each dim the positions that
// neighbouring output pixels meet at one tap are adjacent, whatever the stride.
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

// Arguments of the kernels that sum products of bytes or of bfloat16.
//
// Four bytes or two bfloat16 of src are a group of 32 bits. It meets 32 bits of weights for each
// output channel. One instruction multiplies and sums them if the CPU has it (VNNI, avx512_bf16).
#pragma once

#include <array>
#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// 32-bit groups of a pixel's src with consecutive weights.
struct DotSegment {
  std::int64_t offset, groups;  // in bytes from the pixel
};

// How the sums of one vector of output channels end: sum * scale + shift, bounded by least and
// most. Sums of integers start from `start`, which subtracts the zero point exactly. All fields are
// 0 in the tail.
struct DotChannels {
  static constexpr std::int64_t kMostLanes = 16;
  alignas(64) std::array<std::int32_t, kMostLanes> start;
  alignas(64) std::array<float, kMostLanes> scale, shift, least, most;
  // Whether every scaled and shifted sum fits in 30 bits. Then it can be bounded as a byte, for
  // four pixels at a time. least_bytes and most_bytes are the bytes nearest to least and most.
  bool is_small;
  alignas(64) std::array<std::uint8_t, 4 * kMostLanes> least_bytes, most_bytes;
};

// A general end, for epilogues that are more than bounds: values are finished as float32 and then
// converted.
struct DotEnd {
  Epilogue epilogue;
  float residual_scale, residual_zero;  // residual = scale * (byte - zero)
  float inverse_scale, zero;            // byte = value * inverse_scale + zero
};

// The convolution of some pixels for at most 4 vectors of output channels.
struct DotTiles {
  const std::uint8_t* src;
  std::int64_t src_step;  // bytes from pixel to pixel
  // The bytes from row to row of src if the pixels are two short rows that form one tile; else 0.
  std::int64_t src_row;
  const DotSegment* segments;  // `count`
  std::int64_t count;
  const std::uint8_t* weights;  // [groups of all segments, vectors, lanes], each of 32 bits
  std::int64_t pixels, vectors;
  // How many rows run like this, and the bytes from row to row.
  std::int64_t rows, rows_src, rows_residual, rows_dst;
  // If each lane sees its own group of channels: the first 32-bit group of a pixel that each lane
  // sees. A segment's `groups` follow from there. Else null.
  const std::int32_t* lanes;
  const DotChannels* channels;  // of each vector
  // Laid out as dst, or null. If `end` is null, residual_scale * residual is added before the
  // bounds are applied.
  const void* residual;
  float residual_scale;
  const DotEnd* end;  // null: sums end as `channels` say
  void* dst;          // bytes or bfloat16 as src, or float32 if is_float32, which needs an `end`
  std::int64_t dst_step;                    // elements from pixel to pixel
  std::array<std::int64_t, 4> dst_offsets;  // of the vectors
  bool is_float32;
};

// A depthwise convolution of one block of channels, all of whose windows lie in src.
struct DotDepthwise {
  const std::uint8_t* src;  // the first tap of the first output; rows of pixels or pairs of a block
  std::int64_t src_row;     // bytes from row to row
  std::array<std::int64_t, 2> kernel, stride;  // h, w
  // [kernel h, quads of kernel w, lanes] of four signed bytes, or pairs of two words. Beyond the
  // kernel they are 0, but src is read there too.
  const std::uint8_t* weights;
  const DotChannels* channels;
  const DotEnd* end;                    // null: sums end as `channels` say
  void* dst;                            // as in DotTiles
  std::int64_t rows, columns, dst_row;  // elements from row to row
  bool is_float32;
};

// A row of pixels of a block, each with the next one as two words in each lane.
struct DotPairs {
  const std::uint8_t* src;                    // null: the row lies in the padding
  std::uint8_t* dst;                          // [columns, lanes] of 32 bits
  std::int64_t columns, before, src_columns;  // in all; before the first pixel of src; in src
  std::uint8_t zero;                          // what the others are
};

// The sizes for which the kernels are made: pixels at a time with 1, 2 and 4 vectors of `width`
// channels.
struct DotSizes {
  std::int64_t width;
  std::array<std::int64_t, 5> pixels;  // by vectors; 0: not supported
};

}  // namespace torch_blocked::kernels

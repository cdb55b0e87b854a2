// Arguments of the kernels that sum short products: of bytes, or of bfloat16.
//
// Four bytes of src, or two bfloat16, are 32 bits, which meet 32 bits of weights for each output
// channel: one instruction multiplies and sums them where the CPU has it (VNNI, avx512_bf16).
#pragma once

#include <array>
#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

// 32-bit groups of a pixel's src whose weights follow each other.
struct DotSegment {
  std::int64_t offset, groups;  // in bytes from the pixel
};

// What becomes of the sums of one vector of output channels: least <= sum * scale + shift <= most.
// Sums of integers begin with `start`, so that they are exact for numbers less their zero point.
// All is 0 for channels that are tail.
struct DotChannels {
  static constexpr std::int64_t kMostLanes = 16;
  alignas(64) std::array<std::int32_t, kMostLanes> start;
  alignas(64) std::array<float, kMostLanes> scale, shift, least, most;
  // Whether no sum, scaled and shifted, is beyond 30 bits, so that it can be bounded as a byte: by
  // these, the nearest to least and most, of four pixels.
  bool is_small;
  alignas(64) std::array<std::uint8_t, 4 * kMostLanes> least_bytes, most_bytes;
};

// A general end, for all but bounds: values are finished as float32, and bytes made of them then.
struct DotEnd {
  Epilogue epilogue;
  float residual_scale, residual_zero;  // residual = scale * (byte - zero)
  float inverse_scale, zero;            // byte = value * inverse_scale + zero
};

// The convolution of some pixels for at most 4 vectors of output channels.
struct DotTiles {
  const std::uint8_t* src;
  std::int64_t src_step;  // bytes from pixel to pixel
  // Where the pixels are two short rows, one tile of them: the bytes from row to row of src; else
  // 0.
  std::int64_t src_row;
  const DotSegment* segments;  // `count`
  std::int64_t count;
  const std::uint8_t* weights;  // [groups of all segments, vectors, lanes], each of 32 bits
  std::int64_t pixels, vectors;
  // How often all this repeats, for as many rows; and the bytes from one to the next.
  std::int64_t rows, rows_src, rows_residual, rows_dst;
  // Where the lanes of one vector see groups of channels of their own, which of the 32-bit groups
  // of a pixel each sees first: a segment's `groups` follow each other from there. Else null.
  const std::int32_t* lanes;
  const DotChannels* channels;  // of each vector
  // Laid out as dst; or null. Where `end` is null, residual_scale * residual is added before the
  // bounds hold.
  const void* residual;
  float residual_scale;
  const DotEnd* end;      // null: the sums end as `channels` say
  void* dst;              // bytes or bfloat16, as src; float32 if is_float32, which has an end
  std::int64_t dst_step;  // elements from pixel to pixel
  std::array<std::int64_t, 4> dst_offsets;  // of the vectors
  bool is_float32;
};

// A depthwise convolution of one block of channels: all windows lie in src.
struct DotDepthwise {
  const std::uint8_t* src;  // the first tap of the first output; rows of pixels of a block each
  std::int64_t src_row;     // bytes from row to row
  std::array<std::int64_t, 2> kernel, stride;  // h, w
  // [kernel h, quads of kernel w, lanes] of four signed bytes, or pairs of two words: zeros beyond
  // the kernel, under which src is read, too.
  const std::uint8_t* weights;
  const DotChannels* channels;
  const DotEnd* end;                    // null: the sums end as `channels` say
  void* dst;                            // as of tiles
  std::int64_t rows, columns, dst_row;  // elements from row to row
  bool is_float32;
};

// What the kernels are made for: pixels at a time with 1, 2 and 4 vectors of `width` channels.
struct DotSizes {
  std::int64_t width;
  std::array<std::int64_t, 5> pixels;  // by vectors; 0: not so many
};

}  // namespace torch_blocked::kernels

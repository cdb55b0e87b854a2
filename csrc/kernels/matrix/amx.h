// Arguments of the kernels that multiply float32 in tiles of bfloat16 (AMX).
//
// A float32 is the sum of three bfloat16: its upper 8 bits, the next 8 and the last. Two such sums
// have nine products, of which six are computed. The other three are at most 2^-22 of the whole,
// 2^-26 as a rule, and above 0 as often as below. A tile instruction makes 16 x 16 sums of 32
// products in 16 cycles, so six of them take 0.375 of the time of FMAs. Source: Henry, Tang and
// Heinecke, Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
// Computations, 2019.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/vector/epilogue.h"

namespace torch_blocked::kernels {

struct Amx {
  static constexpr std::int64_t kLanes = 32;   // a step: src lanes that one instruction multiplies
  static constexpr std::int64_t kPixels = 16;  // rows of a tile
  static constexpr std::int64_t kWidth = 16;   // channels of a vector
  static constexpr std::int64_t kParts = 3;    // bfloat16 of a float32
  // Segments of a sum that are multiplied at a time. Their weights take 144 KB for a pair of
  // vectors.
  static constexpr std::int64_t kPartSegments = 24;
  // Room for the parts of the weights that are multiplied and of the next ones.
  static constexpr std::int64_t kWeightPartsBytes =
      2 * kPartSegments * 2 * kParts * kLanes * kWidth * 2;
  // The bytes of a step of one pixel, and of a step of one vector of weights.
  static constexpr std::int64_t kSlotBytes = kParts * kLanes * 2;
  static constexpr std::int64_t kWeightBytes = kParts * kLanes * kWidth * 2;
};

// Splits `count` pixels of float32 to slots [steps, | step_bytes |, pixels, parts, kLanes], with
// zeros beyond the channels. The two vectors of a step are interleaved: 0, 16, 1, 17, ...
struct AmxSplit {
  const float* src;
  std::int64_t pixel, vector;  // floats between the pixels that are taken, and between vectors
  std::int64_t channels;
  std::uint8_t* slots;
  std::int64_t step_bytes;  // from a step to the next
  std::int64_t count;
};

// Some pixels of dst for all vectors of some output channels:
//   dst[pixel, oc] = epilogue(bias[oc] + sum over segments of slots[pixel + offset] * weights)
struct AmxTiles {
  const std::uint8_t* slots;     // of the first pixel
  std::int64_t slot_step;        // bytes from pixel to pixel
  std::int64_t slot_row;         // from row to row
  const std::int64_t* segments;  // `count` offsets of a step at a tap, in bytes
  std::int64_t count;
  // [pairs of vectors, and one that is left][segments, kLanes, vectors, kWidth]
  const float* weights;
  std::int64_t rows, pixels;  // rows of dst, and pixels of each
  std::int64_t channels;      // `bias` and `dst` begin with the first one
  const float* bias;          // or null
  const float* residual;      // laid out as dst, which it may be; or null
  float* dst;
  std::int64_t dst_pixel, dst_row, dst_vector;  // floats
  // Whether dst has lanes beyond the channels, which become 0.
  bool has_tail;
  float* sums;  // scratchpad [tiles, 2, kPixels, kWidth] if there are more than kPartSegments
  std::uint8_t* weight_parts;  // scratchpad of kWeightPartsBytes
  Epilogue epilogue;
};

}  // namespace torch_blocked::kernels

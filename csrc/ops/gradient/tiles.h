// Cuts the gradient of a weight into tiles that stay in L2, and reorders it from the format in
// which our kernels sum it to the dense one.
#pragma once

#include "ops/convolution_problem.h"

namespace torch_blocked {

// A weight's gradient as our kernels sum it: [OC vectors, IC, taps, width], or [OC vectors, taps,
// IC, width] for channels-last weights.
struct PackedGradient {
  at::Tensor sums;
  std::int64_t width;  // floats of a vector
  std::int64_t ic_stride, tap_stride, vector_stride;
};
PackedGradient empty_packed_gradient(const ConvolutionProblem& problem,
                                     const at::Tensor& diff_weight, std::int64_t width);

// Some input channels by some vectors of output channels of a weight.
struct GradientTile {
  std::int64_t ic, ic_count, vector, vectors;
};
struct GradientTileSize {
  std::int64_t channels, vectors;
};
// A weight in tiles of at most that size.
struct GradientTiles {
  std::int64_t ic, vectors, channels, across, down;

  GradientTiles(std::int64_t ic, std::int64_t vectors, GradientTileSize most);
  std::int64_t count() const { return across * down; }
  GradientTile operator[](std::int64_t i) const;
};
// Writes a tile to the dense gradient, contiguous or channels-last.
void unpack_gradient(const PackedGradient& packed, const GradientTile& tile,
                     const at::Tensor& diff_weight);

}  // namespace torch_blocked

// The gradient of a convolution's weight is an ordered list of implementations, as the forward is.
#pragma once

#include "ops/convolution.h"

namespace torch_blocked {

// Takes src and diff_dst of a convolution (not a transposed one) and writes diff_weight, dense.
using RunWeightGradient =
    std::function<void(const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight)>;

// convolution_backward_depthwise.cpp: one channel a group. oneDNN's blocked kernel stops at 3x3;
// its nhwc one takes 5 times as long as ours for 5x5.
std::optional<RunWeightGradient> plan_depthwise_gradient(const ConvolutionProblem& problem,
                                                         const at::Tensor& diff_weight);

// convolution_backward_direct.cpp: one group, float32, by our own kernel: the same bits for any
// number of threads.
std::optional<RunWeightGradient> plan_direct_gradient(const ConvolutionProblem& problem,
                                                      const at::Tensor& diff_weight);

// convolution_backward_winograd.cpp: 3x3 at stride 1 by tiles, where it wins; likewise.
std::optional<RunWeightGradient> plan_winograd_gradient(const ConvolutionProblem& problem,
                                                        const at::Tensor& diff_weight);

// The sums of a weight's gradient as our kernels leave them: [OC vectors, IC, taps, width], or
// [OC vectors, taps, IC, width] for channels-last weights.
struct PackedGradient {
  at::Tensor sums;
  std::int64_t width;  // floats of a vector
  std::int64_t ic_stride, tap_stride, vector_stride;
};
PackedGradient empty_packed_gradient(const ConvolutionProblem& problem,
                                     const at::Tensor& diff_weight, std::int64_t width);

// Channels of src and vectors of diff_dst channels.
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

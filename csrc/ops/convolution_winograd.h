// A convolution in tiles, which Winograd's kernels take, forward and backward.
#pragma once

#include <array>

#include "kernels/winograd.h"
#include "ops/convolution.h"

namespace torch_blocked {

// Whether the kernels can run a problem: 3x3, 1x3x3 or 3x3x3 at stride 1, float32, blocked,
// AVX2 at least, and not turned off.
bool winograd_possible(const ConvolutionProblem& problem);
// The problem as the kernels take it.
kernels::WinogradShape winograd_shape(const ConvolutionProblem& problem);
// How many tiles of `tile` outputs, along d, h and w, the problem has.
std::int64_t winograd_tiles(const ConvolutionProblem& problem,
                            const std::array<std::int64_t, 3>& tile);

}  // namespace torch_blocked

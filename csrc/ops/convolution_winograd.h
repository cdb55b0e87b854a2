// A convolution in tiles, which Winograd's kernels take, forward and backward.
#pragma once

#include <array>

#include "kernels/winograd.h"
#include "ops/convolution.h"

namespace torch_blocked {

// Whether the kernels can run a problem of one group: 3x3, 1x3x3 or 3x3x3 at stride 1, float32,
// blocked, AVX2 at least, and not turned off.
bool winograd_possible(const ConvolutionProblem& problem);
// The same whatever the dtype is: why they cannot.
const char* refuses_winograd_sizes(const ConvolutionProblem& problem);
// The problem as the kernels take it.
kernels::WinogradShape winograd_shape(const ConvolutionProblem& problem);
// How many tiles of `tile` outputs, along d, h and w, the problem has.
std::int64_t winograd_tiles(const ConvolutionProblem& problem,
                            const std::array<std::int64_t, 3>& tile);

// weight [OC, IC / groups, *kernel], transposed [IC, OC / groups, *kernel], any strides, float32,
// bfloat16 or int8
//   -> U, one after the other where there are groups
at::Tensor pack_winograd(const kernels::Winograd& kernel, const ConvolutionProblem& problem,
                         const at::Tensor& weight);
// How `kernel` runs a problem that it can run; any square kernel of its size.
ConvolutionPlan plan_winograd(const ConvolutionProblem& problem, const kernels::Winograd& kernel);
// All `tiles` of all groups, in loops of share_units.
void run_winograd(const kernels::Winograd& kernel, const kernels::WinogradShape& shape,
                  std::int64_t tiles, const void* src, const void* weights,
                  const kernels::WinogradDst& dst);

}  // namespace torch_blocked

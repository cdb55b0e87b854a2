// A convolution in tiles, which Winograd's kernels take, forward and backward.
#pragma once

#include <array>

#include "kernels/winograd/winograd.h"
#include "ops/convolution/convolution.h"

namespace torch_blocked {

// Why Winograd's kernels of 3x3 at stride 1 and dilation 1 do not take a problem of any dtype: it
// is not of one group and 3x3, 1x3x3 or 3x3x3, not blocked, or this CPU has no AVX2, or they are
// turned off.
const char* refuses_winograd_sizes(const ConvolutionProblem& problem);
// Why Winograd's kernels of several taps do not take a problem; F(2x2); those of bfloat16.
const char* refuses_winograd(const ConvolutionProblem& problem);
const char* refuses_winograd2(const ConvolutionProblem& problem);
const char* refuses_winograd_bfloat16(const ConvolutionProblem& problem);
// Of a transform's kernel, along each dim of several; those of F(3, 4) have one more.
inline constexpr std::array<std::int64_t, 3> kWinogradTaps{3, 3, 3};
// The problem as kernels of so many taps take it.
kernels::WinogradShape winograd_shape(const ConvolutionProblem& problem,
                                      const std::array<std::int64_t, 3>& taps = kWinogradTaps);
// How many tiles of `tile` outputs, along d, h and w, the problem has.
std::int64_t winograd_tiles(const ConvolutionProblem& problem,
                            const std::array<std::int64_t, 3>& tile);

// ---- what the sources of Winograd share

// Sizes along d, h and w.
using WinogradSizes = std::array<std::int64_t, 3>;

// The dims d, h, w in the order in which the kernels count them: those of one tap first.
struct WinogradOrder {
  WinogradSizes dims{0, 1, 2};
  std::size_t wide;  // dims of several taps

  explicit WinogradOrder(const ConvolutionProblem& problem);
  WinogradSizes operator()(const WinogradSizes& sizes) const;
};

// Kernels of at most `taps` taps that a kernel is, along each dim in their order.
WinogradSizes winograd_parts(const ConvolutionProblem& problem, const WinogradSizes& taps);
// Whether the last two dims of its tiles have stride 2; a third has tiles of one output then.
bool is_for_stride2(const ConvolutionProblem& problem);

// The problem of one bundle of groups.
ConvolutionProblem winograd_bundle(const ConvolutionProblem& problem);

// Output channels for which U has room: whole blocks, whole vectors.
std::int64_t winograd_padded_outputs(const kernels::Winograd& kernel, std::int64_t oc,
                                     std::int64_t block);
// Floats of U.
std::int64_t winograd_u_size(const kernels::Winograd& kernel, const kernels::WinogradShape& shape);
// Whether the kernels read a weight as it is: one of as many taps as theirs.
bool has_own_taps(const kernels::Winograd& kernel, const ConvolutionProblem& problem);
// Such a weight as they read it.
kernels::WinogradWeights winograd_weights(const ConvolutionProblem& problem,
                                          const at::Tensor& weight);

// weight [OC, IC / groups, *kernel], transposed [IC, OC / groups, *kernel], any strides, float32,
// bfloat16 or int8
//   -> U, one after the other where there are groups
at::Tensor pack_winograd(const kernels::Winograd& kernel, const ConvolutionProblem& problem,
                         const at::Tensor& weight);
// How many these are.
std::int64_t packed_winograd_floats(const kernels::Winograd& kernel,
                                    const ConvolutionProblem& problem);
// How long `kernel`, one with the largest tiles, should take for such a problem.
double winograd_microseconds(const ConvolutionProblem& problem, const kernels::Winograd& kernel);
// How `kernel` runs a problem that it can run.
LayerPlan plan_winograd(const ConvolutionProblem& problem, const kernels::Winograd& kernel);
// All `tiles` of all groups, in loops of share_units.
void run_winograd(const kernels::Winograd& kernel, const kernels::WinogradShape& shape,
                  std::int64_t tiles, const void* src, const void* weights,
                  const kernels::WinogradDst& dst, const OnStored* on_stored = nullptr);

}  // namespace torch_blocked

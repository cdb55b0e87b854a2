// How a convolution and its weight gradient are cut into tiles for Winograd's kernels.
#pragma once

#include <array>

#include "kernels/winograd/winograd.h"
#include "ops/convolution/convolution.h"

namespace torch_blocked {

// Why Winograd's kernels of 3x3 at stride 1 and dilation 1 do not take a problem of any dtype. They
// need one group, a kernel of 3x3, 1x3x3 or 3x3x3, blocked formats and AVX2, and may be turned off.
const char* refuses_winograd_sizes(const ConvolutionProblem& problem);
// Why a problem is not taken by Winograd's float32 kernels, by F(2x2), and by those of bfloat16.
const char* refuses_winograd(const ConvolutionProblem& problem);
const char* refuses_winograd2(const ConvolutionProblem& problem);
const char* refuses_winograd_bfloat16(const ConvolutionProblem& problem);
// The taps of a transform along each dim that has several. F(3, 4) has one more.
inline constexpr std::array<std::int64_t, 3> kWinogradTaps{3, 3, 3};
// The problem as kernels with `taps` taps take it.
kernels::WinogradShape winograd_shape(const ConvolutionProblem& problem,
                                      const std::array<std::int64_t, 3>& taps = kWinogradTaps);
// How many tiles of `tile` outputs along d, h and w the problem has.
std::int64_t winograd_tiles(const ConvolutionProblem& problem,
                            const std::array<std::int64_t, 3>& tile);

// ---- what the sources of Winograd share

// Sizes along d, h and w.
using WinogradSizes = std::array<std::int64_t, 3>;

// The dims d, h, w in the kernels' order: dims of one tap come first.
struct WinogradOrder {
  WinogradSizes dims{0, 1, 2};
  std::size_t wide;  // dims of several taps

  explicit WinogradOrder(const ConvolutionProblem& problem);
  WinogradSizes operator()(const WinogradSizes& sizes) const;
};

// The number of kernels of at most `taps` taps into which a kernel splits, along each dim in the
// kernels' order.
WinogradSizes winograd_parts(const ConvolutionProblem& problem, const WinogradSizes& taps);
// Whether the last two dims of its tiles have stride 2. A third dim then has tiles of one output.
bool is_for_stride2(const ConvolutionProblem& problem);

// The problem of one bundle of groups.
ConvolutionProblem winograd_bundle(const ConvolutionProblem& problem);

// The output channels for which U has room: whole blocks and whole vectors.
std::int64_t winograd_padded_outputs(const kernels::Winograd& kernel, std::int64_t oc,
                                     std::int64_t block);
// The floats of U.
std::int64_t winograd_u_size(const kernels::Winograd& kernel, const kernels::WinogradShape& shape);
// Whether the kernels read a weight as it is, because it has as many taps as they have.
bool has_own_taps(const kernels::Winograd& kernel, const ConvolutionProblem& problem);
// Such a weight as they read it.
kernels::WinogradWeights winograd_weights(const ConvolutionProblem& problem,
                                          const at::Tensor& weight);

// weight [OC, IC / groups, *kernel], transposed [IC, OC / groups, *kernel], any strides, float32,
// bfloat16 or int8
//   -> U, one after the other where there are groups
at::Tensor pack_winograd(const kernels::Winograd& kernel, const ConvolutionProblem& problem,
                         const at::Tensor& weight);
// The floats of that.
std::int64_t packed_winograd_floats(const kernels::Winograd& kernel,
                                    const ConvolutionProblem& problem);
// Estimated microseconds of `kernel`, one with the largest tiles.
double winograd_microseconds(const ConvolutionProblem& problem, const kernels::Winograd& kernel);
// The plan by `kernel` of a problem that it takes.
LayerPlan plan_winograd(const ConvolutionProblem& problem, const kernels::Winograd& kernel);
// Runs all `tiles` of all groups, in loops of share_units.
void run_winograd(const kernels::Winograd& kernel, const kernels::WinogradShape& shape,
                  std::int64_t tiles, const void* src, const void* weights,
                  const kernels::WinogradDst& dst, const OnStored* on_stored = nullptr);

}  // namespace torch_blocked

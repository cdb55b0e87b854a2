// The gradient of a convolution's weight is a list of implementations, as the forward is.
#pragma once

#include "ops/convolution/convolution.h"

namespace torch_blocked {

// Takes src and diff_dst of a convolution (not a transposed one) and writes diff_weight, dense.
using RunWeightGradient =
    std::function<void(const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight)>;

struct WeightGradientProblem {
  const ConvolutionProblem& convolution;  // not a transposed one
  const at::Tensor& diff_weight;          // dense; any strides
};

// convolution_backward_depthwise.cpp: one channel a group. oneDNN's blocked kernel stops at 3x3;
// its nhwc one takes 5 times as long as ours for 5x5.
std::optional<RunWeightGradient> plan_depthwise_gradient(const WeightGradientProblem& problem);

// convolution_backward_direct.cpp: one group, float32, by our own kernel: the same bits for any
// number of threads.
std::optional<RunWeightGradient> plan_direct_gradient(const WeightGradientProblem& problem);

// convolution_backward_winograd.cpp: 3x3 at stride 1 by tiles; likewise.
std::optional<RunWeightGradient> plan_winograd_gradient(const WeightGradientProblem& problem);
double estimate_winograd_gradient(const WeightGradientProblem& problem);

// convolution_backward_onednn.cpp: on blocked activations; on a plain src, where it has few
// channels; and in nhwc.
std::optional<RunWeightGradient> plan_onednn_gradient_blocked(const WeightGradientProblem& problem);
std::optional<RunWeightGradient> plan_onednn_gradient_plain_src(
    const WeightGradientProblem& problem);
std::optional<RunWeightGradient> plan_onednn_gradient_channels_last(
    const WeightGradientProblem& problem);

}  // namespace torch_blocked

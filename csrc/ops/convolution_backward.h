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

}  // namespace torch_blocked

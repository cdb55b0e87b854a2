// The list of implementations of a convolution's weight gradient.
#pragma once

#include "ops/convolution_problem.h"
#include "ops/implementations.h"

namespace torch_blocked {

// Takes src and diff_dst of a convolution (not a transposed one) and writes diff_weight, dense.
using RunWeightGradient =
    std::function<void(const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight)>;

struct WeightGradientProblem {
  const ConvolutionProblem& convolution;  // not a transposed one
  const at::Tensor& diff_weight;          // dense; any strides
};

using WeightGradient = Implementation<WeightGradientProblem, RunWeightGradient>;

// The rows of the list; each is defined in the file of its kernel's name.
namespace weight_gradients {
#define IMPLEMENTATION(name) extern const WeightGradient name;
#include "ops/gradient/list.inc"
#undef IMPLEMENTATION
}  // namespace weight_gradients

// The estimate of every implementation that sums all products. Among these the first in the list
// runs.
double direct_gradient_microseconds(const WeightGradientProblem& problem);

}  // namespace torch_blocked

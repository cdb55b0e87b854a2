// Translates a convolution's weights into oneDNN's terms, for forward and backward.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include "ops/convolution/convolution.h"

namespace torch_blocked {

// Weights as oneDNN sees them: [OC, IC, *kernel], or [G, OC/G, IC/G, *kernel] with groups.
Dims onednn_weight_dims(const ConvolutionProblem& problem);
// The descriptor of these weights while they are dense, with the strides of `weight`.
dnnl::memory::desc dense_weights_md(const ConvolutionProblem& problem, const at::Tensor& weight);

}  // namespace torch_blocked

// A convolution is an ordered list of implementations; the first that takes a problem runs it.
#pragma once

#include <functional>
#include <optional>

#include "ops/blocked.h"

namespace torch_blocked {

// Everything that decides how a convolution runs; logical sizes, one entry per spatial dim.
struct ConvolutionProblem {
  Dims src_dims, dst_dims;  // [N, IC, *spatial], [N, OC, *spatial]
  Dims weight_dims;         // ATen's: [OC, IC/groups, *kernel], transposed [IC, OC/groups, *kernel]
  Dims stride, padding, dilation, output_padding;
  std::int64_t groups, block;
  bool transposed, has_bias;
  at::ScalarType dtype;

  std::size_t spatial() const { return stride.size(); }
};

// A problem made ready to run: it owns primitives and sizes, and takes the tensors. Returns the
// physical dst.
using RunConvolution = std::function<at::Tensor(const Blocked& src, const at::Tensor& weight,
                                                const at::Tensor& bias)>;

struct ConvolutionImplementation {
  const char* name;
  // Nothing if the problem is not for it.
  std::optional<RunConvolution> (*plan)(const ConvolutionProblem& problem);
};

// convolution_onednn.cpp: primitives on blocked activations; the same in nhwc between two reorders.
std::optional<RunConvolution> plan_onednn_blocked(const ConvolutionProblem& problem);
std::optional<RunConvolution> plan_onednn_channels_last(const ConvolutionProblem& problem);

// convolution_direct.cpp: our kernel for what oneDNN's blocked ones refuse.
std::optional<RunConvolution> plan_direct(const ConvolutionProblem& problem);

}  // namespace torch_blocked

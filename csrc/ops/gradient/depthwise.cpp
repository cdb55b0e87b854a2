// The gradient of a depthwise weight in float32: every tap of a channel is the sum of diff_dst
// times the input that the tap sees. A thread sums a channel block of an image. Images are added in
// float64, in order, so the result does not depend on the number of threads.
#include <ATen/ops/zeros.h>

#include "kernels/grouped/depthwise_gradient.h"
#include "kernels/kernels.h"
#include "ops/gradient/convolution_backward.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

kernels::DepthwiseGradient gradient_of(const Problem& p) {
  const SpatialSizes sizes = spatial_sizes(p);
  return {.src = nullptr,
          .diff_dst = nullptr,
          .diff_weights = nullptr,
          .block = p.src_format.block,
          .in = sizes.in,
          .out = sizes.out,
          .kernel = sizes.kernel,
          .stride = sizes.stride,
          .padding = sizes.padding,
          .dilation = sizes.dilation};
}

const char* refuses_depthwise(const WeightGradientProblem& problem) {
  const Problem& p = problem.convolution;
  if (p.dtype != at::kFloat) return "computes float32 only";
  const bool alone = p.groups == p.src_dims[1] && p.groups == p.dst_dims[1];
  return alone ? nullptr : "is for one channel a group";
}

std::optional<RunWeightGradient> plan_depthwise(const WeightGradientProblem& problem) {
  const Problem& p = problem.convolution;
  const kernels::DepthwiseGradient shape = gradient_of(p);
  return [shape](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    const auto kernel = kernels::kernels_for(shape.block).depthwise_gradient;
    const std::int64_t images = src.batch(), blocks = src.blocks();
    const std::int64_t taps = shape.kernel[0] * shape.kernel[1] * shape.kernel[2];
    const std::int64_t src_step = src.pixels() * shape.block;
    const std::int64_t diff_step = diff_dst.pixels() * shape.block;
    const at::Tensor sums = at::zeros({images, blocks, taps, shape.block}, src.physical.options());
    const auto *in = src.physical.const_data_ptr<float>(),
               *diff = diff_dst.physical.const_data_ptr<float>();
    auto* out = sums.mutable_data_ptr<float>();
    parallel_units(images * blocks, diff_step * taps, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t unit = begin; unit < end; ++unit) {
        kernels::DepthwiseGradient gradient = shape;
        gradient.src = in + unit * src_step;
        gradient.diff_dst = diff + unit * diff_step;
        gradient.diff_weights = out + unit * taps * shape.block;
        kernel(gradient);
      }
    });
    // [blocks, taps, block] -> [C, 1, *kernel]
    const at::Tensor total = sums.sum(0, /*keepdim=*/false, at::kDouble);
    diff_weight.copy_(
        total.transpose(1, 2).flatten(0, 1).narrow(0, 0, src.channels).view_as(diff_weight));
  };
}

}  // namespace

constinit const WeightGradient weight_gradients::depthwise = {
    .name = "depthwise",
    .refuses = refuses_depthwise,
    .plan = plan_depthwise,
    .estimate = direct_gradient_microseconds,
};

}  // namespace torch_blocked

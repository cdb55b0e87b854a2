// Runs a convolution whose kernel covers the image as a linear layer of few rows. An image is a
// row, and its values are the inputs in their order in memory. Each weight is used once for an
// image, so the time is that of reading them. The two 1x1 on one pixel at the end of MobileNetV3
// took 8 % of its time by oneDNN.
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>

#include "ops/convolution/convolution.h"
#include "ops/linear/linear.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

std::int64_t lanes_of(const Format& format, std::int64_t channels) {
  return format == kPlain ? 1 : format.lanes(channels);
}

// The number of elements that one image has in memory, tail included.
std::int64_t image_size(const Format& format, const Dims& dims) {
  const Dims physical = format.physical_shape(dims);
  return c10::multiply_integers(at::IntArrayRef(physical).slice(1));
}

LinearProblem linear_of(const Problem& p) {
  return {.rows = p.src_dims[0],
          .inputs = image_size(p.src_format, p.src_dims),
          .outputs = p.dst_dims[1],
          .has_bias = p.has_bias,
          .epilogue = p.epilogue,
          .dtype = p.dtype};
}

// [OC, IC, *kernel] -> [OC, vectors of IC, *kernel, lanes], as src lies in memory, zeros in the
// tail
at::Tensor weight_as_src(const at::Tensor& weight, std::int64_t lanes) {
  const std::int64_t blocks = ceil_div(weight.size(1), lanes),
                     tail = blocks * lanes - weight.size(1);
  at::Tensor padded = weight.flatten(2);
  if (tail > 0) padded = at::constant_pad_nd(padded, {0, 0, 0, tail});
  return padded.unflatten(1, {blocks, lanes}).transpose(2, 3).flatten(1).contiguous();
}

const char* refuses_few_rows(const Problem& p) {
  if (p.groups != 1) return "takes one group only";
  if (p.transposed) return "is for convolutions that are not transposed";
  for (std::size_t i = 0; i < p.spatial(); ++i) {
    const Window window = p.window(i);
    // The padding of "same" may lie entirely at the end, where dst has one more pixel.
    const bool whole = window.kernel == p.src_dims[2 + i] && window.padding == 0 &&
                       p.dst_dims[2 + i] == 1 && (window.kernel == 1 || window.dilation == 1);
    if (!whole) return "is for kernels that cover the image";
  }
  // With several images, tails would lie between the rows of dst.
  const bool has_tail = image_size(p.dst_format, p.dst_dims) != p.dst_dims[1];
  if (has_tail && p.src_dims[0] > 1) return "takes one image only where dst has a tail";
  const kernels::Epilogue& epilogue = p.epilogue;
  if (epilogue.residual && epilogue.before.kind != Activation::Kind::kNone) {
    return "has no activation before a sum";
  }
  return p.src_dims[0] == 0 ? "needs an image" : linears::few_rows.refuses(linear_of(p));
}

double estimate_few_rows(const Problem& p) { return linears::few_rows.estimate(linear_of(p)); }

std::optional<LayerPlan> plan_few_rows(const Problem& p) {
  const std::optional<LayerPlan> linear = linears::few_rows.plan(linear_of(p));
  if (!linear) return std::nullopt;
  const std::int64_t lanes = lanes_of(p.src_format, p.src_dims[1]), outputs = p.dst_dims[1],
                     tail = p.src_dims[0] * image_size(p.dst_format, p.dst_dims) -
                            p.src_dims[0] * outputs;
  Key key("few_rows");
  return LayerPlan{
      .weights_format =
          std::move(key.add(lanes).add(p.weight_dims)).text() + linear->weights_format,
      .pack = [pack = linear->pack,
               lanes](const at::Tensor& weight) { return pack(weight_as_src(weight, lanes)); },
      .run =
          [run = linear->run, outputs, tail](const LayerBuffers& b) {
            run({b.src, b.weights, b.bias, b.residual, b.dst});
            if (tail == 0) return;
            parallel_units(1, 1, [&](std::int64_t, std::int64_t) {
              std::fill_n(static_cast<float*>(b.dst) + outputs, tail, 0.f);
            });
          },
      .loops_only = linear->loops_only};
}

}  // namespace

constinit const ConvolutionImplementation convolutions::few_rows = {
    .name = "few_rows",
    .refuses = refuses_few_rows,
    .plan = plan_few_rows,
    .estimate = estimate_few_rows,
    .traits = {.any_format = true},
};

}  // namespace torch_blocked

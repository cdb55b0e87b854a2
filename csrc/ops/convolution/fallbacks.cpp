// Runs convolutions that no kernel takes: bfloat16 and float16 in float32, everything else by ATen.
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "format/errors.h"
#include "ops/convolution/convolution.h"
#include "ops/moving/reorder.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// The zeros at the far ends beyond the symmetric padding, last dim first, as ATen pads. Empty if
// there are none.
Dims padding_beyond(const Problem& p) {
  Dims more(2 * p.spatial(), 0);
  for (std::size_t i = 0; i < p.spatial() && !p.transposed; ++i) {
    const std::int64_t end = p.window(i).padding_end(p.src_dims[2 + i], p.dst_dims[2 + i]);
    more[2 * (p.spatial() - 1 - i) + 1] = std::max<std::int64_t>(0, end - p.padding[i]);
  }
  const bool any = std::ranges::any_of(more, [](std::int64_t size) { return size > 0; });
  return any ? more : Dims();
}

const char* refuses_aten(const Problem& p) {
  return p.epilogue.empty() ? nullptr : "fuses nothing";
}

std::optional<LayerPlan> plan_aten(const Problem& p) {
  const auto run = [p](const LayerBuffers& buffers) {
    trace::record({trace::Kind::kFallback, "convolution",
                   text("no kernel for weight ", p.weight_dims, " on ", p.src_dims)});
    const at::TensorOptions options = at::TensorOptions().dtype(p.dtype);
    at::Tensor src = empty_dense(p.src_dims, false, options);
    reorder("convolution", p.src_dims, reorder_side(buffers.src, p.src_dims, p.src_format, p.dtype),
            {src});
    if (const Dims more = padding_beyond(p); !more.empty()) src = at::constant_pad_nd(src, more);
    const auto from = [&](const void* data, const Dims& dims) {
      return at::from_blob(const_cast<void*>(data), dims, options);
    };
    at::Tensor dst = at::convolution(
        src, from(buffers.weights, p.weight_dims),
        buffers.bias ? std::optional(from(buffers.bias, {p.dst_dims[1]})) : std::nullopt, p.stride,
        p.padding, p.dilation, p.transposed, p.output_padding, p.groups);
    // p may be the gradient of a transposed convolution with an output padding of at least the
    // stride. A convolution of this src then has more pixels than dst.
    for (std::size_t i = 2; i < p.dst_dims.size(); ++i) {
      dst = dst.narrow(static_cast<std::int64_t>(i), 0, p.dst_dims[i]);
    }
    reorder("convolution", p.dst_dims, {dst.contiguous()},
            reorder_side(buffers.dst, p.dst_dims, p.dst_format, p.dtype));
  };
  return LayerPlan{.weights_format = "", .pack = nullptr, .run = run};
}

// Computes bfloat16 and float16 in float32 if the CPU has no kernel for them. Activations are
// converted in each run, weights once, when they are packed.
const char* refuses_in_float32(const Problem& p) {
  const bool narrow = p.dtype == at::kBFloat16 || p.dtype == at::kHalf;
  return narrow ? nullptr : "is for bfloat16 and float16";
}

std::optional<LayerPlan> plan_in_float32(const Problem& p) {
  Problem wide = p;
  wide.dtype = at::kFloat;
  const NamedPlan inner = plan_convolution(wide);
  const auto widened = [type = p.dtype](const void* data, const Dims& dims) {
    return data ? at::from_blob(const_cast<void*>(data), dims, type).to(at::kFloat) : at::Tensor();
  };
  const auto run = [p, plan = inner.plan, widened](const LayerBuffers& buffers) {
    const Dims dst_dims = p.dst_format.physical_shape(p.dst_dims);
    const at::Tensor src = widened(buffers.src, p.src_format.physical_shape(p.src_dims)),
                     bias = widened(buffers.bias, {p.dst_dims[1]}),
                     residual = widened(buffers.residual, dst_dims),
                     dst = empty_pooled(dst_dims, at::kFloat);
    const auto data = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.const_data_ptr() : nullptr;
    };
    plan.run({src.const_data_ptr(), buffers.weights, data(bias), data(residual),
              dst.mutable_data_ptr()});
    at::from_blob(buffers.dst, dst_dims, p.dtype).copy_(dst);
  };
  return LayerPlan{
      .weights_format = "float32 " + inner.plan.weights_format,
      .pack = [plan = inner.plan](
                  const at::Tensor& weight) { return pack_weights(plan, weight.to(at::kFloat)); },
      .run = run};
}

double estimate_in_float32(const Problem& p) {
  return 2 * convolutions::onednn_channels_last.estimate(p);
}

// ATen runs oneDNN's kernels too, so the other implementations win wherever oneDNN has a kernel.
double estimate_aten(const Problem& p) {
  return 10 * convolutions::onednn_channels_last.estimate(p);
}

}  // namespace

constinit const ConvolutionImplementation convolutions::in_float32 = {
    .name = "in_float32",
    .refuses = refuses_in_float32,
    .plan = plan_in_float32,
    .estimate = estimate_in_float32,
};

constinit const ConvolutionImplementation convolutions::aten = {
    .name = "aten",
    .refuses = refuses_aten,
    .plan = plan_aten,
    .estimate = estimate_aten,
    .traits = {.last_resort = true},
};

}  // namespace torch_blocked

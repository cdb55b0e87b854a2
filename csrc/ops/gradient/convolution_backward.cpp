// The gradients of a convolution. Only that of the weight has implementations of its own:
//   input   the gradient of a convolution is a transposed convolution of diff_dst with the same
//           weight, and the reverse: convolution.cpp's implementations serve both
//   weight  the list below; a transposed convolution has the weight gradient of the convolution
//           that it mirrors, with src and diff_dst exchanged
//   bias    the sums of diff_dst
//
// Our kernels keep the chains of additions short: 256 pixels in registers. `winograd` is 2.0 to 2.7
// times as fast as oneDNN on one core. oneDNN's blocked 1x1 is 5 to 15 % faster than `direct` on
// one core, but its bits depend on the number of threads. In a first layer, the columns under a
// kernel row count as channels.
#include "ops/gradient/convolution_backward.h"

#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>

#include "format/errors.h"
#include "ops/convolution/convolution.h"
#include "ops/convolution_time.h"
#include "ops/moving/reorder.h"
#include "ops/normalization/channel_sums.h"
#include "ops/registered.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

constexpr const char* kOp = "convolution_backward";

// The problem with src and dst exchanged. Its forward is the gradient of src.
Problem mirrored(const Problem& p) {
  Problem q = p;
  std::swap(q.src_dims, q.dst_dims);
  std::swap(q.src_format, q.dst_format);
  q.transposed = !p.transposed;
  q.has_bias = false;
  for (std::size_t i = 0; i < p.spatial(); ++i) {
    // The pixels that the stride skipped at the far end, or the output padding that p mirrors.
    const std::int64_t covered = p.window(i).transposed(p.dst_dims[2 + i], 0);
    q.output_padding[i] = p.transposed ? 0 : p.src_dims[2 + i] - covered;
  }
  return q;
}

// Whether p mirrors a transposed convolution with an output padding of at least the stride, which a
// dilation allows. A convolution of that src has more outputs than p.
bool mirrors_wide_padding(const Problem& p) {
  if (p.transposed) return false;
  const Dims padding = mirrored(p).output_padding;
  return !std::ranges::equal(padding, p.stride, std::less<>());
}

std::optional<RunWeightGradient> plan_aten(const WeightGradientProblem& problem) {
  const bool swapped = mirrors_wide_padding(problem.convolution);  // ATen takes the transposed one
  return [p = swapped ? mirrored(problem.convolution) : problem.convolution, swapped](
             const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    trace::record({trace::Kind::kFallback, kOp,
                   text("no kernel for weight ", p.weight_dims, " on ", p.src_dims)});
    const auto gradients = at::convolution_backward(
        reorder_to_dense(kOp, swapped ? src : diff_dst, false),
        reorder_to_dense(kOp, swapped ? diff_dst : src, false), diff_weight, std::nullopt, p.stride,
        p.padding, p.dilation, p.transposed, p.output_padding, p.groups, {false, true, false});
    diff_weight.copy_(std::get<1>(gradients));
  };
}

using WeightGradients = Implementations<WeightGradientProblem, RunWeightGradient>;

const WeightGradients::Named& find_plan(const Problem& p, const at::Tensor& diff_weight,
                                        const WeightGradients::Row* only);

// Takes bfloat16 and float16 if the CPU has no kernel for them.
const char* refuses_in_float32(const WeightGradientProblem& problem) {
  const at::ScalarType dtype = problem.convolution.dtype;
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  return narrow ? nullptr : "is for bfloat16 and float16";
}

std::optional<RunWeightGradient> plan_in_float32(const WeightGradientProblem& problem) {
  return [p = problem.convolution](const Blocked& src, const Blocked& diff_dst,
                                   const at::Tensor& diff_weight) {
    Problem wide = p;
    wide.dtype = at::kFloat;
    const auto widened = [](const Blocked& side) {
      return Blocked{side.physical.to(at::kFloat), side.channels};
    };
    const at::Tensor gradient = at::empty_like(diff_weight, at::kFloat);
    find_plan(wide, gradient, nullptr).plan(widened(src), widened(diff_dst), gradient);
    diff_weight.copy_(gradient);
  };
}

const WeightGradients kGradientImplementations("weight_gradient", {
#define IMPLEMENTATION(name) weight_gradients::name,
#include "ops/gradient/list.inc"
#undef IMPLEMENTATION
                                                                  });

const WeightGradients::Named& find_plan(const Problem& p, const at::Tensor& diff_weight,
                                        const WeightGradients::Row* only) {
  static thread_local LruCache<WeightGradients::Named> cache(kPrimitiveCacheCapacity);
  Key key = convolution_key(only ? only->name : kOp, p);
  key.add(diff_weight.strides());
  return cache.get(std::move(key).finish(), [&] {
    const auto describe = [&] { return text("weight ", p.weight_dims, " on ", p.src_dims); };
    return *kGradientImplementations.choose({p, diff_weight}, only,
                                            describe);  // ATen's takes everything
  });
}

at::Tensor input_gradient(const Problem& p, const Blocked& diff_dst, const at::Tensor& weight) {
  if (p.src_dims[0] == 0) {
    return empty_blocked(p.src_dims, diff_dst.block(), diff_dst.physical.options()).physical;
  }
  return run_convolution(mirrored(p), diff_dst.physical, weight, at::Tensor());
}

at::Tensor weight_gradient(const Problem& p, const Blocked& src, const Blocked& diff_dst,
                           const at::Tensor& weight) {
  if (p.src_dims[0] == 0) return at::zeros_like(weight);
  const at::Tensor diff_weight =
      weight.is_non_overlapping_and_dense()
          ? empty_pooled(weight.sizes(), weight.strides(), weight.options())
          : at::empty_like(weight);
  // A transposed convolution has the weight gradient of the convolution that it mirrors.
  const auto& named =
      find_plan(p.transposed ? mirrored(p) : p, diff_weight, kGradientImplementations.forced());
  kGradientImplementations.set_last(named.name);
  named.plan(p.transposed ? diff_dst : src, p.transposed ? src : diff_dst, diff_weight);
  return diff_weight;
}

at::Tensor bias_gradient(const Blocked& diff_dst) {
  const at::TensorOptions options = diff_dst.physical.options();
  if (options.dtype() != at::kFloat) {
    Dims dims(static_cast<std::size_t>(diff_dst.ndims() - 2));  // all dims except [C/b, b]
    std::iota(dims.begin(), dims.end(), 2);
    dims.push_back(0);
    return diff_dst.physical.sum(dims).flatten().narrow(0, 0, diff_dst.channels).clone();
  }
  const PerLane sums = channel_sums(diff_dst);
  const at::Tensor diff_bias = at::empty({diff_dst.channels}, options);
  std::copy_n(sums.begin(), diff_dst.channels, diff_bias.mutable_data_ptr<float>());
  return diff_bias;
}

}  // namespace

constinit const WeightGradient weight_gradients::in_float32 = {
    .name = "in_float32",
    .refuses = refuses_in_float32,
    .plan = plan_in_float32,
    .estimate = direct_gradient_microseconds,
};

constinit const WeightGradient weight_gradients::aten = {
    .name = "aten",
    .plan = plan_aten,
    .estimate = direct_gradient_microseconds,
    .traits = {.last_resort = true},
};

double direct_gradient_microseconds(const WeightGradientProblem& problem) {
  return direct_microseconds(problem.convolution);
}

Gradients convolution_backward(const at::Tensor& grad_output, const at::Tensor& input,
                               std::int64_t channels, const at::Tensor& weight,
                               at::IntArrayRef stride, at::IntArrayRef padding,
                               at::IntArrayRef dilation, bool transposed,
                               at::IntArrayRef output_padding, std::int64_t groups,
                               std::array<bool, 3> output_mask) {
  const Blocked src = blocked_argument(kOp, input, channels);
  if (weight.scalar_type() != input.scalar_type()) {
    fail_type(kOp, text("a weight of the input's dtype, ", input.dtype().name()),
              text(weight.dtype().name()), "convert one of them");
  }
  const Problem p = convolution_problem(src.dims(), src.format(), weight, at::Tensor(), stride,
                                        padding, dilation, transposed, output_padding, groups);
  const Blocked diff_dst = blocked_argument(kOp, grad_output, p.dst_dims[1]);
  if (grad_output.scalar_type() != input.scalar_type()) {
    fail_type(kOp, text("a gradient of the input's dtype, ", input.dtype().name()),
              text(grad_output.dtype().name()), "convert one of them");
  }
  if (diff_dst.dims() != p.dst_dims || diff_dst.block() != src.block()) {
    fail_value(kOp, text("a gradient of the output, ", p.dst_dims, " in blocks of ", src.block()),
               text(diff_dst.dims(), " in blocks of ", diff_dst.block()), "");
  }
  const auto none = [&] { return at::empty({0}, input.options()); };
  return {output_mask[0] ? input_gradient(p, diff_dst, weight) : none(),
          output_mask[1] ? weight_gradient(p, src, diff_dst, weight) : none(),
          output_mask[2] ? bias_gradient(diff_dst) : none()};
}

}  // namespace torch_blocked

// The gradients of a convolution, none with a kernel family of its own but that of the weight:
//   input   the gradient of a convolution is a transposed convolution of diff_dst with the same
//           weight, and the reverse: convolution.cpp's implementations serve both
//   weight  a list of its own, below; that of a transposed convolution is that of the
//           convolution it mirrors, src and diff_dst changing places
//   bias    the sums of diff_dst
#include "ops/convolution_backward.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <numeric>

#include "format/errors.h"
#include "ops/channel_sums.h"
#include "ops/registered.h"
#include "ops/reorder.h"
#include "runtime/engine.h"
#include "runtime/memory_pool.h"
#include "runtime/trace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

constexpr const char* kOp = "convolution_backward";

// The problem with src and dst exchanged: its forward is the gradient by src.
Problem mirrored(const Problem& p) {
  Problem q = p;
  std::swap(q.src_dims, q.dst_dims);
  std::swap(q.src_block, q.dst_block);
  q.transposed = !p.transposed;
  q.has_bias = false;
  for (std::size_t i = 0; i < p.spatial(); ++i) {
    // What the stride skipped at the far end, or the output padding that p mirrors.
    const std::int64_t reach = p.dilation[i] * (p.weight_dims[2 + i] - 1) + 1;
    const std::int64_t covered = (p.dst_dims[2 + i] - 1) * p.stride[i] - 2 * p.padding[i] + reach;
    q.output_padding[i] = p.transposed ? 0 : p.src_dims[2 + i] - covered;
  }
  return q;
}

// Whether p mirrors a transposed convolution whose output padding is a whole stride or more, as a
// dilation allows: a convolution of that src has more outputs than p.
bool mirrors_wide_padding(const Problem& p) {
  if (p.transposed) return false;
  const Dims padding = mirrored(p).output_padding;
  return !std::ranges::equal(padding, p.stride, std::less<>());
}

// oneDNN's primitive, and the reorder of its weights format to the dense one.
struct WeightGradient {
  Primitive primitive, reorder;
  std::int64_t bytes;  // of diff_weights in oneDNN's format

  void execute(const at::Tensor& src, const at::Tensor& diff_dst, const at::Tensor& diff_weight) {
    const at::Tensor packed = empty_pooled({bytes}, at::kByte);
    primitive.execute({src.const_data_ptr(), diff_dst.const_data_ptr(), packed.mutable_data_ptr()});
    reorder.execute({packed.const_data_ptr(), diff_weight.mutable_data_ptr()});
  }
};

// Nothing if oneDNN has only `ref`.
std::shared_ptr<WeightGradient> make(const Problem& p, const dnnl::memory::desc& src_md,
                                     const dnnl::memory::desc& dst_md,
                                     const dnnl::memory::desc& dense_md) {
  const dnnl::memory::desc any_md(onednn_weight_dims(p), onednn_type(p.dtype),
                                  dnnl::memory::format_tag::any);
  Dims dilates = p.dilation;  // oneDNN counts the gaps
  for (std::int64_t& dilate : dilates) --dilate;
  const auto direct = dnnl::algorithm::convolution_direct;
  const dnnl::convolution_forward::primitive_desc forward(
      engine(), dnnl::prop_kind::forward_training, direct, src_md, any_md, dst_md, p.stride,
      dilates, p.padding, p.padding, user_scratchpad(), /*allow_empty=*/true);
  if (!forward) return nullptr;
  const dnnl::convolution_backward_weights::primitive_desc pd(
      engine(), direct, src_md, any_md, dst_md, p.stride, dilates, p.padding, p.padding, forward,
      user_scratchpad(), /*allow_empty=*/true);
  if (!pd) return nullptr;
  if (is_ref(pd.impl_info_str())) {
    trace::record({trace::Kind::kRef, kOp, pd.impl_info_str()});
    return nullptr;
  }
  const dnnl::memory::desc packed_md = pd.diff_weights_desc();
  const dnnl::reorder::primitive_desc reorder_pd(engine(), packed_md, engine(), dense_md,
                                                 user_scratchpad());
  const std::array<Primitive::Argument, 3> arguments{
      {{DNNL_ARG_SRC, src_md}, {DNNL_ARG_DIFF_DST, dst_md}, {DNNL_ARG_DIFF_WEIGHTS, packed_md}}};
  const std::array<Primitive::Argument, 2> reorder_arguments{
      {{DNNL_ARG_SRC, packed_md}, {DNNL_ARG_DST, dense_md}}};
  return std::make_shared<WeightGradient>(WeightGradient{
      Primitive(dnnl::convolution_backward_weights(pd), arguments, pd.scratchpad_desc()),
      Primitive(dnnl::reorder(reorder_pd), reorder_arguments, reorder_pd.scratchpad_desc()),
      static_cast<std::int64_t>(packed_md.get_size())});
}

std::optional<RunWeightGradient> plan_blocked(const Problem& p, const at::Tensor& diff_weight) {
  if (!has_onednn_type(p.dtype)) return std::nullopt;
  const auto gradient =
      make(p, activation_md(p.src_dims, p.src_block, p.dtype),
           activation_md(p.dst_dims, p.dst_block, p.dtype), dense_weights_md(p, diff_weight));
  if (!gradient) return std::nullopt;
  return [gradient](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    gradient->execute(src.physical, diff_dst.physical, diff_weight);
  };
}

// The first layer: oneDNN reads up to 3 channels from nchw only; the reorder is small, as src is.
std::optional<RunWeightGradient> plan_plain_src(const Problem& p, const at::Tensor& diff_weight) {
  if (!has_onednn_type(p.dtype) || p.src_dims[1] > 3) return std::nullopt;
  using Tag = dnnl::memory::format_tag;
  const Tag tag = std::array{Tag::ncw, Tag::nchw, Tag::ncdhw}[p.spatial() - 1];
  const auto gradient =
      make(p, {p.src_dims, onednn_type(p.dtype), tag},
           activation_md(p.dst_dims, p.dst_block, p.dtype), dense_weights_md(p, diff_weight));
  if (!gradient) return std::nullopt;
  return [gradient](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    gradient->execute(reorder_to_dense(kOp, src, false), diff_dst.physical, diff_weight);
  };
}

std::optional<RunWeightGradient> plan_channels_last(const Problem& p,
                                                    const at::Tensor& diff_weight) {
  // oneDNN's AVX2 kernel writes out of bounds for a strided 1x1 with few channels in nhwc.
  // Source: uxlfoundation/oneDNN, issue 6035.
  const bool is_1x1 = std::all_of(p.weight_dims.begin() + 2, p.weight_dims.end(),
                                  [](std::int64_t size) { return size == 1; });
  const bool strided = std::ranges::any_of(p.stride, [](std::int64_t s) { return s > 1; });
  if (!has_onednn_type(p.dtype) || (is_1x1 && strided)) return std::nullopt;
  const dnnl::memory::data_type type = onednn_type(p.dtype);
  const dnnl::memory::format_tag tag = channels_last_tag(p);
  const auto gradient =
      make(p, {p.src_dims, type, tag}, {p.dst_dims, type, tag}, dense_weights_md(p, diff_weight));
  if (!gradient) return std::nullopt;
  return [gradient](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    gradient->execute(reorder_to_dense(kOp, src, true), reorder_to_dense(kOp, diff_dst, true),
                      diff_weight);
  };
}

std::optional<RunWeightGradient> plan_aten(const Problem& problem, const at::Tensor&) {
  const bool swapped = mirrors_wide_padding(problem);  // ATen takes it as it was
  return [p = swapped ? mirrored(problem) : problem, swapped](
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

const RunWeightGradient& find_plan(const Problem& p, const at::Tensor& diff_weight);

// bfloat16 and float16 where the CPU has no kernel for them.
std::optional<RunWeightGradient> plan_in_float32(const Problem& p, const at::Tensor&) {
  if (p.dtype != at::kBFloat16 && p.dtype != at::kHalf) return std::nullopt;
  return [p](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    Problem wide = p;
    wide.dtype = at::kFloat;
    const auto widened = [](const Blocked& side) {
      return Blocked{side.physical.to(at::kFloat), side.channels};
    };
    const at::Tensor gradient = at::empty_like(diff_weight, at::kFloat);
    find_plan(wide, gradient)(widened(src), widened(diff_dst), gradient);
    diff_weight.copy_(gradient);
  };
}

// Fastest first; ATen takes what is left.
constexpr std::array kImplementations{
    plan_winograd_gradient, plan_direct_gradient, plan_depthwise_gradient, plan_blocked,
    plan_plain_src,         plan_channels_last,   plan_in_float32,         plan_aten};

const RunWeightGradient& find_plan(const Problem& p, const at::Tensor& diff_weight) {
  static thread_local LruCache<RunWeightGradient> cache(kPrimitiveCacheCapacity);
  Key key = convolution_key(kOp, p);
  key.add(diff_weight.strides());
  return cache.get(std::move(key).finish(), [&]() -> RunWeightGradient {
    for (const auto implementation : kImplementations) {
      if (auto run = implementation(p, diff_weight)) return std::move(*run);
    }
    __builtin_unreachable();  // plan_aten takes everything
  });
}

at::Tensor input_gradient(const Problem& p, const Blocked& diff_dst, const at::Tensor& weight) {
  if (p.src_dims[0] == 0) {
    return empty_blocked(p.src_dims, p.src_block, diff_dst.physical.options()).physical;
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
  if (p.transposed) {
    find_plan(mirrored(p), diff_weight)(diff_dst, src, diff_weight);
  } else {
    find_plan(p, diff_weight)(src, diff_dst, diff_weight);
  }
  return diff_weight;
}

at::Tensor bias_gradient(const Blocked& diff_dst) {
  const at::TensorOptions options = diff_dst.physical.options();
  if (options.dtype() != at::kFloat) {
    Dims dims(static_cast<std::size_t>(diff_dst.ndims() - 2));  // [C/b, b] stay
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

Gradients convolution_backward(const at::Tensor& grad_output, const at::Tensor& input,
                               std::int64_t channels, const at::Tensor& weight,
                               at::IntArrayRef stride, at::IntArrayRef padding,
                               at::IntArrayRef dilation, bool transposed,
                               at::IntArrayRef output_padding, std::int64_t groups,
                               std::array<bool, 3> output_mask) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Blocked src = blocked_argument(kOp, input, channels);
  if (weight.scalar_type() != input.scalar_type()) {
    fail_type(kOp, text("a weight of the input's dtype, ", input.dtype().name()),
              text(weight.dtype().name()), "convert one of them");
  }
  const Problem p = convolution_problem(src.dims(), src.block(), weight, at::Tensor(), stride,
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

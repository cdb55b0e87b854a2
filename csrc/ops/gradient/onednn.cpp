// The gradient of a weight by oneDNN, but never by its `ref` kernels. oneDNN writes the weights
// format that it prefers, which is then reordered to the dense one.
#include "ops/convolution/onednn.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <memory>

#include "ops/gradient/convolution_backward.h"
#include "ops/moving/reorder.h"
#include "runtime/estimated_threads.h"
#include "runtime/fork.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/onednn/engine.h"
#include "runtime/trace/trace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

constexpr const char* kGradientOp = "convolution_backward";

// oneDNN splits the sum over pixels among its threads, so their number changes the last bits. While
// an object lives and is_deterministic(), it has one thread.
class DeterministicSum {
 public:
  DeterministicSum() {
    if (is_deterministic()) omp_set_num_threads(1);
  }
  DeterministicSum(const DeterministicSum&) = delete;
  DeterministicSum& operator=(const DeterministicSum&) = delete;
  ~DeterministicSum() { omp_set_num_threads(before_); }

 private:
  int before_ = omp_get_max_threads();
};

// oneDNN's primitive and the reorder from its weights format to the dense one.
struct GradientPrimitive {
  Primitive primitive, reorder;
  std::int64_t bytes;  // of diff_weights in oneDNN's format

  void execute(const at::Tensor& src, const at::Tensor& diff_dst, const at::Tensor& diff_weight) {
    const at::Tensor packed = empty_pooled({bytes}, at::kByte);
    const DeterministicSum one_thread;
    primitive.execute({src.const_data_ptr(), diff_dst.const_data_ptr(), packed.mutable_data_ptr()});
    reorder.execute({packed.const_data_ptr(), diff_weight.mutable_data_ptr()});
  }
};

// Nothing if oneDNN has only `ref`.
std::shared_ptr<GradientPrimitive> make(const Problem& p, const dnnl::memory::desc& src_md,
                                        const dnnl::memory::desc& dst_md,
                                        const dnnl::memory::desc& dense_md) {
  const dnnl::memory::desc any_md(onednn_weight_dims(p), onednn_type(p.dtype),
                                  dnnl::memory::format_tag::any);
  Dims dilates = p.dilation;  // oneDNN counts the gaps
  for (std::int64_t& dilate : dilates) --dilate;
  const auto direct = dnnl::algorithm::convolution_direct;
  const NoFork no_fork;
  const DeterministicSum one_thread;
  const dnnl::convolution_forward::primitive_desc forward(
      engine(), dnnl::prop_kind::forward_training, direct, src_md, any_md, dst_md, p.stride,
      dilates, p.padding, p.padding, user_scratchpad(), /*allow_empty=*/true);
  if (!forward) return nullptr;
  const dnnl::convolution_backward_weights::primitive_desc pd(
      engine(), direct, src_md, any_md, dst_md, p.stride, dilates, p.padding, p.padding, forward,
      user_scratchpad(), /*allow_empty=*/true);
  if (!pd) return nullptr;
  if (is_ref(pd.impl_info_str())) {
    trace::record({trace::Kind::kRef, kGradientOp, pd.impl_info_str()});
    return nullptr;
  }
  const dnnl::memory::desc packed_md = pd.diff_weights_desc();
  const dnnl::reorder::primitive_desc reorder_pd(engine(), packed_md, engine(), dense_md,
                                                 user_scratchpad());
  const std::array<Primitive::Argument, 3> arguments{
      {{DNNL_ARG_SRC, src_md}, {DNNL_ARG_DIFF_DST, dst_md}, {DNNL_ARG_DIFF_WEIGHTS, packed_md}}};
  const std::array<Primitive::Argument, 2> reorder_arguments{
      {{DNNL_ARG_SRC, packed_md}, {DNNL_ARG_DST, dense_md}}};
  return std::make_shared<GradientPrimitive>(GradientPrimitive{
      Primitive(dnnl::convolution_backward_weights(pd), arguments, pd.scratchpad_desc()),
      Primitive(dnnl::reorder(reorder_pd), reorder_arguments, reorder_pd.scratchpad_desc()),
      static_cast<std::int64_t>(packed_md.get_size())});
}

const char* refuses_blocked(const WeightGradientProblem& problem) {
  const bool has_type = has_onednn_type(problem.convolution.dtype);
  return has_type ? nullptr : "has no kernel for the dtype on this CPU";
}

const char* refuses_plain_src(const WeightGradientProblem& problem) {
  const bool few = problem.convolution.src_dims[1] <= 3;
  return few ? refuses_blocked(problem) : "is for at most 3 input channels";
}

// oneDNN's AVX2 kernel writes out of bounds for a strided 1x1 with few channels in nhwc.
// Source: uxlfoundation/oneDNN, issue 6035.
const char* refuses_channels_last(const WeightGradientProblem& problem) {
  const Problem& p = problem.convolution;
  const bool is_1x1 = std::all_of(p.weight_dims.begin() + 2, p.weight_dims.end(),
                                  [](std::int64_t size) { return size == 1; });
  const bool strided = std::ranges::any_of(p.stride, [](std::int64_t s) { return s > 1; });
  return is_1x1 && strided ? "takes no 1x1 kernels with a stride" : refuses_blocked(problem);
}

std::optional<RunWeightGradient> plan_blocked(const WeightGradientProblem& problem) {
  const auto& [p, diff_weight] = problem;
  const auto gradient =
      make(p, activation_md(p.src_dims, p.src_format, p.dtype),
           activation_md(p.dst_dims, p.dst_format, p.dtype), dense_weights_md(p, diff_weight));
  if (!gradient) return std::nullopt;
  return [gradient](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    gradient->execute(src.physical, diff_dst.physical, diff_weight);
  };
}

// For the first layer. oneDNN reads up to 3 channels only from nchw; the reorder is as small as
// src.
std::optional<RunWeightGradient> plan_plain_src(const WeightGradientProblem& problem) {
  const auto& [p, diff_weight] = problem;
  const auto gradient =
      make(p, activation_md(p.src_dims, kPlain, p.dtype),
           activation_md(p.dst_dims, p.dst_format, p.dtype), dense_weights_md(p, diff_weight));
  if (!gradient) return std::nullopt;
  return [gradient](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    gradient->execute(reorder_to_dense(kGradientOp, src, false), diff_dst.physical, diff_weight);
  };
}

std::optional<RunWeightGradient> plan_channels_last(const WeightGradientProblem& problem) {
  const auto& [p, diff_weight] = problem;
  const auto gradient =
      make(p, activation_md(p.src_dims, kChannelsLast, p.dtype),
           activation_md(p.dst_dims, kChannelsLast, p.dtype), dense_weights_md(p, diff_weight));
  if (!gradient) return std::nullopt;
  return [gradient](const Blocked& src, const Blocked& diff_dst, const at::Tensor& diff_weight) {
    gradient->execute(reorder_to_dense(kGradientOp, src, true),
                      reorder_to_dense(kGradientOp, diff_dst, true), diff_weight);
  };
}

}  // namespace

constinit const WeightGradient weight_gradients::onednn_blocked = {
    .name = "onednn_blocked",
    .refuses = refuses_blocked,
    .plan = plan_blocked,
    .estimate = direct_gradient_microseconds,
};

constinit const WeightGradient weight_gradients::onednn_plain_src = {
    .name = "onednn_plain_src",
    .refuses = refuses_plain_src,
    .plan = plan_plain_src,
    .estimate = direct_gradient_microseconds,
};

constinit const WeightGradient weight_gradients::onednn_channels_last = {
    .name = "onednn_channels_last",
    .refuses = refuses_channels_last,
    .plan = plan_channels_last,
    .estimate = direct_gradient_microseconds,
};

}  // namespace torch_blocked

// Batch norm in inference and training: one pass x * scale + shift per channel, after the
// statistics of the batch in training. float32.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "format/errors.h"
#include "ops/channel_sums.h"
#include "ops/normalization.h"
#include "ops/registered.h"

namespace torch_blocked {
namespace {

// (x - mean) * invstd * weight + bias.
at::Tensor normalise(const Blocked& src, const Lanes& mean, const Lanes& invstd,
                     const Parameter& weight, const Parameter& bias) {
  Lanes scale = lanes(src, weight, 1.f), shift = lanes(src, bias, 0.f);
  for (std::size_t c = 0; c < static_cast<std::size_t>(src.channels); ++c) {
    scale[c] *= invstd[c];
    shift[c] -= mean[c] * scale[c];
  }
  return affine(src, scale, shift);
}

// running = momentum * value + (1 - momentum) * running, in float64 as ATen does it.
void update_running(const Parameter& running, const PerLane& values, double momentum) {
  if (!running || !running->defined()) return;
  const at::Tensor contiguous = running->contiguous();
  auto* data = contiguous.mutable_data_ptr<float>();
  for (std::int64_t c = 0; c < running->size(0); ++c) {
    data[c] = static_cast<float>(momentum * values[static_cast<std::size_t>(c)] +
                                 (1 - momentum) * data[c]);
  }
  if (!contiguous.is_same(*running)) running->copy_(contiguous);
}

}  // namespace

at::Tensor batch_norm_inference(const at::Tensor& input, std::int64_t channels,
                                const Parameter& weight, const Parameter& bias,
                                const at::Tensor& running_mean, const at::Tensor& running_var,
                                double eps) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Blocked src = float_argument("batch_norm", input, channels);
  check_parameter("batch_norm", "weight", weight, channels);
  check_parameter("batch_norm", "bias", bias, channels);
  check_parameter("batch_norm", "running_mean", running_mean, channels);
  check_parameter("batch_norm", "running_var", running_var, channels);
  Lanes invstd = lanes(src, running_var, 0.f);
  for (float& value : invstd) value = 1.f / std::sqrt(value + static_cast<float>(eps));
  return normalise(src, lanes(src, running_mean, 0.f), invstd, weight, bias);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_training(
    const at::Tensor& input, std::int64_t channels, const Parameter& weight, const Parameter& bias,
    const Parameter& running_mean, const Parameter& running_var, double momentum, double eps) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Blocked src = float_argument("batch_norm", input, channels);
  check_parameter("batch_norm", "weight", weight, channels);
  check_parameter("batch_norm", "bias", bias, channels);
  check_parameter("batch_norm", "running_mean", running_mean, channels);
  check_parameter("batch_norm", "running_var", running_var, channels);
  const auto count = static_cast<double>(src.batch() * src.pixels());
  if (count == 0) {
    fail_value("batch_norm", "at least one value per channel", text(src.dims()),
               "statistics of nothing are not defined");
  }
  Moments moments = channel_moments(src);
  Lanes mean = lanes(src), invstd = lanes(src);
  for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
    mean[c] = static_cast<float>(moments.mean[c]);
    invstd[c] = static_cast<float>(1 / std::sqrt(moments.squares[c] / count + eps));
    moments.squares[c] /= count - 1;  // the unbiased variance
  }
  update_running(running_mean, moments.mean, momentum);
  update_running(running_var, moments.squares, momentum);
  return {normalise(src, mean, invstd, weight, bias), dense(src, mean), dense(src, invstd)};
}

Gradients batch_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                              std::int64_t channels, const Parameter& weight,
                              const at::Tensor& mean, const at::Tensor& invstd, bool training,
                              std::array<bool, 3> output_mask) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Blocked src = float_argument("batch_norm", input, channels);
  const Blocked diff_dst = float_argument("batch_norm", grad_output, channels);
  if (grad_output.sizes() != input.sizes()) {
    fail_value("batch_norm_backward", text("a gradient of shape ", input.sizes()),
               text(grad_output.sizes()), "");
  }
  check_parameter("batch_norm", "weight", weight, channels);
  check_parameter("batch_norm", "mean", mean, channels);
  check_parameter("batch_norm", "invstd", invstd, channels);

  const Lanes center = lanes(src, mean, 0.f), inverse = lanes(src, invstd, 0.f);
  GradientSums sums;
  if ((training && output_mask[0]) || output_mask[1] || output_mask[2]) {
    sums = gradient_sums(diff_dst, src, center.data());
  }
  const auto values = static_cast<std::size_t>(channels);
  at::Tensor diff_src = at::empty({0}, input.options()), diff_weight = diff_src.clone(),
             diff_bias = diff_src.clone();
  if (output_mask[1]) {
    Lanes diff = lanes(src);
    for (std::size_t c = 0; c < values; ++c) diff[c] = static_cast<float>(sums.dot[c] * inverse[c]);
    diff_weight = dense(src, diff);
  }
  if (output_mask[2]) diff_bias = dense(src, Lanes(sums.sum.begin(), sums.sum.end()));
  if (!output_mask[0]) return {diff_src, diff_weight, diff_bias};

  Lanes diff_scale = lanes(src, weight, 1.f), src_scale = lanes(src), shift = lanes(src);
  for (std::size_t c = 0; c < values; ++c) diff_scale[c] *= inverse[c];
  if (!training) return {affine(diff_dst, diff_scale, shift), diff_weight, diff_bias};

  // dx = weight * invstd * (dy - mean(dy) - (x - mean) * invstd^2 * mean(dy * (x - mean)))
  // Source: Ioffe, Szegedy, "Batch Normalization" (arXiv 1502.03167), section 3.
  const auto count = static_cast<double>(src.batch() * src.pixels());
  for (std::size_t c = 0; c < values; ++c) {
    const double scale = diff_scale[c], inv = inverse[c];
    shift[c] = static_cast<float>(-scale * sums.sum[c] / count);
    src_scale[c] = static_cast<float>(-scale * inv * inv * sums.dot[c] / count);
  }
  diff_src = normalisation_gradient(diff_dst, src, {center, diff_scale, src_scale, shift});
  return {diff_src, diff_weight, diff_bias};
}

}  // namespace torch_blocked

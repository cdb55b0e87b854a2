// Batch norm in inference and training: one pass x * scale + shift per channel. In training the
// statistics of the batch come first. float32 and bfloat16 are read and written directly and
// computed in float32; float16 is converted.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "format/errors.h"
#include "ops/normalization/normalization.h"
#include "ops/registered.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// Bytes of src in a range of channel blocks. The second pass over a range then finds it in L2 or
// L3.
constexpr std::int64_t kRangeBytes = 512 << 10;

// Calls f(range) for all channel blocks. If there are enough ranges to keep all threads busy, one
// thread runs each range. Otherwise one range has all blocks, and f shares its work among the
// threads.
template <typename F>
void for_block_ranges(const Blocked& src, F&& f) {
  const std::int64_t blocks = src.blocks(), threads = torch_blocked::threads();
  const std::int64_t elements = src.batch() * src.pixels() * src.block();  // of a block
  const std::int64_t bytes = std::max<std::int64_t>(1, elements * sizeof(float));
  const std::int64_t each =
      std::max<std::int64_t>(1, std::min(kRangeBytes / bytes, ceil_div(blocks, threads)));
  const std::int64_t ranges = ceil_div(blocks, each);
  const std::int64_t idle = ceil_div(ranges, threads) * threads - ranges;
  if (idle * 5 > ranges) return f(all_blocks(src));
  parallel_units(ranges, each * elements, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i * blocks / ranges;
      f(BlockRange{first, (i + 1) * blocks / ranges - first});
    }
  });
}

// Calls f(lane, index within the range) for the channels of a range, without the tail.
template <typename F>
void for_channels(const Blocked& src, BlockRange range, F&& f) {
  const std::int64_t first = range.first * src.block();
  const std::int64_t end = std::min(src.channels, first + range.count * src.block());
  for (std::int64_t lane = first; lane < end; ++lane) {
    f(static_cast<std::size_t>(lane), static_cast<std::size_t>(lane - first));
  }
}

// running = momentum * value + (1 - momentum) * running, in float64 as ATen does it.
void update_running(const Parameter& running, const PerLane& values, double momentum) {
  if (!running || !running->defined()) return;
  const at::Tensor updated = running->to(at::kDouble).contiguous();
  auto* data = updated.mutable_data_ptr<double>();
  for (std::int64_t c = 0; c < running->size(0); ++c) {
    data[c] = momentum * values[static_cast<std::size_t>(c)] + (1 - momentum) * data[c];
  }
  running->copy_(updated);
}

}  // namespace

at::Tensor batch_norm_inference(const at::Tensor& input, std::int64_t channels,
                                const Parameter& weight, const Parameter& bias,
                                const at::Tensor& running_mean, const at::Tensor& running_var,
                                double eps) {
  const Blocked src = norm_argument("batch_norm", input, channels);
  check_parameter("batch_norm", "weight", weight, src);
  check_parameter("batch_norm", "bias", bias, src);
  check_parameter("batch_norm", "running_mean", running_mean, src);
  check_parameter("batch_norm", "running_var", running_var, src);
  if (!norms_take(input.scalar_type())) {
    return batch_norm_inference(input.to(at::kFloat), channels, in_float32(weight),
                                in_float32(bias), running_mean.to(at::kFloat),
                                running_var.to(at::kFloat), eps)
        .to(input.scalar_type());
  }
  const Blocked dst = empty_blocked(src.dims(), src.block(), input.options());
  if (dst.physical.numel() == 0) return dst.physical;
  const Lanes mean = lanes(src, running_mean, 0.f), variance = lanes(src, running_var, 0.f);
  Lanes scale = lanes(src, weight, 1.f), shift = lanes(src, bias, 0.f);
  for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
    scale[c] *= 1.f / std::sqrt(variance[c] + static_cast<float>(eps));
    shift[c] -= mean[c] * scale[c];
  }
  affine(src, all_blocks(src), scale, shift, dst.physical);
  return dst.physical;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_training(
    const at::Tensor& input, std::int64_t channels, const Parameter& weight, const Parameter& bias,
    const Parameter& running_mean, const Parameter& running_var, double momentum, double eps) {
  const Blocked src = norm_argument("batch_norm", input, channels);
  check_parameter("batch_norm", "weight", weight, src);
  check_parameter("batch_norm", "bias", bias, src);
  check_parameter("batch_norm", "running_mean", running_mean, src);
  check_parameter("batch_norm", "running_var", running_var, src);
  const at::ScalarType of_statistics = statistics_type(input, {&weight, &bias, &running_mean});
  if (!norms_take(input.scalar_type())) {
    const Parameter mean = in_float32(running_mean), var = in_float32(running_var);
    auto [dst, batch_mean, invstd] =
        batch_norm_training(input.to(at::kFloat), channels, in_float32(weight), in_float32(bias),
                            mean, var, momentum, eps);
    if (mean) running_mean->copy_(*mean);
    if (var) running_var->copy_(*var);
    return {dst.to(input.scalar_type()), batch_mean.to(of_statistics), invstd.to(of_statistics)};
  }
  const auto count = static_cast<double>(src.batch() * src.pixels());
  if (count == 0) {
    fail_value("batch_norm", "at least one value per channel", text(src.dims()),
               "statistics of nothing are not defined");
  }
  Lanes mean = lanes(src), invstd = lanes(src);
  Lanes scale = lanes(src, weight, 1.f), shift = lanes(src, bias, 0.f);
  PerLane means(mean.size()), variances(mean.size());
  const Blocked dst = empty_blocked(src.dims(), src.block(), input.options());
  for_block_ranges(src, [&](BlockRange range) {
    const Moments moments = channel_moments(src, range);
    for_channels(src, range, [&](std::size_t c, std::size_t i) {
      means[c] = moments.mean[i];
      // Squares beyond the range of float32 are infinite, as in ATen.
      const double squares = moments.squares[i] > std::numeric_limits<float>::max()
                                 ? std::numeric_limits<double>::infinity()
                                 : moments.squares[i];
      variances[c] = squares / (count - 1);  // unbiased
      mean[c] = static_cast<float>(means[c]);
      invstd[c] = static_cast<float>(1 / std::sqrt(squares / count + eps));
      scale[c] *= invstd[c];
      shift[c] -= mean[c] * scale[c];
    });
    affine(src, range, scale, shift, dst.physical);
  });
  update_running(running_mean, means, momentum);
  update_running(running_var, variances, momentum);
  return {dst.physical, dense(src, mean, of_statistics), dense(src, invstd, of_statistics)};
}

Gradients batch_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                              std::int64_t channels, const Parameter& weight,
                              const at::Tensor& mean, const at::Tensor& invstd, bool training,
                              std::array<bool, 3> output_mask) {
  const Blocked src = norm_argument("batch_norm", input, channels);
  const Blocked diff_dst =
      norm_argument("batch_norm", grad_output.to(input.scalar_type()), channels);
  if (grad_output.sizes() != input.sizes()) {
    fail_value("batch_norm_backward", text("a gradient of shape ", input.sizes()),
               text(grad_output.sizes()), "");
  }
  check_parameter("batch_norm", "weight", weight, src);
  check_parameter("batch_norm", "mean", mean, src);
  check_parameter("batch_norm", "invstd", invstd, src);
  const at::ScalarType of_parameters = statistics_type(input, {&weight});
  if (!norms_take(input.scalar_type())) {
    const Gradients gradients = batch_norm_backward(
        grad_output.to(at::kFloat), input.to(at::kFloat), channels, in_float32(weight),
        mean.to(at::kFloat), invstd.to(at::kFloat), training, output_mask);
    return narrowed(gradients, input.scalar_type(), of_parameters, output_mask);
  }
  const Lanes inverse = lanes(src, invstd, 0.f);
  NormalizationGradient gradient{.mean = lanes(src, mean, 0.f),
                                 .diff_scale = lanes(src, weight, 1.f),
                                 .src_scale = lanes(src),
                                 .shift = lanes(src)};
  for_channels(src, all_blocks(src),
               [&](std::size_t c, std::size_t) { gradient.diff_scale[c] *= inverse[c]; });
  at::Tensor diff_src = at::empty({0}, input.options()), diff_weight = diff_src.clone(),
             diff_bias = diff_src.clone();
  if (output_mask[0]) diff_src = empty_blocked(src.dims(), src.block(), input.options()).physical;
  if (output_mask[0] && !training) {
    affine(diff_dst, all_blocks(src), gradient.diff_scale, gradient.shift, diff_src);
  }
  const bool uses_statistics = output_mask[0] && training;
  if (!uses_statistics && !output_mask[1] && !output_mask[2])
    return {diff_src, diff_weight, diff_bias};

  // dx = weight * invstd * (dy - mean(dy) - (x - mean) * invstd^2 * mean(dy * (x - mean)))
  // Source: Ioffe, Szegedy, "Batch Normalization" (arXiv 1502.03167), section 3.
  const auto count = static_cast<double>(src.batch() * src.pixels());
  Lanes weights = lanes(src), biases = lanes(src);
  for_block_ranges(src, [&](BlockRange range) {
    const GradientSums sums = gradient_sums(diff_dst, src, range, gradient.mean.data());
    for_channels(src, range, [&](std::size_t c, std::size_t i) {
      weights[c] = static_cast<float>(sums.dot[i] * inverse[c]);
      biases[c] = static_cast<float>(sums.sum[i]);
      const double scale = gradient.diff_scale[c], inv = inverse[c];
      gradient.shift[c] = static_cast<float>(-scale * sums.sum[i] / count);
      gradient.src_scale[c] = static_cast<float>(-scale * inv * inv * sums.dot[i] / count);
    });
    if (uses_statistics) normalization_gradient(diff_dst, src, range, gradient, diff_src);
  });
  if (output_mask[1]) diff_weight = dense(src, weights, of_parameters);
  if (output_mask[2]) diff_bias = dense(src, biases, of_parameters);
  return {diff_src, diff_weight, diff_bias};
}

}  // namespace torch_blocked

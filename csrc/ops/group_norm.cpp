// Group norm, and layer norm over C and all pixels, which is that of one group: the moments of
// every channel of every image, added up to those of the groups, then one pass x * scale + shift.
// Numbers of float32 and bfloat16 are read and written as they are, and computed in float32;
// float16 is converted.
#include <ATen/ops/empty.h>

#include <cmath>

#include "format/errors.h"
#include "ops/channel_sums.h"
#include "ops/normalization.h"
#include "ops/registered.h"

namespace torch_blocked {
namespace {

// Every image's channels as channels of one image: their sums stay apart.
Blocked images_apart(const Blocked& src) {
  Dims shape = src.physical.sizes().vec();
  shape[1] *= shape[0];
  shape[0] = 1;
  return {src.physical.view(shape), shape[1] * src.block()};
}

// f(lane, group, channel) for the lanes in use of [N * blocks * block]; `group` indexes [N * G].
template <typename F>
void for_lanes_of_groups(const Blocked& src, std::int64_t groups, F&& f) {
  const std::int64_t in_group = src.channels / groups;
  for (std::int64_t image = 0; image < src.batch(); ++image) {
    for (std::int64_t channel = 0; channel < src.channels; ++channel) {
      f(static_cast<std::size_t>(image * src.blocks() * src.block() + channel),
        static_cast<std::size_t>(image * groups + channel / in_group),
        static_cast<std::size_t>(channel));
    }
  }
}

struct GroupMoments {
  std::vector<double> mean, variance;  // [N * G]
};

GroupMoments group_moments(const Blocked& src, std::int64_t groups) {
  const Blocked apart = images_apart(src);
  const Moments moments = channel_moments(apart, all_blocks(apart));
  const auto count = static_cast<std::size_t>(src.batch() * groups);
  const auto in_group = static_cast<double>(src.channels / groups);
  const auto pixels = static_cast<double>(src.pixels());
  GroupMoments of_groups{std::vector<double>(count), std::vector<double>(count)};
  for_lanes_of_groups(src, groups, [&](std::size_t lane, std::size_t group, std::size_t) {
    of_groups.mean[group] += moments.mean[lane] / in_group;
  });
  // Squares about a channel's mean become squares about the group's.
  // Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979).
  for_lanes_of_groups(src, groups, [&](std::size_t lane, std::size_t group, std::size_t) {
    const double shift = moments.mean[lane] - of_groups.mean[group];
    of_groups.variance[group] += (moments.squares[lane] / pixels + shift * shift) / in_group;
  });
  return of_groups;
}

void check_groups(const char* op, const Blocked& src, std::int64_t groups) {
  if (groups < 1 || src.channels % groups != 0) {
    fail_value(op, text("groups that divide ", src.channels, " channels"), text(groups), "");
  }
  if (src.channels == 0 || src.pixels() == 0) {
    fail_not_implemented(op, "at least one value per group", text(src.dims()), "");
  }
}

void check_statistics(const char* op, const Blocked& src, const at::Tensor& values,
                      std::int64_t groups) {
  const at::ScalarType dtype = values.scalar_type();
  const bool fits = dtype == at::kFloat || dtype == src.physical.scalar_type();
  if (!fits || values.numel() != src.batch() * groups) {
    fail_value(op,
               text("statistics in float32 or the input's dtype [", src.batch(), ", ", groups, "]"),
               text(values.dtype().name(), " ", values.sizes()), "");
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm(const at::Tensor& input,
                                                          std::int64_t channels,
                                                          const Parameter& weight,
                                                          const Parameter& bias,
                                                          std::int64_t groups, double eps) {
  constexpr const char* kOp = "group_norm";
  const Blocked src = norm_argument(kOp, input, channels);
  check_parameter(kOp, "weight", weight, src);
  check_parameter(kOp, "bias", bias, src);
  check_groups(kOp, src, groups);
  const at::ScalarType of_statistics = statistics_type(input, {&weight, &bias});
  if (!norms_take(input.scalar_type())) {
    const auto [dst, mean, rstd] = group_norm(input.to(at::kFloat), channels, in_float32(weight),
                                              in_float32(bias), groups, eps);
    return {dst.to(input.scalar_type()), mean.to(of_statistics), rstd.to(of_statistics)};
  }
  const at::Tensor mean = at::empty({src.batch(), groups}, at::kFloat);
  const at::Tensor rstd = at::empty({src.batch(), groups}, at::kFloat);
  const Blocked dst = empty_blocked(src.dims(), src.block(), input.options());
  if (dst.physical.numel() == 0) {
    return {dst.physical, mean.to(of_statistics), rstd.to(of_statistics)};
  }
  auto *means = mean.mutable_data_ptr<float>(), *rstds = rstd.mutable_data_ptr<float>();
  const GroupMoments moments = group_moments(src, groups);
  for (std::size_t group = 0; group < moments.mean.size(); ++group) {
    means[group] = static_cast<float>(moments.mean[group]);
    rstds[group] = static_cast<float>(1 / std::sqrt(moments.variance[group] + eps));
  }
  const Lanes scales = lanes(src, weight, 1.f), shifts = lanes(src, bias, 0.f);
  Lanes center = lanes(images_apart(src)), scale = center, shift = center;
  for_lanes_of_groups(src, groups, [&](std::size_t lane, std::size_t group, std::size_t channel) {
    center[lane] = means[group];
    scale[lane] = rstds[group] * scales[channel];
    shift[lane] = shifts[channel];
  });
  normalize(src, center, scale, shift, dst.physical);
  return {dst.physical, mean.to(of_statistics), rstd.to(of_statistics)};
}

Gradients group_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                              std::int64_t channels, const at::Tensor& mean, const at::Tensor& rstd,
                              const Parameter& weight, std::int64_t groups,
                              std::array<bool, 3> output_mask) {
  constexpr const char* kOp = "group_norm_backward";
  const Blocked src = norm_argument(kOp, input, channels);
  const Blocked diff_dst = norm_argument(kOp, grad_output.to(input.scalar_type()), channels);
  if (grad_output.sizes() != input.sizes()) {
    fail_value(kOp, text("a gradient of shape ", input.sizes()), text(grad_output.sizes()), "");
  }
  check_parameter(kOp, "weight", weight, src);
  check_groups(kOp, src, groups);
  check_statistics(kOp, src, mean, groups);
  check_statistics(kOp, src, rstd, groups);
  const at::ScalarType of_parameters = statistics_type(input, {&weight});
  if (!norms_take(input.scalar_type())) {
    const Gradients gradients = group_norm_backward(
        grad_output.to(at::kFloat), input.to(at::kFloat), channels, mean.to(at::kFloat),
        rstd.to(at::kFloat), in_float32(weight), groups, output_mask);
    return narrowed(gradients, input.scalar_type(), of_parameters, output_mask);
  }
  const at::Tensor dense_mean = mean.to(at::kFloat).contiguous(),
                   dense_rstd = rstd.to(at::kFloat).contiguous();
  const auto *means = dense_mean.const_data_ptr<float>(),
             *rstds = dense_rstd.const_data_ptr<float>();
  const Lanes scales = lanes(src, weight, 1.f);

  NormalizationGradient gradient;
  gradient.mean = gradient.diff_scale = gradient.src_scale = gradient.shift =
      lanes(images_apart(src));
  for_lanes_of_groups(src, groups, [&](std::size_t lane, std::size_t group, std::size_t) {
    gradient.mean[lane] = means[group];
  });
  const Blocked apart = images_apart(src);
  const GradientSums sums =
      gradient_sums(images_apart(diff_dst), apart, all_blocks(apart), gradient.mean.data());

  // Of the groups: the means of weight * dy and of weight * dy * (x - mean).
  const auto count = static_cast<std::size_t>(src.batch() * groups);
  std::vector<double> sum(count), dot(count);
  PerLane diff_weights(static_cast<std::size_t>(channels)), diff_biases = diff_weights;
  const double values = static_cast<double>(channels / groups * src.pixels());
  for_lanes_of_groups(src, groups, [&](std::size_t lane, std::size_t group, std::size_t channel) {
    sum[group] += scales[channel] * sums.sum[lane] / values;
    dot[group] += scales[channel] * sums.dot[lane] / values;
    diff_weights[channel] += sums.dot[lane] * rstds[group];
    diff_biases[channel] += sums.sum[lane];
  });
  // dx = rstd * (weight * dy - mean(weight * dy) - (x - mean) * rstd^2 * mean(weight * dy * (x -
  // mean))). Source: Wu, He, "Group Normalization" (arXiv 1803.08494).
  for_lanes_of_groups(src, groups, [&](std::size_t lane, std::size_t group, std::size_t channel) {
    const double inverse = rstds[group];
    gradient.diff_scale[lane] = static_cast<float>(inverse * scales[channel]);
    gradient.src_scale[lane] = static_cast<float>(-inverse * inverse * inverse * dot[group]);
    gradient.shift[lane] = static_cast<float>(-inverse * sum[group]);
  });
  const at::Tensor none = at::empty({0}, input.options());
  const auto parameter = [&](bool asked, const PerLane& sums_of) {
    return asked ? dense(src, Lanes(sums_of.begin(), sums_of.end()), of_parameters) : none.clone();
  };
  at::Tensor diff_src = none;
  if (output_mask[0]) {
    diff_src = empty_blocked(src.dims(), src.block(), input.options()).physical;
    normalization_gradient(diff_dst, src, all_blocks(src), gradient, diff_src);
  }
  return {diff_src, parameter(output_mask[1], diff_weights),
          parameter(output_mask[2], diff_biases)};
}

}  // namespace torch_blocked

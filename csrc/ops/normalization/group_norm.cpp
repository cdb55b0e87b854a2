// Group norm, and layer norm over C and all pixels, which is group norm with one group. The moments
// of every channel of every image are combined to those of the groups; then one pass applies x *
// scale + shift. float32 and bfloat16 are read and written directly and computed in float32;
// float16 is converted.
#include "ops/normalization/group_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "kernels/rows/normalization.h"
#include "ops/normalization/exact_sums.h"
#include "ops/registered.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

constexpr std::size_t kMostLanes = Format::kBlocks.back();

// Sees the channels of all images as channels of one image, so that their sums stay separate.
Blocked images_apart(const Blocked& src) {
  Dims shape = src.physical.sizes().vec();
  shape[1] *= shape[0];
  shape[0] = 1;
  return {src.physical.view(shape), shape[1] * src.block()};
}

// Calls f(lane, group, channel) for the lanes in use of [N * blocks * block]. `group` indexes [N *
// G].
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
  const at::Tensor dst = empty_blocked(src.dims(), src.block(), input.options()).physical;
  GroupNorm norm({src.dims(), src.block(), input.scalar_type(), groups, eps}, weight, bias);
  if (dst.numel() > 0) {
    on_all_threads([&] { norm(src.physical.const_data_ptr(), dst.mutable_data_ptr()); });
  }
  const auto statistics = [&](const std::vector<float>& values) {
    return at::tensor(values).view({src.batch(), groups}).to(of_statistics);
  };
  return {dst, statistics(norm.means()), statistics(norm.rstds())};
}

GroupNorm::GroupNorm(const GroupNormProblem& problem, const Parameter& weight,
                     const Parameter& bias)
    : p_(problem),
      chunks_(p_.dims, p_.block),
      in_group_(p_.dims[1] / p_.groups),
      element_(static_cast<std::int64_t>(c10::elementSize(p_.dtype))),
      weight_(values(weight, 1.f)),
      bias_(values(bias, 0.f)),
      partials_(static_cast<std::size_t>(2 * chunks_.count() * p_.block)),
      means_(static_cast<std::size_t>(p_.dims[0] * p_.groups)),
      rstds_(means_.size()) {}

GroupNorm::Channels GroupNorm::values(const Parameter& parameter, float missing) const {
  Channels values(static_cast<std::size_t>(p_.dims[1]), missing);
  if (parameter && parameter->defined()) {
    std::copy_n(parameter->to(at::kFloat).contiguous().const_data_ptr<float>(), values.size(),
                values.begin());
  }
  return values;
}

void GroupNorm::operator()(const void* src, void* dst) {
  const auto at = [&](auto* data, std::int64_t chunk) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(data)>>,
                                    const char, char>;
    return static_cast<Byte*>(data) + chunks_.offset(chunk) * element_;
  };
  const kernels::Kernels& table = kernels::kernels_for(p_.block);
  const bool floats = p_.dtype == at::kFloat;
  const auto moments = floats ? table.moments : table.moments_bfloats;
  const auto normalize = floats ? table.normalize : table.normalize_bfloats;
  for_chunks(chunks_, [&](std::int64_t chunk) {
    std::array<float, 2 * kMostLanes> written;
    const kernels::PixelMoments of_chunk{.src = at(src, chunk),
                                         .block = p_.block,
                                         .pixels = chunks_.size(chunk),
                                         .mean = written.data(),
                                         .squares = written.data() + p_.block};
    moments(of_chunk);
    double* const kept = partial(chunk);
    if (exact::all_finite(written.data(), 2 * p_.block)) {
      std::copy_n(written.begin(), 2 * p_.block, kept);
    } else {
      exact::moments(of_chunk, p_.dtype, kept, kept + p_.block);
    }
  });
  parallel_units(p_.dims[0] * p_.groups, in_group_ * chunks_.per_row,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t group = begin; group < end; ++group) find_moments(group);
                 });
  for_chunks(chunks_, [&](std::int64_t chunk) {
    std::array<float, 3 * kMostLanes> lanes{};  // zeros beyond C keep the tail zero
    float *mean = lanes.data(), *scale = mean + p_.block, *shift = scale + p_.block;
    fill_lanes(chunk, mean, scale, shift);
    normalize({.src = at(src, chunk),
               .mean = mean,
               .scale = scale,
               .shift = shift,
               .dst = at(dst, chunk),
               .block = p_.block,
               .pixels = chunks_.size(chunk),
               .periods = 1},
              0, 1);
  });
}

// Computes the moments of group [n, g] from the means and squares of its channels' chunks. Squared
// deviations from the mean of a chunk are converted to those from the group's mean. Source: Chan,
// Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm" (1979).
void GroupNorm::find_moments(std::int64_t group) {
  const std::int64_t image = group / p_.groups, first = group % p_.groups * in_group_;
  // Calls f(pixels, mean, squares, lane) for the lanes of the group in each chunk. Each lane has
  // its own sum, so additions do not wait for each other.
  const auto for_lanes_of_chunks = [&](auto&& f) {
    const std::int64_t end = first + in_group_;
    for (std::int64_t block = first / p_.block; block * p_.block < end; ++block) {
      const std::int64_t lane = std::max<std::int64_t>(first - block * p_.block, 0);
      const std::int64_t last = std::min(end - block * p_.block, p_.block);
      const std::int64_t row = image * chunks_.blocks + block;
      for (std::int64_t chunk = row * chunks_.per_row; chunk < (row + 1) * chunks_.per_row;
           ++chunk) {
        const auto pixels = static_cast<double>(chunks_.size(chunk));
        const double *mean = partial(chunk), *squares = mean + p_.block;
        for (std::int64_t i = lane; i < last; ++i) f(pixels, mean[i], squares[i], i);
      }
    }
  };
  const auto values = static_cast<double>(in_group_ * chunks_.pixels);
  std::array<double, kMostLanes> sums{}, squares{};
  const auto total = [](const auto& lanes) {
    return std::accumulate(lanes.begin(), lanes.end(), 0.);
  };
  for_lanes_of_chunks([&](double pixels, double mean, double, std::int64_t lane) {
    sums[static_cast<std::size_t>(lane)] += pixels * mean;
  });
  const double center = total(sums) / values;
  for_lanes_of_chunks([&](double pixels, double mean, double around_mean, std::int64_t lane) {
    const double shift = mean - center;
    squares[static_cast<std::size_t>(lane)] += around_mean + pixels * shift * shift;
  });
  means_[static_cast<std::size_t>(group)] = static_cast<float>(center);
  // Squares beyond the range of float32 are infinite, which makes the whole group 0, as in ATen.
  const double all = total(squares);
  rstds_[static_cast<std::size_t>(group)] =
      all > std::numeric_limits<float>::max()
          ? 0
          : static_cast<float>(1 / std::sqrt(all / values + p_.eps));
}

void GroupNorm::fill_lanes(std::int64_t chunk, float* mean, float* scale, float* shift) const {
  const std::int64_t first = chunks_.channel(chunk);
  const std::int64_t image = chunk / chunks_.per_row / chunks_.blocks;
  for (std::int64_t lane = 0; lane < std::min(p_.block, p_.dims[1] - first); ++lane) {
    const auto channel = static_cast<std::size_t>(first + lane);
    const auto group = static_cast<std::size_t>(image * p_.groups + (first + lane) / in_group_);
    // Deviations from a huge mean may be infinite, and no factor turns infinity into 0.
    mean[lane] = rstds_[group] == 0 ? 0 : means_[group];
    scale[lane] = rstds_[group] * weight_[channel];
    shift[lane] = bias_[channel];
  }
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

  // The means of weight * dy and of weight * dy * (x - mean) over each group.
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

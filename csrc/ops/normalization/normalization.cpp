// What the normalizations share: checks of arguments, values per lane, and the passes that apply
// them.
#include "ops/normalization/normalization.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "kernels/rows/normalization.h"
#include "runtime/isa.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// The number of rows after which the values of `lanes` repeat: the channel blocks of one image or
// of all images.
std::int64_t periods(const Blocked& src, const Lanes& lanes) {
  return static_cast<std::int64_t>(lanes.size()) / src.block();
}

// Calls f(row) for the rows of [N * blocks] in the range. Threads share them.
template <typename F>
void for_rows(const Blocked& src, BlockRange range, F&& f) {
  parallel_units(src.batch() * range.count, src.pixels() * src.block(),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; ++i) {
                     f(i / range.count * src.blocks() + range.first + i % range.count);
                   }
                 });
}

}  // namespace

Blocked norm_argument(const char* op, const at::Tensor& physical, std::int64_t channels) {
  const at::ScalarType dtype = physical.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) {
    fail_not_implemented(op, "an input of float32, bfloat16 or float16",
                         text(physical.dtype().name()), "convert it with .float()");
  }
  return blocked_argument(op, physical, channels);
}

bool norms_take(at::ScalarType dtype) {
  return dtype == at::kFloat || (dtype == at::kBFloat16 && multiplies_bfloats());
}

Parameter in_float32(const Parameter& parameter) {
  return parameter && parameter->defined() ? Parameter(parameter->to(at::kFloat)) : std::nullopt;
}

void check_parameter(const char* op, const char* name, const Parameter& parameter,
                     const Blocked& src) {
  if (!parameter || !parameter->defined()) return;
  const at::ScalarType dtype = parameter->scalar_type();
  if (dtype != at::kFloat && dtype != src.physical.scalar_type()) {
    fail_not_implemented(op, text(name, " in float32 or the input's dtype"),
                         text(parameter->dtype().name()), "convert it with .float()");
  }
  if (parameter->dim() != 1 || parameter->size(0) != src.channels) {
    fail_value(op, text(name, " of size [", src.channels, "]"), text(parameter->sizes()),
               "one value per channel");
  }
}

at::ScalarType statistics_type(const at::Tensor& src,
                               std::initializer_list<const Parameter*> parameters) {
  for (const Parameter* each : parameters) {
    if (*each && (*each)->defined()) return (*each)->scalar_type();
  }
  return src.scalar_type();
}

Gradients narrowed(const Gradients& gradients, at::ScalarType of_src, at::ScalarType of_parameters,
                   std::array<bool, 3> output_mask) {
  const auto& [diff_src, diff_weight, diff_bias] = gradients;
  return {diff_src.to(of_src), diff_weight.to(output_mask[1] ? of_parameters : of_src),
          diff_bias.to(output_mask[2] ? of_parameters : of_src)};
}

Lanes lanes(const Blocked& src) {
  return Lanes(static_cast<std::size_t>(src.blocks() * src.block()));
}

Lanes lanes(const Blocked& src, const Parameter& parameter, float missing) {
  Lanes values = lanes(src);
  if (parameter && parameter->defined()) {
    std::copy_n(parameter->to(at::kFloat).contiguous().const_data_ptr<float>(), src.channels,
                values.begin());
  } else {
    std::fill_n(values.begin(), src.channels, missing);
  }
  return values;
}

at::Tensor dense(const Blocked& src, const Lanes& values, at::ScalarType dtype) {
  const at::Tensor tensor = at::empty({src.channels}, at::kFloat);
  std::copy_n(values.begin(), src.channels, tensor.mutable_data_ptr<float>());
  return tensor.to(dtype);
}

void affine(const Blocked& src, BlockRange range, const Lanes& scale, const Lanes& shift,
            const at::Tensor& dst) {
  const kernels::Affine rows{.src = src.physical.const_data_ptr(),
                             .scale = scale.data(),
                             .shift = shift.data(),
                             .dst = dst.mutable_data_ptr(),
                             .block = src.block(),
                             .pixels = src.pixels(),
                             .periods = periods(src, scale)};
  const kernels::Kernels& table = kernels::kernels_for(src.block());
  const auto kernel = is_bfloat16(src) ? table.affine_bfloats : table.affine;
  for_rows(src, range, [&](std::int64_t row) { kernel(rows, row, row + 1); });
}

void normalize(const Blocked& src, const Lanes& mean, const Lanes& scale, const Lanes& shift,
               const at::Tensor& dst) {
  const kernels::Normalization rows{.src = src.physical.const_data_ptr(),
                                    .mean = mean.data(),
                                    .scale = scale.data(),
                                    .shift = shift.data(),
                                    .dst = dst.mutable_data_ptr(),
                                    .block = src.block(),
                                    .pixels = src.pixels(),
                                    .periods = periods(src, scale)};
  const kernels::Kernels& table = kernels::kernels_for(src.block());
  const auto kernel = is_bfloat16(src) ? table.normalize_bfloats : table.normalize;
  for_rows(src, all_blocks(src), [&](std::int64_t row) { kernel(rows, row, row + 1); });
}

void normalization_gradient(const Blocked& diff_dst, const Blocked& src, BlockRange range,
                            const NormalizationGradient& gradient, const at::Tensor& diff_src) {
  const kernels::NormalizationGradient rows{.diff_dst = diff_dst.physical.const_data_ptr(),
                                            .src = src.physical.const_data_ptr(),
                                            .mean = gradient.mean.data(),
                                            .diff_scale = gradient.diff_scale.data(),
                                            .src_scale = gradient.src_scale.data(),
                                            .shift = gradient.shift.data(),
                                            .diff_src = diff_src.mutable_data_ptr(),
                                            .block = src.block(),
                                            .pixels = src.pixels(),
                                            .periods = periods(src, gradient.mean)};
  const kernels::Kernels& table = kernels::kernels_for(src.block());
  const auto kernel =
      is_bfloat16(src) ? table.normalization_gradient_bfloats : table.normalization_gradient;
  for_rows(src, range, [&](std::int64_t row) { kernel(rows, row, row + 1); });
}

}  // namespace torch_blocked

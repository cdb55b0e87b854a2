#include "ops/normalization.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "kernels/normalization.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// Rows after which the values of `lanes` repeat: the channel blocks of one image, or of all.
std::int64_t periods(const Blocked& src, const Lanes& lanes) {
  return static_cast<std::int64_t>(lanes.size()) / src.block();
}

// f(row) for the rows of [N * blocks] in the range, shared among the threads.
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

void check_parameter(const char* op, const char* name, const Parameter& parameter,
                     std::int64_t channels) {
  if (!parameter || !parameter->defined()) return;
  if (parameter->scalar_type() != at::kFloat) {
    fail_not_implemented(op, text(name, " in float32"), text(parameter->dtype().name()),
                         "convert it with .float()");
  }
  if (parameter->dim() != 1 || parameter->size(0) != channels) {
    fail_value(op, text(name, " of size [", channels, "]"), text(parameter->sizes()),
               "one value per channel");
  }
}

Lanes lanes(const Blocked& src) {
  return Lanes(static_cast<std::size_t>(src.blocks() * src.block()));
}

Lanes lanes(const Blocked& src, const Parameter& parameter, float missing) {
  Lanes values = lanes(src);
  if (parameter && parameter->defined()) {
    std::copy_n(parameter->contiguous().const_data_ptr<float>(), src.channels, values.begin());
  } else {
    std::fill_n(values.begin(), src.channels, missing);
  }
  return values;
}

at::Tensor dense(const Blocked& src, const Lanes& values) {
  const at::Tensor tensor = at::empty({src.channels}, src.physical.options());
  std::copy_n(values.begin(), src.channels, tensor.mutable_data_ptr<float>());
  return tensor;
}

void affine(const Blocked& src, BlockRange range, const Lanes& scale, const Lanes& shift,
            const at::Tensor& dst) {
  const kernels::Affine rows{.src = src.physical.const_data_ptr<float>(),
                             .scale = scale.data(),
                             .shift = shift.data(),
                             .dst = dst.mutable_data_ptr<float>(),
                             .block = src.block(),
                             .pixels = src.pixels(),
                             .periods = periods(src, scale)};
  const auto kernel = kernels::kernels_for(src.block()).affine;
  for_rows(src, range, [&](std::int64_t row) { kernel(rows, row, row + 1); });
}

void normalize(const Blocked& src, const Lanes& mean, const Lanes& scale, const Lanes& shift,
               const at::Tensor& dst) {
  const kernels::Normalization rows{.src = src.physical.const_data_ptr<float>(),
                                    .mean = mean.data(),
                                    .scale = scale.data(),
                                    .shift = shift.data(),
                                    .dst = dst.mutable_data_ptr<float>(),
                                    .block = src.block(),
                                    .pixels = src.pixels(),
                                    .periods = periods(src, scale)};
  const auto kernel = kernels::kernels_for(src.block()).normalize;
  for_rows(src, all_blocks(src), [&](std::int64_t row) { kernel(rows, row, row + 1); });
}

void normalization_gradient(const Blocked& diff_dst, const Blocked& src, BlockRange range,
                            const NormalizationGradient& gradient, const at::Tensor& diff_src) {
  const kernels::NormalizationGradient rows{.diff_dst = diff_dst.physical.const_data_ptr<float>(),
                                            .src = src.physical.const_data_ptr<float>(),
                                            .mean = gradient.mean.data(),
                                            .diff_scale = gradient.diff_scale.data(),
                                            .src_scale = gradient.src_scale.data(),
                                            .shift = gradient.shift.data(),
                                            .diff_src = diff_src.mutable_data_ptr<float>(),
                                            .block = src.block(),
                                            .pixels = src.pixels(),
                                            .periods = periods(src, gradient.mean)};
  const auto kernel = kernels::kernels_for(src.block()).normalization_gradient;
  for_rows(src, range, [&](std::int64_t row) { kernel(rows, row, row + 1); });
}

}  // namespace torch_blocked

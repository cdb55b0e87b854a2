#include "ops/normalization.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "runtime/threads.h"

namespace torch_blocked {
namespace {

// Rows after which the values of `lanes` repeat: the channel blocks of one image, or of all.
std::int64_t periods(const Blocked& src, const Lanes& lanes) {
  return static_cast<std::int64_t>(lanes.size()) / src.block();
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

at::Tensor affine(const Blocked& src, const Lanes& scale, const Lanes& shift) {
  const Blocked dst = empty_blocked(src.dims(), src.block(), src.physical.options());
  if (dst.physical.numel() == 0) return dst.physical;
  const std::int64_t pixels = src.pixels();
  const auto* in = src.physical.const_data_ptr<float>();
  auto* out = dst.physical.mutable_data_ptr<float>();
  const auto kernel = kernels::kernels_for(src.block()).affine;
  parallel_units(src.batch() * src.blocks(), pixels * src.block(),
                 [&](std::int64_t begin, std::int64_t end) {
                   kernel(in, scale.data(), shift.data(), out, src.block(), pixels,
                          periods(src, scale), begin, end);
                 });
  return dst.physical;
}

at::Tensor normalisation_gradient(const Blocked& diff_dst, const Blocked& src,
                                  const NormalisationGradient& gradient) {
  const at::Tensor diff_src =
      empty_blocked(src.dims(), src.block(), src.physical.options()).physical;
  if (diff_src.numel() == 0) return diff_src;
  const std::int64_t pixels = src.pixels();
  const auto *diff = diff_dst.physical.const_data_ptr<float>(),
             *in = src.physical.const_data_ptr<float>();
  auto* out = diff_src.mutable_data_ptr<float>();
  const auto kernel = kernels::kernels_for(src.block()).normalisation_gradient;
  parallel_units(src.batch() * src.blocks(), pixels * src.block(),
                 [&](std::int64_t begin, std::int64_t end) {
                   kernel(diff, in, gradient.mean.data(), gradient.diff_scale.data(),
                          gradient.src_scale.data(), gradient.shift.data(), out, src.block(),
                          pixels, periods(src, gradient.mean), begin, end);
                 });
  return diff_src;
}

}  // namespace torch_blocked

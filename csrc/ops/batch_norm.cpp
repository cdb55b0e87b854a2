#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/blocked.h"
#include "ops/registered.h"
#include "runtime/threads.h"

namespace torch_blocked {
namespace {

void check_parameter(const char* name, const std::optional<at::Tensor>& parameter,
                     std::int64_t channels) {
  if (!parameter || !parameter->defined()) return;
  if (parameter->scalar_type() != at::kFloat) {
    fail_not_implemented("batch_norm", text(name, " in float32"), text(parameter->dtype().name()),
                         "convert it with .float()");
  }
  if (parameter->dim() != 1 || parameter->size(0) != channels) {
    fail_value("batch_norm", text(name, " of size [", channels, "]"), text(parameter->sizes()),
               "one value per channel");
  }
}

}  // namespace

at::Tensor batch_norm_inference(const at::Tensor& input, std::int64_t channels,
                                const std::optional<at::Tensor>& weight,
                                const std::optional<at::Tensor>& bias,
                                const at::Tensor& running_mean, const at::Tensor& running_var,
                                double eps) {
  if (input.scalar_type() != at::kFloat) {
    fail_not_implemented("batch_norm", "a float32 input", text(input.dtype().name()),
                         "convert it with .float()");
  }
  const Blocked src = blocked_argument("batch_norm", input, channels);
  check_parameter("weight", weight, channels);
  check_parameter("bias", bias, channels);
  check_parameter("running_mean", running_mean, channels);
  check_parameter("running_var", running_var, channels);

  // y = (x - mean) / sqrt(var + eps) * weight + bias as x * scale + shift, [blocks, block] each;
  // zeros beyond C keep the tail zero.
  const at::Tensor scale = at::zeros({src.blocks() * src.block()}, input.options());
  const at::Tensor shift = at::zeros_like(scale);
  const auto values = [](const std::optional<at::Tensor>& parameter) {
    return parameter && parameter->defined() ? parameter->contiguous() : at::Tensor();
  };
  const at::Tensor gamma = values(weight), beta = values(bias);
  const at::Tensor mean = running_mean.contiguous(), var = running_var.contiguous();
  float *a = scale.mutable_data_ptr<float>(), *b = shift.mutable_data_ptr<float>();
  for (std::int64_t c = 0; c < channels; ++c) {
    const float inverse = 1.f / std::sqrt(var.const_data_ptr<float>()[c] + static_cast<float>(eps));
    a[c] = gamma.defined() ? inverse * gamma.const_data_ptr<float>()[c] : inverse;
    b[c] = (beta.defined() ? beta.const_data_ptr<float>()[c] : 0.f) -
           mean.const_data_ptr<float>()[c] * a[c];
  }

  const Blocked dst = empty_blocked(src.dims(), src.block(), input.options());
  const std::int64_t pixels = src.pixels(), rows = src.batch() * src.blocks();
  if (dst.physical.numel() == 0) return dst.physical;
  const auto kernel = kernels::kernels().affine;
  parallel_units(rows, pixels * src.block(), [&](std::int64_t begin, std::int64_t end) {
    kernel(src.physical.const_data_ptr<float>(), a, b, dst.physical.mutable_data_ptr<float>(),
           src.block(), pixels, src.blocks(), begin, end);
  });
  return dst.physical;
}

}  // namespace torch_blocked

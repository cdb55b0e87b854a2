// y = scale[c] * relu(x)^2 + bias[c], an activation with two parameters per channel: the op on
// dense tensors, and the same on blocked memory in one pass.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/relu.h>
#include <torch/library.h>

#include "torch_blocked/blocked_form.h"
#include "torch_blocked/tensor.h"

namespace {

using at::Tensor;

Tensor star_relu(const Tensor& input, const Tensor& scale, const Tensor& bias) {
  at::DimVector per_channel(static_cast<std::size_t>(input.dim() - 1), 1);
  per_channel[0] = input.size(1);  // [C, 1, 1]
  return at::relu(input).square_().mul_(scale.view(per_channel)).add_(bias.view(per_channel));
}

Tensor star_relu_blocked(const Tensor& input, std::int64_t channels, const Tensor& scale,
                         const Tensor& bias) {
  Tensor output = at::empty_like(input);
  const auto src = torch_blocked::accessor<const float>(input, channels);
  const auto dst = torch_blocked::accessor<float>(output, channels);
  torch_blocked::for_blocks(src, [&](std::int64_t n, std::int64_t block) {
    const std::int64_t lanes = src.lanes(), first = block * lanes;
    float s[32] = {}, b[32] = {};  // beyond the last channel they stay 0, and so does the result
    std::copy_n(scale.const_data_ptr<float>() + first, src.lanes_of(block), s);
    std::copy_n(bias.const_data_ptr<float>() + first, src.lanes_of(block), b);
    for (std::int64_t pixel = 0; pixel < src.pixels(); ++pixel) {
      const float* x = src.block(n, block) + pixel * lanes;
      float* y = dst.block(n, block) + pixel * lanes;
      for (std::int64_t lane = 0; lane < lanes; ++lane) {
        const float r = std::max(x[lane], 0.0f);
        y[lane] = s[lane] * r * r + b[lane];
      }
    }
  });
  return output;
}

TORCH_LIBRARY(custom_kernel, m) {
  m.def("star_relu(Tensor input, Tensor scale, Tensor bias) -> Tensor");
  m.def("star_relu_blocked(Tensor input, SymInt channels, Tensor scale, Tensor bias) -> Tensor");
}
TORCH_LIBRARY_IMPL(custom_kernel, CPU, m) {
  m.impl("star_relu", star_relu);
  m.impl("star_relu_blocked", star_relu_blocked);
}
// The fakes say what dims and type a result has; torch.compile and optimize ask them.
TORCH_LIBRARY_IMPL(custom_kernel, Meta, m) {
  m.impl("star_relu",
         [](const Tensor& input, const Tensor&, const Tensor&) { return at::empty_like(input); });
  m.impl("star_relu_blocked", [](const Tensor& input, c10::SymInt, const Tensor&, const Tensor&) {
    return at::empty_like(input);
  });
}
const torch_blocked::BlockedForm form("custom_kernel::star_relu",
                                      "custom_kernel::star_relu_blocked");

}  // namespace

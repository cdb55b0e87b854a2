#include "ops/post_ops.h"

#include <cmath>

#include "kernels/kernels.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

void append_activation(dnnl::post_ops& post_ops, const kernels::Activation& activation) {
  using Kind = kernels::Activation::Kind;
  using Algorithm = dnnl::algorithm;
  const auto [kind, alpha, beta] = activation;
  switch (kind) {
    case Kind::kNone:
      return;
    case Kind::kClamp:
      if (alpha == 0 && std::isinf(beta)) {
        return post_ops.append_eltwise(Algorithm::eltwise_relu, 0, 0);
      }
      return post_ops.append_eltwise(Algorithm::eltwise_clip_v2, alpha, beta);
    case Kind::kLeakyRelu:
      return post_ops.append_eltwise(Algorithm::eltwise_relu, alpha, 0);
    case Kind::kHardswish:
      return post_ops.append_eltwise(Algorithm::eltwise_hardswish, 1.f / 6, 0.5f);
    case Kind::kSilu:
      return post_ops.append_eltwise(Algorithm::eltwise_swish, 1, 0);
    case Kind::kGelu:
      return post_ops.append_eltwise(Algorithm::eltwise_gelu_erf, 0, 0);
    case Kind::kGeluTanh:
      return post_ops.append_eltwise(Algorithm::eltwise_gelu_tanh, 0, 0);
    case Kind::kTanh:
      return post_ops.append_eltwise(Algorithm::eltwise_tanh, 0, 0);
    case Kind::kMish:
      return post_ops.append_eltwise(Algorithm::eltwise_mish, 0, 0);
  }
}

bool is_as_in_aten(const kernels::Activation& activation) {
  using Kind = kernels::Activation::Kind;
  const bool relu = activation.kind == Kind::kLeakyRelu && activation.alpha == 0;
  return !relu && activation.kind != Kind::kClamp && activation.kind != Kind::kMish;
}

void finish(const kernels::Epilogue& epilogue, const float* residual, float* dst,
            std::int64_t count) {
  parallel_units(count, 1, [&](std::int64_t begin, std::int64_t end) {
    kernels::kernels().finish(epilogue, residual ? residual + begin : nullptr, dst + begin,
                              end - begin);
  });
}

}  // namespace torch_blocked

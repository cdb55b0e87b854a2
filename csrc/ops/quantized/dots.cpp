// Runs convolutions of bytes by tiles of dot products.
#include <ATen/ops/cat.h>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/convolution_time.h"
#include "ops/products/dots_phases.h"
#include "ops/quantized/convolution.h"
#include "runtime/isa.h"

namespace torch_blocked {
namespace {

using Problem = QuantizedConvolutionProblem;

const char* refuses_dots(const Problem& p) {
  if (p.sizes.dst_format.block != kernels::kernels().width) return "makes the CPU's own blocks";
  return nullptr;
}

double estimate_dots(const Problem& p) {
  return direct_microseconds(p.sizes) / (multiplies_bytes() ? 4 : 2);
}

std::optional<QuantizedConvolutionPlan> plan_dots(const Problem& p) {
  const auto dots = std::make_shared<const PhasedDots>(
      p.sizes, multiplies_bytes() ? DotNumbers::kBytes : DotNumbers::kWords,
      static_cast<std::uint8_t>(p.src.zero));
  const Dots* ordinary = dots->ordinary();
  const auto end = dot_end(p);
  const float residual_scale =
      p.dst && p.residual ? static_cast<float>(p.residual->scale / p.dst->scale) : 0.f;
  // All operands except src, residual and dst.
  const auto operands = [end, residual_scale,
                         is_float32 = !p.dst](const QuantizedWeights& weights) -> Dots::Operands {
    return {.src = nullptr,
            .weights = weights.packed.const_data_ptr(),
            .channels = static_cast<const kernels::DotChannels*>(weights.channels.const_data_ptr()),
            .end = end ? &*end : nullptr,
            .residual = nullptr,
            .residual_scale = residual_scale,
            .dst = nullptr,
            .is_float32 = is_float32};
  };
  return QuantizedConvolutionPlan{
      .weights_format = dots->weights_format(),
      .channels_format = dot_channels_format(p),
      .pack = [dots](const at::Tensor& weight) { return dots->pack(weight); },
      .channels =
          [p, dots](const at::Tensor& weight, const at::Tensor& scales, const at::Tensor& bias) {
            std::vector<at::Tensor> phases;
            for (const at::Tensor& part : dots->split(weight)) {
              phases.push_back(dot_channels(p, part, scales, bias));
            }
            return at::cat(phases);
          },
      .run =
          [dots, operands](const std::uint8_t* src, const QuantizedWeights& weights,
                           const std::uint8_t* residual, void* dst) {
            Dots::Operands all = operands(weights);
            all.src = src;
            all.residual = residual;
            all.dst = dst;
            dots->run(all);
          },
      .row_stage = ordinary && p.dst ? ordinary->row_stage() : std::nullopt,
      .run_rows = [dots, operands](const QuantizedWeights& weights) -> RunRows {
        return [dots, operands, weights](const BlockedRows& src, const std::uint8_t* residual,
                                         const BlockedRows& dst, Range rows) {
          Dots::Operands all = operands(weights);
          all.residual = residual;
          dots->ordinary()->run_rows(all, src, dst, rows);
        };
      }};
}

}  // namespace

constinit const QuantizedConvolution quantized_convolutions::dots = {
    .name = "dots",
    .refuses = refuses_dots,
    .plan = plan_dots,
    .estimate = estimate_dots,
};

}  // namespace torch_blocked

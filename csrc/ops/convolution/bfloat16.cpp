// Runs convolutions of bfloat16 by tiles of dot products, summed in float32.
#include <ATen/ops/empty.h>

#include <limits>

#include "kernels/kernels.h"
#include "ops/convolution/convolution.h"
#include "ops/convolution_time.h"
#include "ops/products/dots_phases.h"
#include "runtime/isa.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;
using Kind = Activation::Kind;

// An epilogue as bounds; nothing if it is more than that.
struct Bounds {
  float least, most;
};
std::optional<Bounds> bounds_of(const Epilogue& e) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Activation& last = e.residual ? e.after : e.before;
  if (e.residual && e.before.kind != Kind::kNone) return std::nullopt;
  if (last.kind == Kind::kNone) return Bounds{-kInfinity, kInfinity};
  return last.kind == Kind::kClamp ? std::optional(Bounds{last.alpha, last.beta}) : std::nullopt;
}

// [phases, vectors of channels], with 0 beyond the last channel.
std::vector<kernels::DotChannels> channels_of(const Problem& p, const void* bias,
                                              std::int64_t phases) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::int64_t width = kernels::kernels().width, channels = p.dst_dims[1];
  const Bounds bounds = bounds_of(p.epilogue).value_or(Bounds{-kInfinity, kInfinity});
  const std::int64_t vectors = ceil_div(channels, width);
  std::vector<kernels::DotChannels> all(static_cast<std::size_t>(phases * vectors));
  for (std::int64_t i = 0; i < channels; ++i) {
    kernels::DotChannels& c = all[static_cast<std::size_t>(i / width)];
    const auto lane = static_cast<std::size_t>(i % width);
    c.scale[lane] = 1;
    c.shift[lane] = bias ? static_cast<const c10::BFloat16*>(bias)[i] : c10::BFloat16(0);
    c.least[lane] = bounds.least;
    c.most[lane] = bounds.most;
  }
  for (std::int64_t i = vectors; i < phases * vectors; ++i) {
    all[static_cast<std::size_t>(i)] = all[static_cast<std::size_t>(i - vectors)];
  }
  return all;
}

const char* refuses_dots_bfloat16(const Problem& p) {
  if (p.dtype != at::kBFloat16) return "is for bfloat16";
  if (!multiplies_bfloats()) return "has no kernel for the dtype on this CPU";
  const bool blocks = p.src_format.is_blocked() && p.dst_format.is_blocked();
  return blocks && p.dst_format.block == kernels::kernels().width ? nullptr
                                                                  : "takes the CPU's own blocks";
}

double estimate_dots_bfloat16(const Problem& p) {
  // A group smaller than a block multiplies a whole block, with zeros beside its weights.
  const std::int64_t inputs = p.src_dims[1] / p.groups, block = p.src_format.block;
  const double wasted =
      p.groups > 1 && inputs < block ? static_cast<double>(block) / static_cast<double>(inputs) : 1;
  return kBarelyFaster * wasted * direct_microseconds(p) / 2;
}

std::optional<LayerPlan> plan_dots_bfloat16(const Problem& p) {
  const auto dots = std::make_shared<const PhasedDots>(p, DotNumbers::kBfloats, 0);
  std::optional<kernels::DotEnd> end;
  if (!bounds_of(p.epilogue)) {
    end = kernels::DotEnd{.epilogue = p.epilogue,
                          .residual_scale = 1,
                          .residual_zero = 0,
                          .inverse_scale = 1,
                          .zero = 0};
  }
  const auto operands = [end](const LayerBuffers& buffers,
                              const std::vector<kernels::DotChannels>& channels) {
    return Dots::Operands{.src = buffers.src,
                          .weights = buffers.weights,
                          .channels = channels.data(),
                          .end = end ? &*end : nullptr,
                          .residual = buffers.residual,
                          .residual_scale = 1,
                          .dst = buffers.dst,
                          .is_float32 = false};
  };
  const Dots* ordinary = dots->ordinary();
  return LayerPlan{.weights_format = dots->weights_format(),
                   .pack = [dots](const at::Tensor& weight) { return dots->pack(weight); },
                   .run =
                       [dots, p, operands](const LayerBuffers& buffers) {
                         dots->run(operands(buffers, channels_of(p, buffers.bias, dots->phases())));
                       },
                   .loops_only = true,
                   .row_stage = ordinary ? ordinary->row_stage() : std::nullopt,
                   .run_rows = [dots, p, operands](const LayerBuffers& buffers) -> RunRows {
                     return [dots, operands, buffers, channels = channels_of(p, buffers.bias, 1)](
                                const BlockedRows& src, const std::uint8_t* residual,
                                const BlockedRows& dst, Range rows) {
                       Dots::Operands all = operands(buffers, channels);
                       all.residual = residual;
                       dots->ordinary()->run_rows(all, src, dst, rows);
                     };
                   }};
}

}  // namespace

constinit const ConvolutionImplementation convolutions::dots_bfloat16 = {
    .name = "dots_bfloat16",
    .refuses = refuses_dots_bfloat16,
    .plan = plan_dots_bfloat16,
    .estimate = estimate_dots_bfloat16,
    .traits = {.sums_in_place = true, .in_rows = true},
};

}  // namespace torch_blocked

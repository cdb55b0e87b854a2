// The list of implementations of convolutions of bytes, and the ends of their sums: scales, shifts
// and bounds of each channel.
#include "ops/quantized/convolution.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <bit>
#include <cmath>
#include <limits>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "runtime/isa.h"

namespace torch_blocked {
namespace {

using Problem = QuantizedConvolutionProblem;
using Kind = Activation::Kind;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Whether bounds alone express the activation: none, or a clamp.
bool is_clamp(const Activation& a) { return a.kind == Kind::kNone || a.kind == Kind::kClamp; }

// The clamp at the end of an epilogue; nothing if the epilogue does more than that.
std::optional<Activation> last_clamp(const Epilogue& e) {
  const Activation& last = e.residual ? e.after : e.before;
  if (!is_clamp(last) || (e.residual && e.before.kind != Kind::kNone)) return std::nullopt;
  return last;
}

// The bounds of the values that are stored.
struct Bounds {
  float least, most;
};
Bounds bounds_of(const Problem& p) {
  const auto clamp = last_clamp(p.sizes.epilogue);
  const bool clamps = clamp && clamp->kind == Kind::kClamp;
  const Bounds real{clamps ? clamp->alpha : -kInfinity, clamps ? clamp->beta : kInfinity};
  if (!p.dst) return real;
  const auto stored = [&](float x) {
    return static_cast<float>(std::clamp(x / p.dst->scale + static_cast<double>(p.dst->zero),
                                         static_cast<double>(p.dst->least),
                                         static_cast<double>(p.dst->most)));
  };
  return {stored(real.least), stored(real.most)};
}

}  // namespace

std::optional<kernels::DotEnd> dot_end(const Problem& p) {
  if (p.dst && last_clamp(p.sizes.epilogue)) return std::nullopt;
  const Quantization dst = p.dst.value_or(Quantization{}),
                     residual = p.residual.value_or(Quantization{});
  return kernels::DotEnd{.epilogue = p.sizes.epilogue,
                         .residual_scale = static_cast<float>(residual.scale),
                         .residual_zero = static_cast<float>(residual.zero),
                         .inverse_scale = static_cast<float>(1 / dst.scale),
                         .zero = static_cast<float>(dst.zero)};
}

std::string dot_channels_format(const Problem& p) {
  std::string name = "channels";
  for (const auto& each : {std::optional(p.src), p.dst, p.residual}) {
    const Quantization q = each.value_or(Quantization{.scale = 0});
    name += text(" ", std::bit_cast<std::int64_t>(q.scale), " ", q.zero, " ", q.least, " ", q.most);
  }
  for (const Activation& a : {p.sizes.epilogue.before, p.sizes.epilogue.after}) {
    name += text(" ", static_cast<std::int64_t>(a.kind), " ", std::bit_cast<std::int32_t>(a.alpha),
                 " ", std::bit_cast<std::int32_t>(a.beta));
  }
  return name;
}

at::Tensor dot_channels(const Problem& p, const at::Tensor& weight, const at::Tensor& scales,
                        const at::Tensor& bias) {
  const std::int64_t width = kernels::kernels().width, outputs = p.sizes.dst_dims[1];
  const std::int64_t vectors = (outputs + width - 1) / width;
  const auto bytes = static_cast<std::int64_t>(sizeof(kernels::DotChannels));
  const at::Tensor channels = at::empty({vectors * bytes}, at::kByte).zero_();
  auto* to = static_cast<kernels::DotChannels*>(channels.mutable_data_ptr());
  const at::Tensor sums = weight.reshape({outputs, -1}).sum({1}, false, at::kLong);
  const auto* sum = sums.const_data_ptr<std::int64_t>();
  const auto* scale = scales.const_data_ptr<float>();
  const float* add = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  const Bounds bounds = bounds_of(p);
  // In the general end values stay real until it converts them to bytes.
  const bool is_real = dot_end(p).has_value();
  const Quantization dst = is_real ? Quantization{} : *p.dst;
  for (std::int64_t i = 0; i < vectors; ++i) to[i].is_small = true;
  const at::Tensor absolute =
      weight.reshape({outputs, -1}).to(at::kInt).abs().sum({1}, false, at::kLong);
  const auto* most = absolute.const_data_ptr<std::int64_t>();
  const double residual = p.residual ? 255 * p.residual->scale / dst.scale : 0;
  for (std::int64_t i = 0; i < outputs; ++i) {
    kernels::DotChannels& c = to[i / width];
    const auto lane = static_cast<std::size_t>(i % width);
    const double real = p.src.scale * static_cast<double>(scale[i]);
    double shift = add ? static_cast<double>(add[i]) : 0;
    if (!is_real && p.residual) {
      shift -= p.residual->scale * static_cast<double>(p.residual->zero);
    }
    c.start[lane] = static_cast<std::int32_t>(-p.src.zero * sum[i]);
    c.scale[lane] = static_cast<float>(real / dst.scale);
    c.shift[lane] = static_cast<float>(shift / dst.scale + static_cast<double>(dst.zero));
    c.least[lane] = bounds.least;
    c.most[lane] = bounds.most;
    const double largest = std::abs(real / dst.scale) * 2 * 255 * static_cast<double>(most[i]) +
                           std::abs(c.shift[lane]) + residual;
    c.is_small &= largest < static_cast<double>(1 << 30);
    for (std::int64_t pixel = 0; pixel < 4 && !is_real; ++pixel) {
      const auto at = static_cast<std::size_t>(pixel * width) + lane;
      c.least_bytes[at] = static_cast<std::uint8_t>(std::nearbyint(bounds.least));
      c.most_bytes[at] = static_cast<std::uint8_t>(std::nearbyint(bounds.most));
    }
  }
  return channels;
}

Format quantized_src_format(std::int64_t channels) {
  return Format::blocked(channels <= 4 ? 4 : native_blocks()[0]);
}

namespace {

const QuantizedConvolutionImplementations kQuantizedConvolutionImplementations(
    "quantized_convolution", {
#define IMPLEMENTATION(name) quantized_convolutions::name,
#include "ops/quantized/list.inc"
#undef IMPLEMENTATION
                             });

}  // namespace

const QuantizedConvolutionImplementations& quantized_convolution_implementations() {
  return kQuantizedConvolutionImplementations;
}

}  // namespace torch_blocked

// Runs convolutions of bytes by Winograd's F(4x4, 3x3) in words. Sums are exact, as in a direct
// convolution. Only the transform A^T rounds, to float32.
#include "ops/convolution/winograd/winograd.h"

#include "kernels/kernels.h"
#include "ops/convolution_time.h"
#include "ops/quantized/convolution.h"
#include "runtime/isa.h"

namespace torch_blocked {
namespace {

using Problem = QuantizedConvolutionProblem;

const kernels::Winograd& kernel() {
  const kernels::Kernels& table = kernels::kernels();
  return multiplies_bytes() ? *table.winograd4_words_vnni : *table.winograd4_words;
}

// The kernel's sums are 576 times too large and start from 0.
at::Tensor channels_of(const Problem& p, const at::Tensor& weight, const at::Tensor& scales,
                       const at::Tensor& bias) {
  constexpr float kFactor = 576;
  at::Tensor channels = dot_channels(p, weight, scales, bias);
  const std::int64_t vectors =
      channels.numel() / static_cast<std::int64_t>(sizeof(kernels::DotChannels));
  auto* all = static_cast<kernels::DotChannels*>(channels.mutable_data_ptr());
  for (kernels::DotChannels& c : std::span(all, static_cast<std::size_t>(vectors))) {
    for (std::size_t lane = 0; lane < kernels::DotChannels::kMostLanes; ++lane) {
      c.shift[lane] += static_cast<float>(c.start[lane]) * c.scale[lane];
      c.scale[lane] /= kFactor;
    }
  }
  return channels;
}

const char* refuses_winograd_words(const Problem& p) {
  if (p.sizes.transposed) return "is for convolutions that are not transposed";
  if (const char* refusal = refuses_winograd_sizes(p.sizes)) return refusal;
  if (p.sizes.weight_dims.size() > 4 && p.sizes.weight_dims[2] > 1) return "takes 3x3 kernels only";
  return p.sizes.dst_format.block == kernels::kernels().width ? nullptr
                                                              : "makes the CPU's own blocks";
}

// Costs are in products of words, which take half the time of an FMA (products of bytes take a
// quarter). A tile has 36, and its transforms of src and dst take as long as 400 each. Measured on
// a Zen 5 with VNNI, one thread: billions of products per second, counted as in a direct
// convolution, by this kernel and by dots:
//   64@56   1490 1090    128@28 1740 1100    256@14 1500 1090    512@7 850 940    64@224 1400 1090
//   256@56  1930 1120    512@28 2020 1110    512@14 1460 1040    64@7  925 825    16@56   625  740
double estimate_winograd_words(const Problem& p) {
  constexpr double kProducts = 36, kTransform = 400, kFewTiles = 8;
  const auto tiles = static_cast<double>(winograd_tiles(p.sizes, kernel().tile));
  const auto ic = static_cast<double>(p.sizes.src_dims[1]),
             oc = static_cast<double>(p.sizes.dst_dims[1]);
  const double products = streamed_fmas(kProducts, std::max(tiles, kFewTiles));
  return microseconds_of((products + tiles * (kTransform / oc + kTransform / ic)) * ic * oc) / 2;
}

std::optional<QuantizedConvolutionPlan> plan_winograd_words(const Problem& p) {
  kernels::WinogradShape shape = winograd_shape(p.sizes);
  shape.stream = false;
  shape.padding_number = static_cast<std::uint8_t>(p.src.zero);
  const float residual_scale =
      p.dst && p.residual ? static_cast<float>(p.residual->scale / p.dst->scale) : 0.f;
  return QuantizedConvolutionPlan{
      .weights_format = "winograd4/words",
      .channels_format = dot_channels_format(p) + " winograd4",
      .pack = [p](const at::Tensor& weight) { return pack_winograd(kernel(), p.sizes, weight); },
      .channels = [p](const at::Tensor& weight, const at::Tensor& scales,
                      const at::Tensor& bias) { return channels_of(p, weight, scales, bias); },
      .run =
          [shape, residual_scale, end = dot_end(p), is_float32 = !p.dst,
           tiles = winograd_tiles(p.sizes, kernel().tile)](
              const std::uint8_t* src, const QuantizedWeights& weights,
              const std::uint8_t* residual, void* dst) {
            run_winograd(kernel(), shape, tiles, src, weights.packed.const_data_ptr(),
                         {.bias = nullptr,
                          .residual = residual,
                          .dst = dst,
                          .epilogue = {},
                          .channels = static_cast<const kernels::DotChannels*>(
                              weights.channels.const_data_ptr()),
                          .end = end ? &*end : nullptr,
                          .residual_scale = residual_scale,
                          .is_float32 = is_float32});
          }};
}

}  // namespace

constinit const QuantizedConvolution quantized_convolutions::winograd_words = {
    .name = "winograd_words",
    .refuses = refuses_winograd_words,
    .plan = plan_winograd_words,
    .estimate = estimate_winograd_words,
};

}  // namespace torch_blocked

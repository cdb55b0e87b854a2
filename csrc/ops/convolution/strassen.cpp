// Runs 1x1 convolutions by Strassen's product: an image is a matrix of pixels and channels.
#include "ops/products/strassen.h"

#include <algorithm>
#include <memory>

#include "format/errors.h"
#include "ops/convolution/convolution.h"
#include "ops/convolution_time.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// The problem as products of matrices: one for each image, or one for all in channels-last.
struct Matrices {
  std::int64_t images, pixels;
  const kernels::Kernels& kernels;
};

Matrices matrices_of(const Problem& p) {
  const std::int64_t images = p.src_dims[0];
  const std::int64_t pixels =
      c10::multiply_integers(p.dst_dims) / std::max<std::int64_t>(1, images * p.dst_dims[1]);
  if (p.dst_format.is_blocked()) {
    return {images, pixels, kernels::kernels_for(p.dst_format.block)};
  }
  return {1, images * pixels, kernels::kernels()};
}

// The steps of an image of `channels` channels in the problem's format.
VectorSteps steps_of(const Problem& p, std::int64_t channels) {
  const Matrices m = matrices_of(p);
  const std::int64_t width = m.kernels.width;
  if (!p.dst_format.is_blocked()) return {.row = channels, .vector = width, .image = 0};
  return {.row = width, .vector = m.pixels * width, .image = m.pixels * round_up(channels, width)};
}

const char* refuses_strassen(const Problem& p) {
  if (!fewer_products_allowed()) return kFewerProductsRefused;
  const SpatialSizes sizes = spatial_sizes(p);
  const auto all = [](const auto& dims, std::int64_t value) {
    return std::ranges::all_of(dims, [&](std::int64_t d) { return d == value; });
  };
  if (p.dtype != at::kFloat) return "computes float32 only";
  if (p.groups != 1) return "takes one group only";
  if (!all(sizes.kernel, 1)) return "takes 1x1 kernels only";
  // A transposed convolution with dilation may have padding at its end.
  const bool pixelwise = all(p.stride, 1) && all(p.padding, 0) && sizes.in == sizes.out;
  if (!pixelwise) return "takes stride 1 without padding only";
  if (p.src_format != p.dst_format) return "reads and writes one format only";
  const std::int64_t ic = p.src_dims[1], oc = p.dst_dims[1];
  const Matrices m = matrices_of(p);
  if (p.dst_format.is_blocked()) {
    if (p.dst_format.block != m.kernels.width) return "takes blocks of one vector only";
  } else {
    if (p.dst_format != kChannelsLast) return "takes no plain format";
    if (ic % m.kernels.width != 0 || oc % m.kernels.width != 0) {
      return "takes whole vectors of channels where they come last";
    }
  }
  return Strassen::refuses(m.kernels, m.pixels, ic, oc);
}

double estimate_strassen(const Problem& p) {
  const std::int64_t width = matrices_of(p).kernels.width;
  return direct_microseconds(p) * Strassen::share(width, p.src_dims[1], p.dst_dims[1]);
}

std::optional<LayerPlan> plan_strassen(const Problem& p) {
  const Matrices m = matrices_of(p);
  const std::int64_t ic = p.src_dims[1], oc = p.dst_dims[1];
  const auto strassen = std::make_shared<const Strassen>(m.kernels, m.images, m.pixels, ic, oc);
  return LayerPlan{
      .weights_format = text("strassen/", m.kernels.width, p.transposed ? "/transposed" : ""),
      .pack =
          [strassen, ic, oc, transposed = p.transposed](const at::Tensor& weight) {
            const at::Tensor matrix =
                transposed ? weight.reshape({ic, oc}).t() : weight.reshape({oc, ic});
            return strassen->pack(matrix.contiguous());
          },
      .run =
          [strassen, src = steps_of(p, ic), dst = steps_of(p, oc),
           epilogue = p.epilogue](const LayerBuffers& b) {
            strassen->run(src, dst, epilogue,
                          {static_cast<const float*>(b.src), static_cast<const float*>(b.weights),
                           static_cast<const float*>(b.bias), static_cast<const float*>(b.residual),
                           static_cast<float*>(b.dst)});
          },
      .loops_only = true,
      .handicap = Strassen::kHandicap};
}

}  // namespace

constinit const ConvolutionImplementation convolutions::strassen = {
    .name = "strassen",
    .refuses = refuses_strassen,
    .plan = plan_strassen,
    .estimate = estimate_strassen,
    .traits = {.sums_in_place = true, .only_measured = true},
};

}  // namespace torch_blocked

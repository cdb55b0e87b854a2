// Translates convolutions into the order in which Winograd's kernels count dims, channels and
// tiles.
//
// A tile extends along the dims in which a kernel has several taps: one, two or all three. A kernel
// of more than 3 taps splits into several of 3. Dilated taps meet outputs that are equally far
// apart.
//
// Along one dim F(4, 3) makes half of the products of direct sums. This serves 1-D convolutions and
// the 1x7 and 7x1 of Inception, whose dims are reordered. The parts of a larger kernel count as
// more channels of src, each transformed some pixels further on. Where it is less work (4, 7 and 8
// taps), the parts have 4 taps and run by F(3, 4). A dilated convolution has as many phases of
// tiles as its dilation.
//
// Share of the time of the best direct kernel, on one core of a Xeon with AVX-512: 7 taps over 64
// channels of 1,024 samples 0.72, 1x7 over 128 channels at 17x17 0.71, 5x5 0.68, 7x7 0.60, 3x3 at
// dilation 2 0.53 (512 channels at 28x28).
#include <algorithm>

#include "kernels/kernels.h"
#include "ops/convolution/winograd/winograd.h"
#include "runtime/isa.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;
using kernels::WinogradShape;

// A dst larger than this is written past the cache. Its next reader would hardly find it in cache,
// and fetching lines only to overwrite them costs 5 % at 64@224 (13 MB).
constexpr std::int64_t kStreamBytes = 8 << 20;

constexpr const char* kOneFormat = "reads and writes one blocked format only";

// F(4x4) makes a quarter of the products, so a bundle of more groups cannot win.
constexpr std::int64_t kMostGroups = 4;

// The spatial dims of dims [N, C, *spatial] or weight dims.
WinogradSizes spatial_of(const Dims& dims) { return as_3d(at::IntArrayRef(dims).slice(2), 1); }

// The dilation, set to 1 along dims of one tap. It has no meaning there, and tiles of one output
// have no phases.
WinogradSizes dilation_of(const Problem& p) {
  WinogradSizes dilation = as_3d(p.dilation, 1);
  const WinogradSizes taps = spatial_of(p.weight_dims);
  for (std::size_t i = 0; i < 3; ++i) {
    if (taps[i] == 1) dilation[i] = 1;
  }
  return dilation;
}

// The refusals that do not depend on kernel, stride and dilation.
const char* refuses_any(const Problem& p) {
  if (!fewer_products_allowed()) return kFewerProductsRefused;
  if (!kernels::kernels().winograd4) return "needs AVX2";
  if (p.groups != 1) return "takes one group only";
  if (!p.blocked()) return kOneFormat;
  return p.dst_format.block % 8 == 0 ? nullptr : "takes blocks of whole vectors only";
}

// A transposed convolution at stride 1 (the gradient of src) runs as a convolution with flipped
// weights. Its padding is dilation * (kernel - 1) less the original padding.
WinogradShape shape_of(const Problem& p, const WinogradSizes& taps) {
  const WinogradOrder order(p);
  const WinogradSizes kernel = spatial_of(p.weight_dims), dilation = dilation_of(p);
  const auto steps = [&](const WinogradSizes& sizes) {
    const std::int64_t block = p.dst_format.block;
    return order({sizes[1] * sizes[2] * block, sizes[2] * block, block});
  };
  WinogradSizes padding = as_3d(p.padding, 0);
  for (std::size_t i = 0; p.transposed && i < 3; ++i) {
    padding[i] = dilation[i] * (kernel[i] - 1) - padding[i];
  }
  const WinogradSizes each = winograd_parts(p, taps);
  const std::int64_t parts = c10::multiply_integers(each), src_ic = p.src_dims[1];
  return {.ic = parts == 1 ? src_ic : parts * round_up(src_ic, p.dst_format.block),
          .oc = p.dst_dims[1],
          .block = p.dst_format.block,
          .src_ic = src_ic,
          .in = order(spatial_of(p.src_dims)),
          .out = order(spatial_of(p.dst_dims)),
          .padding = order(padding),
          .in_steps = steps(spatial_of(p.src_dims)),
          .out_steps = steps(spatial_of(p.dst_dims)),
          .out_block = c10::multiply_integers(spatial_of(p.dst_dims)) * p.dst_format.block,
          .stream = p.dtype == at::kFloat &&
                    c10::multiply_integers(p.dst_dims) * static_cast<std::int64_t>(sizeof(float)) >
                        kStreamBytes,
          .stride = order(as_3d(p.stride, 1)),
          .dilation = order(dilation),
          .parts = each};
}

}  // namespace

WinogradOrder::WinogradOrder(const Problem& p) {
  const WinogradSizes taps = spatial_of(p.weight_dims);
  const auto is_wide = [&](std::int64_t dim) { return taps[static_cast<std::size_t>(dim)] > 1; };
  std::ranges::stable_partition(dims, [&](std::int64_t dim) { return !is_wide(dim); });
  wide = static_cast<std::size_t>(std::ranges::count_if(dims, is_wide));
}

WinogradSizes WinogradOrder::operator()(const WinogradSizes& sizes) const {
  const auto at = [&](std::size_t i) { return sizes[static_cast<std::size_t>(dims[i])]; };
  return {at(0), at(1), at(2)};
}

WinogradSizes winograd_parts(const Problem& p, const WinogradSizes& taps) {
  WinogradSizes parts = WinogradOrder(p)(spatial_of(p.weight_dims));
  for (std::size_t i = 0; i < 3; ++i) parts[i] = ceil_div(parts[i], taps[i]);
  return parts;
}

bool is_for_stride2(const Problem& p) {
  const WinogradOrder order(p);
  const WinogradSizes stride = order(as_3d(p.stride, 1));
  return order.wide >= 2 && stride[1] == 2 && stride[2] == 2;
}

Problem winograd_bundle(const Problem& p) {
  const auto [count, groups] = group_bundles(p);
  Problem q = p;
  q.groups = 1;
  q.src_dims[1] /= count;
  q.dst_dims[1] /= count;
  q.weight_dims[p.transposed ? 0 : 1] = q.src_dims[1];
  q.weight_dims[p.transposed ? 1 : 0] = q.dst_dims[1];
  return q;
}

const char* refuses_winograd_sizes(const Problem& p) {
  const WinogradSizes kernel = spatial_of(p.weight_dims);
  const bool square = (kernel[0] == 1 || kernel[0] == 3) && kernel[1] == 3 && kernel[2] == 3;
  if (const char* refusal = refuses_any(p)) return refusal;
  if (!square) return "takes 3x3 and 3x3x3 kernels only";
  if (!are_all(p.stride, 1)) return "takes stride 1 only";
  return are_all(p.dilation, 1) ? nullptr : "takes dilation 1 only";
}

const char* refuses_winograd(const Problem& p) {
  if (p.dtype != at::kFloat) return "computes float32 only";
  if (!p.blocked()) return kOneFormat;
  if (group_bundles(p).count == 0) return "takes groups that fill whole blocks";
  if (group_bundles(p).groups > kMostGroups) return "takes groups of a quarter of a block and more";
  if (WinogradOrder(p).wide == 0) return "takes kernels of several taps";
  if (!are_all(p.stride, 1)) {
    if (!is_for_stride2(p)) return "takes stride 1, or 2 along the two dims of its tiles";
    if (p.transposed) return "takes none that are transposed but at stride 1";
    if (!are_all(p.dilation, 1)) return "takes dilations at stride 1 only";
  }
  return refuses_any(winograd_bundle(p));
}

const char* refuses_winograd2(const Problem& p) {
  if (const char* refusal = refuses_winograd(p)) return refusal;
  return WinogradOrder(p).wide > 1 ? nullptr : "takes kernels of two and three dims";
}

const char* refuses_winograd_bfloat16(const Problem& p) {
  if (p.dtype != at::kBFloat16) return "is for bfloat16";
  if (!multiplies_bfloats()) return "has no kernel for the dtype on this CPU";
  if (const char* refusal = refuses_winograd_sizes(p)) return refusal;
  if (WinogradOrder(p).wide == 3) return "takes 3x3 kernels only";
  return p.dst_format.block == kernels::kernels().width ? nullptr : "takes the CPU's own blocks";
}

WinogradShape winograd_shape(const Problem& p, const WinogradSizes& taps) {
  WinogradShape shape = shape_of(winograd_bundle(p), taps);
  shape.groups = group_bundles(p).count;
  return shape;
}

std::int64_t winograd_tiles(const Problem& p, const WinogradSizes& tile) {
  const WinogradOrder order(p);
  const WinogradSizes out = order(spatial_of(p.dst_dims)), dilation = order(dilation_of(p));
  std::int64_t tiles = p.dst_dims[0];
  for (std::size_t i = 0; i < 3; ++i) {
    tiles *= kernels::WinogradAlong(out[i], tile[i], dilation[i]).count();
  }
  return tiles;
}

}  // namespace torch_blocked

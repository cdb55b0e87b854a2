// Winograd convolution of ours: 3x3, 1x3x3 and 3x3x3 kernels, stride 1, dilation 1, and in float32
// groups that fill whole blocks.
// float32, and bfloat16 for kernels of one tap along depth, in float32, bfloat16 or fixed point.
//
// Work is shared out as (block of tiles, group of output channels), blocks outermost: a thread
// takes a run of units, transforms the input of a block when it enters it, and keeps V and M in its
// L2. Two threads in one block each transform its input; that costs less than waiting for each
// other. The blocking changes no bit of the result: each output is one sum over the input channels,
// in order.
#include "ops/convolution_winograd.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/convolution_time.h"
#include "runtime/huge_pages.h"
#include "runtime/isa.h"
#include "runtime/memory_pool.h"
#include "runtime/packed_weights.h"
#include "runtime/trace.h"
#include "runtime/workspace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;
using kernels::Winograd;
using kernels::WinogradShape;
using kernels::WinogradTiles;

// V and M of a block of tiles should take about this much of L2, so that a position's U fits in it
// too; but every block streams all of U once, so it has at least kLeastTiles: 56 instead of 24 are
// 1.0 to 1.1 times as fast at 512@28, more rarely so with AVX-512 than with AVX2.
constexpr std::int64_t kMostBytes = 320 << 10;
constexpr std::int64_t kLeastTiles = 56;

// dst larger than this is written past the cache: what reads it next would hardly find it there,
// and fetching lines only to overwrite them costs 5 % at 64@224 (13 MB).
constexpr std::int64_t kStreamBytes = 8 << 20;

using Sizes3 = std::array<std::int64_t, 3>;  // d, h, w

// The spatial dims of dims [N, C, *spatial] or weight dims.
Sizes3 spatial_of(const Dims& dims) { return as_3d(at::IntArrayRef(dims).slice(2), 1); }

constexpr const char* kOneFormat = "reads and writes one blocked format only";

bool is_deep(const Problem& p) { return spatial_of(p.weight_dims)[0] > 1; }

}  // namespace

const char* refuses_winograd_sizes(const Problem& p) {
  const auto all = [](const Dims& dims, std::int64_t value) {
    return std::ranges::all_of(dims, [&](std::int64_t d) { return d == value; });
  };
  const Sizes3 kernel = spatial_of(p.weight_dims);
  const bool square = (kernel[0] == 1 || kernel[0] == 3) && kernel[1] == 3 && kernel[2] == 3;
  if (!fewer_products_allowed()) return kFewerProductsRefused;
  if (!kernels::kernels().winograd4) return "needs AVX2";
  if (p.groups != 1) return "takes one group only";
  if (!square) return "takes 3x3 and 3x3x3 kernels only";
  if (!all(p.stride, 1)) return "takes stride 1 only";
  if (!all(p.dilation, 1)) return "takes dilation 1 only";
  if (!p.blocked()) return kOneFormat;
  return p.dst_format.block % 8 == 0 ? nullptr : "takes blocks of whole vectors only";
}

namespace {

// So many groups as fill whole blocks of src and dst are one convolution, whose weights between
// groups are 0: of groups of 8 channels two in a block of 16, with half of the products in vain.
// `count` such bundles of `groups` lie beside each other; none where groups are left over. F(4x4)
// has a quarter of the products, so that more than kMostGroups cannot win.
struct Bundles {
  std::int64_t count, groups;
};
constexpr std::int64_t kMostGroups = 4;

Bundles bundles_of(const Problem& p) {
  if (p.groups == 1) return {1, 1};
  const auto filling = [&](std::int64_t channels) {
    return p.dst_format.block / std::gcd(channels / p.groups, p.dst_format.block);
  };
  const std::int64_t groups = std::lcm(filling(p.src_dims[1]), filling(p.dst_dims[1]));
  return {p.groups % groups == 0 ? p.groups / groups : 0, groups};
}

// The problem of one bundle.
Problem bundle_of(const Problem& p) {
  const auto [count, groups] = bundles_of(p);
  Problem q = p;
  q.groups = 1;
  q.src_dims[1] /= count;
  q.dst_dims[1] /= count;
  q.weight_dims[p.transposed ? 0 : 1] = q.src_dims[1];
  q.weight_dims[p.transposed ? 1 : 0] = q.dst_dims[1];
  return q;
}

// The weight of one bundle: for weight [OC, IC / groups, *kernel], transposed
// [IC, OC / groups, *kernel], zeros but for its groups' blocks along the diagonal.
at::Tensor weight_of_bundle(const Problem& p, const at::Tensor& weight, std::int64_t bundle) {
  const std::int64_t groups = bundles_of(p).groups;
  const std::int64_t rows = weight.size(0) / p.groups, columns = weight.size(1);
  const at::Tensor own = weight.narrow(0, bundle * groups * rows, groups * rows);
  if (groups == 1) return own;
  Dims dims = weight.sizes().vec();
  dims[0] = groups * rows;
  dims[1] = groups * columns;
  const at::Tensor whole = at::zeros(dims, weight.options());
  for (std::int64_t i = 0; i < groups; ++i) {
    whole.narrow(0, i * rows, rows)
        .narrow(1, i * columns, columns)
        .copy_(own.narrow(0, i * rows, rows));
  }
  return whole;
}

// A transposed convolution at stride 1, the gradient by src of one, is one with flipped weights and
// the padding that is left of the kernel.
WinogradShape shape_of(const Problem& p) {
  WinogradShape shape{
      .ic = p.src_dims[1],
      .oc = p.dst_dims[1],
      .block = p.dst_format.block,
      .in = spatial_of(p.src_dims),
      .out = spatial_of(p.dst_dims),
      .padding = as_3d(p.padding, 0),
      .stream = p.dtype == at::kFloat &&
                c10::multiply_integers(p.dst_dims) * static_cast<std::int64_t>(sizeof(float)) >
                    kStreamBytes};
  const Sizes3 kernel = spatial_of(p.weight_dims);
  for (std::size_t i = 0; p.transposed && i < 3; ++i) {
    shape.padding[i] = kernel[i] - 1 - shape.padding[i];
  }
  return shape;
}

std::int64_t tiles_of(const Problem& p, const Sizes3& tile) {
  const Sizes3 out = spatial_of(p.dst_dims);
  return p.dst_dims[0] * ceil_div(out[0], tile[0]) * ceil_div(out[1], tile[1]) *
         ceil_div(out[2], tile[2]);
}

std::int64_t padded_outputs(const Winograd& kernel, std::int64_t oc, std::int64_t block) {
  return round_up(round_up(oc, block), kernel.channels / 2);
}

// Floats of U.
std::int64_t u_size(const Winograd& kernel, const WinogradShape& shape) {
  return kernel.positions * ceil_div(shape.ic, kernel.input_channels) *
         padded_outputs(kernel, shape.oc, shape.block);
}

kernels::WinogradWeights weights_of(const Problem& p, const at::Tensor& weight) {
  const float* data = weight.const_data_ptr<float>();
  Sizes3 strides = as_3d(weight.strides().slice(2), 0);
  const Sizes3 taps = spatial_of(p.weight_dims);
  for (std::size_t i = 0; p.transposed && i < 3; ++i) {
    data += (taps[i] - 1) * strides[i];
    strides[i] = -strides[i];
  }
  return {.data = data,
          .oc = p.dst_dims[1],
          .ic = p.src_dims[1],
          .oc_stride = weight.stride(p.transposed ? 1 : 0),
          .ic_stride = weight.stride(p.transposed ? 0 : 1),
          .d_stride = strides[0],
          .h_stride = strides[1],
          .w_stride = strides[2]};
}

}  // namespace

namespace {

// One bundle's weights to its U.
void pack_bundle(const Winograd& kernel, const Problem& p, const at::Tensor& weight, float* u) {
  const std::int64_t ic = p.src_dims[1], width = kernel.channels / 2;
  const std::int64_t padded_oc = padded_outputs(kernel, p.dst_dims[1], p.dst_format.block);
  const kernels::WinogradWeights weights = weights_of(p, weight);
  // A unit: one group of output channels, kChannels input channels. Its vectors share cache lines.
  constexpr std::int64_t kChannels = 16;
  const std::int64_t parts = ceil_div(ic, kChannels);
  const auto pack_unit = [&](std::int64_t group, std::int64_t first) {
    const std::int64_t end = std::min(padded_oc, (group + 1) * kernel.channels);
    for (std::int64_t channel = group * kernel.channels; channel < end; channel += width) {
      kernel.weights(weights, channel, first, std::min(ic, first + kChannels), padded_oc, u);
    }
  };
  parallel_units(ceil_div(padded_oc, kernel.channels) * parts,
                 kernel.positions * kChannels * kernel.channels,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t unit = begin; unit < end; ++unit) {
                     pack_unit(unit / parts, unit % parts * kChannels);
                   }
                 });
}

}  // namespace

at::Tensor pack_winograd(const Winograd& kernel, const Problem& p, const at::Tensor& narrow) {
  const at::Tensor weight = narrow.to(at::kFloat);
  const Problem q = bundle_of(p);
  const std::int64_t count = bundles_of(p).count, floats = u_size(kernel, shape_of(q));
  const at::Tensor packed = empty_pooled({count * floats}, weight.options());
  trace::Timed timed(trace::Kind::kPack, "convolution",
                     static_cast<std::int64_t>(narrow.nbytes() + packed.nbytes()));
  float* u = packed.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < count; ++i) {
    pack_bundle(kernel, q, weight_of_bundle(p, weight, i), u + i * floats);
  }
  return packed;
}

namespace {

struct Units {
  std::int64_t tiles, blocks, groups;  // blocks of tiles, groups of output channels
  std::int64_t rows;                   // tiles that the kernel multiplies at a time

  // Whole rows: 49 tiles are 7 rows of 7 in two blocks, not 8 of 6 or 7 (1.1 to 1.2 times as fast).
  std::int64_t first_of(std::int64_t block) const {
    return std::min(tiles, block * ceil_div(tiles, rows) / blocks * rows);
  }
  WinogradTiles block(std::int64_t i) const { return {first_of(i), first_of(i + 1) - first_of(i)}; }
  std::int64_t largest() const {
    return std::min(tiles, ceil_div(ceil_div(tiles, rows), blocks) * rows);
  }
};

Units units_of(const Winograd& kernel, const WinogradShape& shape, std::int64_t tiles) {
  // The blocks' unused lanes are computed too: as zeros.
  const std::int64_t groups =
      ceil_div(ceil_div(shape.oc, shape.block) * shape.block, kernel.channels);
  const auto floats = [&](std::int64_t count) {
    return kernel.v_size(shape, count) + kernel.m_size(shape, count);
  };
  const std::int64_t tile_bytes =
      (floats(2) - floats(1)) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t most =
      ceil_div(std::max(kLeastTiles, kMostBytes / tile_bytes), kernel.group_tiles) *
      kernel.group_tiles;
  // As few blocks as that allows, but so many that the busiest thread has the least to do.
  const std::int64_t threads = torch_blocked::threads();
  const std::int64_t least = ceil_div(tiles, most);
  const std::int64_t rows = kernel.group_tiles;
  const auto busiest = [&](std::int64_t blocks) {
    return ceil_div(shape.groups * blocks * groups, threads) *
           Units{tiles, blocks, groups, rows}.largest();
  };
  std::int64_t blocks = least;
  for (std::int64_t more = least; more <= std::min(ceil_div(tiles, rows), least + threads);
       ++more) {
    if (busiest(more) < busiest(blocks)) blocks = more;
  }
  return {tiles, blocks, groups, rows};
}

// Several groups are float32's.
const float* src_of(const WinogradShape& shape, const void* src, std::int64_t group) {
  return static_cast<const float*>(src) + group * shape.ic * c10::multiply_integers(shape.in);
}

kernels::WinogradDst dst_of(const WinogradShape& shape, kernels::WinogradDst dst,
                            std::int64_t group) {
  const std::int64_t floats = group * shape.oc * c10::multiply_integers(shape.out);
  if (dst.bias) dst.bias += group * shape.oc;
  if (dst.residual) dst.residual = static_cast<const float*>(dst.residual) + floats;
  dst.dst = static_cast<float*>(dst.dst) + floats;
  return dst;
}

}  // namespace

void run_winograd(const Winograd& kernel, const WinogradShape& shape, std::int64_t tiles,
                  const void* src, const void* weights, const kernels::WinogradDst& dst) {
  const Units units = units_of(kernel, shape, tiles);
  const std::int64_t u_floats = u_size(kernel, shape);
  share_units(shape.groups * units.blocks * units.groups, kLargeUnit, [&](Pieces& pieces) {
    const std::int64_t most = units.largest();
    const std::int64_t v_size = kernel.v_size(shape, most);
    float* v = workspace(v_size + kernel.m_size(shape, most));
    float* m = v + v_size;
    std::int64_t in_v = -1;  // the group's block whose src is transformed there
    const auto run_unit = [&](std::int64_t i, std::int64_t outputs) {
      const std::int64_t group = i / units.blocks;
      const WinogradTiles block = units.block(i % units.blocks);
      if (std::exchange(in_v, i) != i) kernel.src(shape, block, src_of(shape, src, group), v);
      kernel.multiply(shape, block.count, outputs, v,
                      static_cast<const float*>(weights) + group * u_floats, m);
      kernel.dst(shape, block, outputs, m, dst_of(shape, dst, group));
    };
    for (Range piece; pieces.next(piece);) {
      for (std::int64_t unit = piece.begin; unit < piece.end; ++unit) {
        run_unit(unit / units.groups, unit % units.groups);
      }
    }
  });
}

ConvolutionPlan plan_winograd(const Problem& p, const Winograd& kernel) {
  return ConvolutionPlan{
      .weights_format =
          text("winograd", kernel.tile[2], "/", kernel.channels, "/", p.dst_format.block,
               kernel.input_channels > 1 ? "/pairs" : "",
               p.groups > 1 ? text("/groups ", p.groups) : "", p.transposed ? "/transposed" : ""),
      .pack = [p, &kernel](const at::Tensor& weight) { return pack_winograd(kernel, p, weight); },
      .run =
          [epilogue = p.epilogue, &kernel, shape = winograd_shape(p),
           tiles = tiles_of(p, kernel.tile)](const ConvolutionBuffers& buffers) {
            run_winograd(
                kernel, shape, tiles, buffers.src, buffers.weights,
                {static_cast<const float*>(buffers.bias), buffers.residual, buffers.dst, epilogue});
          },
      .loops_only = true};
}

namespace {

std::optional<ConvolutionPlan> plan(const Problem& p, const Winograd& kernel) {
  if (refuses_winograd(p)) return std::nullopt;
  return plan_winograd(p, kernel);
}

std::optional<ConvolutionPlan> plan_bfloat16(const Problem& p, const Winograd& kernel) {
  if (refuses_winograd_bfloat16(p)) return std::nullopt;
  return with_float_bias(plan_winograd(p, kernel), p.dst_dims[1]);
}

const Winograd& fixed_kernel() {
  const kernels::Kernels& table = kernels::kernels();
  return multiplies_bytes() ? *table.winograd4_fixed_vnni : *table.winograd4_fixed;
}

// [padded output channels] for weight [OC, IC, *kernel].
at::Tensor fixed_scales(const Winograd& kernel, const Problem& p, const at::Tensor& weight) {
  const kernels::WinogradWeights weights = weights_of(p, weight);
  const std::int64_t width = kernel.channels / 2;
  const std::int64_t padded_oc = padded_outputs(kernel, weights.oc, p.dst_format.block);
  const at::Tensor scales = at::empty({padded_oc}, at::kFloat);
  auto* to = scales.mutable_data_ptr<float>();
  parallel_units(padded_oc / width, kLargeUnit, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      kernel.weight_scales(weights, i * width, to + i * width);
  });
  return scales;
}

// U of weights times their scales, and then 1 / these.
at::Tensor pack_fixed(const Winograd& kernel, const Problem& p, const at::Tensor& narrow) {
  const at::Tensor weight = narrow.to(at::kFloat), scales = fixed_scales(kernel, p, weight);
  Dims shape(static_cast<std::size_t>(weight.dim()), 1);
  shape[p.transposed ? 1 : 0] = p.dst_dims[1];
  const at::Tensor of_channels = scales.narrow(0, 0, p.dst_dims[1]).view(shape);
  const at::Tensor u = pack_winograd(kernel, p, at::mul(weight, of_channels));
  return at::cat({u, at::reciprocal(scales)});
}

// What a problem costs in FMAs per pair of input and output channel: `products` for each tile, by
// as many transformed weights, where a direct convolution has one for each tap and output.
//
// Measured on Zen 4, one thread: the transforms of src and dst take as long as `src` and `dst` FMAs
// per tile and channel. GF/s of F(4x4), F(2x2) and oneDNN's direct kernel, caches warm:
//   64@56    380 225 118     64@14   238 195 120     64@7   170 125 111     512@7 x 4   244 170 128
//   128@28   410 240 120     128@14  293 228 126     128@7  253 160 130     512@4        41 210  95
//   256@14   318 246 126     16@56   220 154 111     512@7  220 178 120     64@4         79  93  76
// and from memory: 512@7 139 141 99, 256@7 110 120 91. In 3-D, where direct skips padded planes:
//   64@16x24x24 453 280 125    128@8x12x12 503 312 137    32@32x48x48 354 249 117
//   128@4x6x6   294 306 165
// With AVX2's 16 registers the transform of dst costs three times as many FMAs. Milliseconds of
// F(4x4), F(2x2) and direct:
//   3-64@224 2.11 2.83 1.90    3-16@224 0.70 0.90 0.49    4-64@224 2.29 3.13 2.48
//   8-64@112 0.77 0.96 1.06    16-16@112 0.33 0.48 0.56   8-8@112  0.18 0.23 0.20
struct Cost {
  Sizes3 tile;
  double products, src, dst;
};

struct Costs {
  Cost f4, f2;
};
// Of bfloat16, where F(2x2) sums two products in one instruction. GF/s of F(4x4), F(2x2) and
// oneDNN's direct kernel on Zen 4, one thread:
//   64@56  298 310 210    128@28 323 376 216    256@14 262 406 209    512@7  137 299 183
//   16@56  137 134 155    32@112 250 253 214    64@14  157 208 168    512@28 372 454 228
constexpr Costs kBfloats{.f4 = {{1, 4, 4}, 36, 600, 400}, .f2 = {{1, 2, 2}, 8, 200, 100}};
// F(4x4) in fixed point, two products in one instruction. GF/s of it, F(2x2) and F(4x4) in float32
// on Zen 5, one thread:
//   64@56  1125 820 790    128@28 1340 940 855    256@14 1190 1015 640    512@28 1750 1130 950
// and with AVX2, without VNNI:
//   64@56   520 220 425    128@28  635 225 445    256@14  545  225 350    512@28  790  245 490
constexpr Cost kFixed{{1, 4, 4}, 18, 650, 400};
constexpr Costs kFlat{.f4 = {{1, 4, 4}, 36, 280, 150}, .f2 = {{1, 2, 2}, 16, 90, 50}},
    kFlatAvx2{.f4 = {{1, 4, 4}, 36, 280, 450}, .f2 = {{1, 2, 2}, 16, 90, 125}},
    kDeep{.f4 = {{2, 4, 4}, 144, 2200, 1200}, .f2 = {{2, 2, 2}, 64, 620, 330}};

double microseconds(const Problem& p, const Cost& cost) {
  const Problem q = bundle_of(p);
  const auto tiles = static_cast<double>(tiles_of(q, cost.tile));
  const auto ic = static_cast<double>(q.src_dims[1]), oc = static_cast<double>(q.dst_dims[1]);
  return static_cast<double>(bundles_of(p).count) *
         microseconds_of(
             (streamed_fmas(cost.products, tiles) + tiles * (cost.src / oc + cost.dst / ic)) * ic *
             oc);
}

double estimate(const Problem& p, Cost Costs::* which) {
  if (refuses_winograd(p)) return kNever;
  const Costs& costs = is_deep(p) ? kDeep : isa() == Isa::kAvx2 ? kFlatAvx2 : kFlat;
  return microseconds(p, costs.*which);
}

double estimate_bfloat16(const Problem& p, Cost Costs::* which) {
  if (refuses_winograd_bfloat16(p)) return kNever;
  return microseconds(p, kBfloats.*which);
}

}  // namespace

bool winograd_possible(const Problem& p) { return p.groups == 1 && !refuses_winograd(p); }

const char* refuses_winograd(const Problem& p) {
  if (p.dtype != at::kFloat) return "computes float32 only";
  if (!p.blocked()) return kOneFormat;
  if (bundles_of(p).count == 0) return "takes groups that fill whole blocks";
  if (bundles_of(p).groups > kMostGroups) return "takes groups of a quarter of a block and more";
  return refuses_winograd_sizes(bundle_of(p));
}

const char* refuses_winograd_bfloat16(const Problem& p) {
  if (p.dtype != at::kBFloat16) return "is for bfloat16";
  if (!multiplies_bfloats()) return "has no kernel for the dtype on this CPU";
  if (const char* refusal = refuses_winograd_sizes(p)) return refusal;
  if (is_deep(p)) return "takes 3x3 kernels only";
  return p.dst_format.block == kernels::kernels().width ? nullptr : "takes the CPU's own blocks";
}

WinogradShape winograd_shape(const Problem& p) {
  WinogradShape shape = shape_of(bundle_of(p));
  shape.groups = bundles_of(p).count;
  return shape;
}

std::int64_t winograd_tiles(const Problem& p, const Sizes3& tile) { return tiles_of(p, tile); }

double estimate_winograd4(const Problem& p) { return estimate(p, &Costs::f4); }

double estimate_winograd2(const Problem& p) { return estimate(p, &Costs::f2); }

double estimate_winograd4_bfloat16(const Problem& p) { return estimate_bfloat16(p, &Costs::f4); }

double estimate_winograd2_bfloat16(const Problem& p) { return estimate_bfloat16(p, &Costs::f2); }

std::optional<ConvolutionPlan> plan_winograd4(const Problem& p) {
  const kernels::Kernels& table = kernels::kernels();
  return plan(p, is_deep(p) ? *table.winograd4_3d : *table.winograd4);
}

std::optional<ConvolutionPlan> plan_winograd2(const Problem& p) {
  const kernels::Kernels& table = kernels::kernels();
  return plan(p, is_deep(p) ? *table.winograd2_3d : *table.winograd2);
}

std::optional<ConvolutionPlan> plan_winograd4_bfloat16(const Problem& p) {
  return plan_bfloat16(p, *kernels::kernels().winograd4_bfloats);
}

double estimate_winograd4_fixed(const Problem& p) {
  if (refuses_winograd_bfloat16(p)) return kNever;
  return microseconds(p, kFixed);
}

std::optional<ConvolutionPlan> plan_winograd4_fixed(const Problem& p) {
  if (refuses_winograd_bfloat16(p)) return std::nullopt;
  const Winograd& kernel = fixed_kernel();
  ConvolutionPlan plan = plan_winograd(p, kernel);
  plan.weights_format = "fixed " + plan.weights_format;
  plan.pack = [p, &kernel](const at::Tensor& weight) { return pack_fixed(kernel, p, weight); };
  plan.run = [epilogue = p.epilogue, &kernel, shape = shape_of(p),
              tiles = tiles_of(p, kernel.tile)](const ConvolutionBuffers& buffers) {
    const auto* u = static_cast<const float*>(buffers.weights);
    run_winograd(kernel, shape, tiles, buffers.src, u,
                 {.bias = static_cast<const float*>(buffers.bias),
                  .residual = buffers.residual,
                  .dst = buffers.dst,
                  .epilogue = epilogue,
                  .scales = u + u_size(kernel, shape)});
  };
  return with_float_bias(std::move(plan), p.dst_dims[1]);
}

std::optional<ConvolutionPlan> plan_winograd2_bfloat16(const Problem& p) {
  return plan_bfloat16(p, *kernels::kernels().winograd2_bfloats);
}

}  // namespace torch_blocked

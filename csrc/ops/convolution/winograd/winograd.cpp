// Our Winograd convolution. For float32 it takes any kernel with any dilation or with stride 2, and
// groups that fill whole blocks. For bfloat16 it takes 3x3 kernels and computes in float32,
// bfloat16 or fixed point.
//
// A unit of work is a block of tiles and a group of output channels, blocks outermost. A thread
// takes a run of units. It transforms the input of a block when it enters it, and keeps V and M in
// its L2. Two threads in one block both transform its input, which costs less than waiting for each
// other. The blocking changes no bit of the result: each output is one sum over the input channels,
// in order.
//
// Transformed weights are often larger than the caches. So the weights of each position are
// prefetched during the products of the position before, an equal share with each tile. A burst
// would wait for memory, which would then idle. Direct convolutions prefetch their weights the same
// way.
//
// In fixed point (`winograd4_fixed`) each tile of src is scaled by its largest value. Each output
// channel of the weights is scaled so that sums of 64 products fit in 32 bits for any src. That
// leaves 15 bits for src and 10 or more for weights; bfloat16 has 8. It is 1.2 to 1.5 times as fast
// as F(2x2) on bfloat16, and closer to the exact result.
#include "ops/convolution/winograd/winograd.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/reciprocal.h>

#include <algorithm>
#include <array>
#include <utility>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/convolution_time.h"
#include "runtime/isa.h"
#include "runtime/memory/workspace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;
using kernels::Winograd;
using kernels::WinogradShape;
using kernels::WinogradTiles;

// V and M of a block of tiles should take about this much of L2, so that a position's U fits too.
// But every block streams all of U once, so a block has at least kLeastTiles tiles to use each
// weight. 56 instead of 24 is 1.0 to 1.1 times as fast at 512@28; with AVX-512 it gains less often
// than with AVX2.
constexpr std::int64_t kMostBytes = 320 << 10;
constexpr std::int64_t kLeastTiles = 56;

struct Units {
  std::int64_t tiles, blocks, groups;  // blocks of tiles, groups of output channels
  std::int64_t rows;                   // tiles that the kernel multiplies at a time

  // Blocks consist of whole rows: 49 tiles in two blocks are 7 rows of 7, not 8 rows of 6 or 7
  // (1.1 to 1.2 times as fast).
  std::int64_t first_of(std::int64_t block) const {
    return std::min(tiles, block * ceil_div(tiles, rows) / blocks * rows);
  }
  WinogradTiles block(std::int64_t i) const { return {first_of(i), first_of(i + 1) - first_of(i)}; }
  std::int64_t largest() const {
    return std::min(tiles, ceil_div(ceil_div(tiles, rows), blocks) * rows);
  }
  // How often each tile of src is transformed, for `bundles` such shapes. Every thread that works
  // in a block transforms it.
  double src_transforms(std::int64_t bundles) const {
    const std::int64_t all = bundles * blocks,
                       busy = std::min<std::int64_t>(threads(), all * groups);
    return std::max(1., static_cast<double>(busy) / static_cast<double>(all));
  }
  // How many times as long the busiest thread works as the mean one. This factor makes estimates
  // for one thread comparable on several: two units on 16 threads take as long as on two.
  double unevenness(std::int64_t bundles) const {
    const std::int64_t units = bundles * blocks * groups, busiest = ceil_div(units, threads());
    return static_cast<double>(busiest * threads()) / static_cast<double>(units);
  }
};

Units units_of(const Winograd& kernel, const WinogradShape& shape, std::int64_t tiles) {
  // The unused lanes of blocks are computed too, as zeros.
  const std::int64_t groups =
      ceil_div(ceil_div(shape.oc, shape.block) * shape.block, kernel.channels);
  const auto floats = [&](std::int64_t count) {
    return kernel.v_size(shape, count) + kernel.m_size(shape, count);
  };
  const std::int64_t tile_bytes =
      (floats(2) - floats(1)) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t least_tiles =
      ceil_div(kLeastTiles * kernel.position_weights, kernel.positions);
  const std::int64_t most =
      round_up(std::max(least_tiles, kMostBytes / tile_bytes), kernel.group_tiles);
  // Takes few blocks, but enough of them that the busiest thread has the least to do.
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

// The src of a group. Only float32 has several groups.
const float* src_of(const WinogradShape& shape, const void* src, std::int64_t group) {
  return static_cast<const float*>(src) + group * shape.src_ic * c10::multiply_integers(shape.in);
}

kernels::WinogradDst dst_of(const WinogradShape& shape, kernels::WinogradDst dst,
                            std::int64_t group) {
  const std::int64_t floats = group * shape.oc * c10::multiply_integers(shape.out);
  if (dst.bias) dst.bias += group * shape.oc;
  if (dst.residual) dst.residual = static_cast<const float*>(dst.residual) + floats;
  dst.dst = static_cast<float*>(dst.dst) + floats;
  return dst;
}

// Whether tiles are counted in the order of dst. Then each tile consists of neighbouring pixels.
bool writes_rows(const Problem& p) {
  return WinogradOrder(p).dims == WinogradSizes{0, 1, 2} && are_all(p.dilation, 1);
}

// Reports the stored pixels of `tiles` and a group of output channels, row by row.
void call_on_stored(const Winograd& kernel, const WinogradShape& shape, WinogradTiles tiles,
                    std::int64_t group, std::int64_t outputs, const OnStored& on_stored) {
  const auto& [depth, height, width] = shape.out;
  const auto& [m_depth, m_height, m_width] = kernel.tile;
  const std::int64_t planes = ceil_div(depth, m_depth), rows = ceil_div(height, m_height),
                     columns = ceil_div(width, m_width), blocks = ceil_div(shape.oc, shape.block),
                     first_block = outputs * kernel.channels / shape.block,
                     end_block = std::min(
                         blocks,
                         std::max(first_block + 1, (outputs + 1) * kernel.channels / shape.block));
  const auto call = [&](std::int64_t image, std::int64_t first, std::int64_t pixels) {
    for (std::int64_t block = first_block; block < end_block; ++block) {
      on_stored((image * shape.groups + group) * blocks + block, first, pixels);
    }
  };
  for (std::int64_t i = tiles.first, end = i + tiles.count, count; i < end; i += count) {
    const std::int64_t column = i % columns, row = i / columns % rows,
                       plane = i / columns / rows % planes, image = i / columns / rows / planes;
    count = std::min(columns - column, end - i);
    const std::int64_t x = column * m_width,
                       pixels = std::min((column + count) * m_width, width) - x;
    const std::int64_t y_end = std::min((row + 1) * m_height, height);
    for (std::int64_t z = plane * m_depth; z < std::min((plane + 1) * m_depth, depth); ++z) {
      for (std::int64_t y = row * m_height; y < y_end; ++y) {
        call(image, (z * height + y) * width + x, pixels);
      }
    }
  }
}

}  // namespace

void run_winograd(const Winograd& kernel, const WinogradShape& shape, std::int64_t tiles,
                  const void* src, const void* weights, const kernels::WinogradDst& dst,
                  const OnStored* on_stored) {
  const Units units = units_of(kernel, shape, tiles);
  const std::int64_t u_floats = winograd_u_size(kernel, shape);
  share_units(shape.groups * units.blocks * units.groups, kLargeUnit, [&](Pieces& pieces) {
    const std::int64_t most = units.largest();
    const std::int64_t v_size = kernel.v_size(shape, most);
    float* v = workspace(v_size + kernel.m_size(shape, most));
    float* m = v + v_size;
    std::int64_t in_v = -1;  // the block that V has now
    const auto run_unit = [&](std::int64_t i, std::int64_t outputs) {
      const std::int64_t group = i / units.blocks;
      const WinogradTiles block = units.block(i % units.blocks);
      if (std::exchange(in_v, i) != i) kernel.src(shape, block, src_of(shape, src, group), v);
      kernel.multiply(shape, block.count, outputs, v,
                      static_cast<const float*>(weights) + group * u_floats, m);
      kernel.dst(shape, block, outputs, m, dst_of(shape, dst, group));
      if (on_stored) call_on_stored(kernel, shape, block, group, outputs, *on_stored);
    };
    for (Range piece; pieces.next(piece);) {
      for (std::int64_t unit = piece.begin; unit < piece.end; ++unit) {
        run_unit(unit / units.groups, unit % units.groups);
      }
    }
  });
}

LayerPlan plan_winograd(const Problem& p, const Winograd& kernel) {
  return LayerPlan{
      .weights_format =
          text("winograd", kernel.tile[2], "/", kernel.channels, "/", p.dst_format.block,
               kernel.input_channels > 1 ? "/pairs" : "",
               is_for_stride2(p) ? text("/stride 2 by ", kernel.taps[2]) : "",
               has_own_taps(kernel, winograd_bundle(p)) ? "" : text("/parts of ", p.weight_dims),
               p.groups > 1 ? text("/groups ", p.groups) : "", p.transposed ? "/transposed" : ""),
      .pack = [p, &kernel](const at::Tensor& weight) { return pack_winograd(kernel, p, weight); },
      .packed_bytes = packed_winograd_floats(kernel, p) * kFloatBytes,
      .run =
          [epilogue = p.epilogue, &kernel, shape = winograd_shape(p, kernel.taps),
           tiles = winograd_tiles(p, kernel.tile)](const LayerBuffers& buffers) {
            WinogradShape own = shape;
            own.stream &= !buffers.on_stored;
            run_winograd(
                kernel, own, tiles, buffers.src, buffers.weights,
                {static_cast<const float*>(buffers.bias), buffers.residual, buffers.dst, epilogue},
                buffers.on_stored);
          },
      .loops_only = true,
      .calls_on_stored = writes_rows(p)};
}

namespace {

// The kernel with the fewest products: F(4, 3), or F(3, 4) for some kernels of more than 3 taps,
// such as 4, 7 and 8. At stride 2 it is the one with the best number of taps.
const Winograd* large_tiles(const Problem& p) {
  const kernels::Kernels& table = kernels::kernels();
  const auto products = [&](const Winograd* kernel) {
    return winograd_tiles(p, kernel->tile) * kernel->positions *
           c10::multiply_integers(winograd_parts(p, kernel->taps));
  };
  const auto least = [&](std::initializer_list<const Winograd*> kernels) {
    return *std::ranges::min_element(kernels, {}, products);
  };
  if (is_for_stride2(p)) {
    return least({table.winograd4_stride2, table.winograd4_stride2_4taps,
                  table.winograd4_stride2_5taps, table.winograd4_stride2_6taps});
  }
  switch (WinogradOrder(p).wide) {
    case 1:
      return least({table.winograd4_1d, table.winograd3_1d});
    case 2:
      return least({table.winograd4, table.winograd3});
    default:
      return table.winograd4_3d;
  }
}

const Winograd* small_tiles(const Problem& p) {
  const kernels::Kernels& table = kernels::kernels();
  if (is_for_stride2(p)) return table.winograd2_stride2;
  const std::array of_dims{static_cast<const Winograd*>(nullptr), table.winograd2,
                           table.winograd2_3d};
  return of_dims[WinogradOrder(p).wide - 1];
}

std::optional<LayerPlan> plan(const Problem& p, const Winograd* (*kernel_of)(const Problem&)) {
  const Winograd* kernel = kernel_of(p);
  return kernel ? std::optional(plan_winograd(p, *kernel)) : std::nullopt;
}

std::optional<LayerPlan> plan_bfloat16(const Problem& p, const Winograd& kernel) {
  return with_float_bias(plan_winograd(p, kernel), p.dst_dims[1]);
}

const Winograd& fixed_kernel() {
  const kernels::Kernels& table = kernels::kernels();
  return multiplies_bytes() ? *table.winograd4_fixed_vnni : *table.winograd4_fixed;
}

// The scales [padded output channels] of weight [OC, IC, *kernel].
at::Tensor fixed_scales(const Winograd& kernel, const Problem& p, const at::Tensor& weight) {
  const kernels::WinogradWeights weights = winograd_weights(p, weight);
  const std::int64_t width = kernel.channels / 2;
  const std::int64_t padded_oc = winograd_padded_outputs(kernel, weights.oc, p.dst_format.block);
  const at::Tensor scales = at::empty({padded_oc}, at::kFloat);
  auto* to = scales.mutable_data_ptr<float>();
  parallel_units(padded_oc / width, kLargeUnit, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      kernel.weight_scales(weights, i * width, to + i * width);
  });
  return scales;
}

// U of the scaled weights, followed by 1 / scale of each channel.
at::Tensor pack_fixed(const Winograd& kernel, const Problem& p, const at::Tensor& narrow) {
  const at::Tensor weight = narrow.to(at::kFloat), scales = fixed_scales(kernel, p, weight);
  Dims shape(static_cast<std::size_t>(weight.dim()), 1);
  shape[p.transposed ? 1 : 0] = p.dst_dims[1];
  const at::Tensor of_channels = scales.narrow(0, 0, p.dst_dims[1]).view(shape);
  const at::Tensor u = pack_winograd(kernel, p, at::mul(weight, of_channels));
  return at::cat({u, at::reciprocal(scales)});
}

// The cost of a problem in FMAs per pair of input and output channel: `products` for each tile,
// with as many transformed weights. A direct convolution has one for each tap and output.
//
// Measured on Zen 4, one thread: the transforms of src and dst take as long as `src` and `dst` FMAs
// per tile and channel. GF/s of F(4x4), F(2x2) and oneDNN's direct kernel, caches warm:
//   64@56    380 225 118     64@14   238 195 120     64@7   170 125 111     512@7 x 4   244 170 128
//   128@28   410 240 120     128@14  293 228 126     128@7  253 160 130     512@4        41 210  95
//   256@14   318 246 126     16@56   220 154 111     512@7  220 178 120     64@4         79  93  76
// With weights from memory: 512@7 139 141 99, 256@7 110 120 91. In 3-D, where direct skips padded
// planes:
//   64@16x24x24 453 280 125    128@8x12x12 503 312 137    32@32x48x48 354 249 117
//   128@4x6x6   294 306 165
// With AVX2's 16 registers the transform of dst costs three times as many FMAs. Milliseconds of
// F(4x4), F(2x2) and direct:
//   3-64@224 2.11 2.83 1.90    3-16@224 0.70 0.90 0.49    4-64@224 2.29 3.13 2.48
//   8-64@112 0.77 0.96 1.06    16-16@112 0.33 0.48 0.56   8-8@112  0.18 0.23 0.20
//
// On Xeons with AMX, memory is slower relative to FMAs: reading a transformed weight takes as long
// as its products with 10 to 20 tiles (`weights`). This was fitted to 350 times of layers of 44
// models on one thread, which spread by a factor of 1.1 to 1.15. Without it F(4x4) of 256@14 was
// estimated at 0.66 ms and took 1.29. That kept `amx`, which takes 0.80, from being timed.
struct Cost {
  double products, src, dst, weights = 0;
};

struct Costs {
  Cost f4, f2;
};
// For bfloat16, where F(2x2) sums two products in one instruction. GF/s of F(4x4), F(2x2) and
// oneDNN's direct kernel on a Zen 4, one thread:
//   64@56  298 310 210    128@28 323 376 216    256@14 262 406 209    512@7  137 299 183
//   16@56  137 134 155    32@112 250 253 214    64@14  157 208 168    512@28 372 454 228
constexpr Costs kBfloats{.f4 = {36, 600, 400}, .f2 = {8, 200, 100}};
// For F(4x4) in fixed point, which sums two products in one instruction. GF/s of it, F(2x2) and
// F(4x4) in float32 on a Zen 5, one thread:
//   64@56  1125 820 790    128@28 1340 940 855    256@14 1190 1015 640    512@28 1750 1130 950
// and with AVX2, without VNNI:
//   64@56   520 220 425    128@28  635 225 445    256@14  545  225 350    512@28  790  245 490
constexpr Cost kFixed{18, 650, 400};
// At stride 2, costs for each position of a tile, because the number of positions depends on the
// kernel's taps. Microseconds of F(4x4), F(2x2) and direct on a Zen 3, one thread, by the map of
// dst:
//   32-64@56   1060 1140 1260    64-64@56   1930 2080 2520    64-128@28  270 240 315
//   128-256@28 3200 3650 4870    256-256@14 2000 1760 2560    512-512@7 3550 2270 2860
// With AVX-512 and AMX they are assumed to be those at stride 1.
constexpr Costs kStride2{.f4 = {1, 8, 4.5}, .f2 = {1, 7, 4}},
    kStride2Avx2{.f4 = {1, 15, 11}, .f2 = {1, 11, 6}},
    kStride2Amx{.f4 = {0.93, 9, 8, 8}, .f2 = {0.85, 7, 7, 13}};
// In one dim, measured with 16 and 64 channels and 3 and 7 taps on a Xeon with AVX-512. For a
// kernel in parts `src` counts once for each part, because each has its own channels.
constexpr Costs kLine{.f4 = {6, 65, 40}, .f2 = {}};
constexpr Costs kFlat{.f4 = {36, 280, 150}, .f2 = {16, 90, 50}},
    kFlatAvx2{.f4 = {36, 280, 450}, .f2 = {16, 90, 125}},
    kDeep{.f4 = {144, 2200, 1200}, .f2 = {64, 620, 330}},
    kLineAmx{.f4 = {6, 100, 60, 18}, .f2 = {}},
    kFlatAmx{.f4 = {33, 330, 285, 17}, .f2 = {13, 110, 110, 20}},
    kDeepAmx{.f4 = {168, 4500, 80, 10}, .f2 = {60, 1000, 0, 18}};

const Costs& costs_of(const Problem& p) {
  if (is_for_stride2(p)) {
    return isa() == Isa::kAmx ? kStride2Amx : isa() == Isa::kAvx2 ? kStride2Avx2 : kStride2;
  }
  const std::size_t wide = WinogradOrder(p).wide;
  if (isa() == Isa::kAmx) return wide == 3 ? kDeepAmx : wide == 1 ? kLineAmx : kFlatAmx;
  if (wide == 2 && isa() == Isa::kAvx2) return kFlatAvx2;
  return wide == 3 ? kDeep : wide == 1 ? kLine : kFlat;
}

double microseconds(const Problem& p, const Winograd& kernel, const Cost& cost) {
  const Problem q = winograd_bundle(p);
  const WinogradShape shape = winograd_shape(p, kernel.taps);
  const Units units =
      units_of(kernel, shape, std::max<std::int64_t>(winograd_tiles(q, kernel.tile), 1));
  const auto tiles = static_cast<double>(units.tiles);
  const auto ic = static_cast<double>(shape.ic), oc = static_cast<double>(q.dst_dims[1]);
  const auto vectors = [&](double channels) {
    return std::max(channels, static_cast<double>(kernel.channels) / 2);
  };
  const double products = streamed_fmas(cost.products, tiles + cost.weights) * ic * oc,
               transforms = tiles * (units.src_transforms(shape.groups) * cost.src * vectors(ic) +
                                     cost.dst * vectors(oc));
  return static_cast<double>(shape.groups) * units.unevenness(shape.groups) *
         microseconds_of(products + transforms);
}

double estimate(const Problem& p, const Winograd* (*kernel_of)(const Problem&),
                Cost Costs::* which) {
  const Winograd* kernel = kernel_of(p);
  if (!kernel) return kNever;
  const auto& [products, src, dst, weights] = costs_of(p).*which;
  const double each = is_for_stride2(p) ? static_cast<double>(kernel->positions) : 1;
  return microseconds(p, *kernel, {each * products, each * src, each * dst, weights});
}

}  // namespace

double winograd_microseconds(const Problem& p, const Winograd& kernel) {
  const auto& [products, src, dst, weights] = costs_of(p).f4;
  const Cost& position = (isa() == Isa::kAmx    ? kStride2Amx
                          : isa() == Isa::kAvx2 ? kStride2Avx2
                                                : kStride2)
                             .f4;
  const bool has_own = kernel.positions == (WinogradOrder(p).wide == 1 ? 6 : 36);
  if (has_own) return microseconds(p, kernel, {products, src, dst, weights});
  const auto each = static_cast<double>(kernel.positions);
  return microseconds(
      p, kernel,
      {each * position.products, each * position.src, each * position.dst, position.weights});
}

namespace {

double estimate_winograd4(const Problem& p) { return estimate(p, large_tiles, &Costs::f4); }

double estimate_winograd2(const Problem& p) { return estimate(p, small_tiles, &Costs::f2); }

double estimate_winograd4_bfloat16(const Problem& p) {
  return microseconds(p, *kernels::kernels().winograd4_bfloats, kBfloats.f4);
}

double estimate_winograd2_bfloat16(const Problem& p) {
  return microseconds(p, *kernels::kernels().winograd2_bfloats, kBfloats.f2);
}

std::optional<LayerPlan> plan_winograd4(const Problem& p) { return plan(p, large_tiles); }

std::optional<LayerPlan> plan_winograd2(const Problem& p) { return plan(p, small_tiles); }

std::optional<LayerPlan> plan_winograd4_bfloat16(const Problem& p) {
  return plan_bfloat16(p, *kernels::kernels().winograd4_bfloats);
}

double estimate_winograd4_fixed(const Problem& p) {
  return microseconds(p, fixed_kernel(), kFixed);
}

std::optional<LayerPlan> plan_winograd4_fixed(const Problem& p) {
  const Winograd& kernel = fixed_kernel();
  LayerPlan plan = plan_winograd(p, kernel);
  plan.weights_format = "fixed " + plan.weights_format;
  plan.calls_on_stored = false;
  plan.pack = [p, &kernel](const at::Tensor& weight) { return pack_fixed(kernel, p, weight); };
  plan.packed_bytes = 0;
  plan.run = [epilogue = p.epilogue, &kernel, shape = winograd_shape(p),
              tiles = winograd_tiles(p, kernel.tile)](const LayerBuffers& buffers) {
    const auto* u = static_cast<const float*>(buffers.weights);
    run_winograd(kernel, shape, tiles, buffers.src, u,
                 {.bias = static_cast<const float*>(buffers.bias),
                  .residual = buffers.residual,
                  .dst = buffers.dst,
                  .epilogue = epilogue,
                  .scales = u + winograd_u_size(kernel, shape)});
  };
  return with_float_bias(std::move(plan), p.dst_dims[1]);
}

std::optional<LayerPlan> plan_winograd2_bfloat16(const Problem& p) {
  return plan_bfloat16(p, *kernels::kernels().winograd2_bfloats);
}

}  // namespace

constinit const ConvolutionImplementation convolutions::winograd4 = {
    .name = "winograd4",
    .refuses = refuses_winograd,
    .plan = plan_winograd4,
    .estimate = estimate_winograd4,
    .traits = {.sums_in_place = true},
};

constinit const ConvolutionImplementation convolutions::winograd2 = {
    .name = "winograd2",
    .refuses = refuses_winograd2,
    .plan = plan_winograd2,
    .estimate = estimate_winograd2,
    .traits = {.sums_in_place = true},
};

constinit const ConvolutionImplementation convolutions::winograd4_bfloat16 = {
    .name = "winograd4_bfloat16",
    .refuses = refuses_winograd_bfloat16,
    .plan = plan_winograd4_bfloat16,
    .estimate = estimate_winograd4_bfloat16,
    .traits = {.sums_in_place = true},
};

constinit const ConvolutionImplementation convolutions::winograd4_fixed = {
    .name = "winograd4_fixed",
    .refuses = refuses_winograd_bfloat16,
    .plan = plan_winograd4_fixed,
    .estimate = estimate_winograd4_fixed,
    .traits = {.sums_in_place = true},
};

constinit const ConvolutionImplementation convolutions::winograd2_bfloat16 = {
    .name = "winograd2_bfloat16",
    .refuses = refuses_winograd_bfloat16,
    .plan = plan_winograd2_bfloat16,
    .estimate = estimate_winograd2_bfloat16,
    .traits = {.sums_in_place = true},
};

}  // namespace torch_blocked

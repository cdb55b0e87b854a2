// The gradient of a 3x3 or 1x3x3 weight by Winograd's tiles of 4x4: a quarter of the products.
//
// src and diff_dst are transformed in slabs of tiles, some slabs at a time, so that the transformed
// slabs stay in L3. Then each tile of the weight adds up its products of these slabs. Sums go over
// the slabs in order, so the result does not depend on the number of threads.

#include "ops/convolution/winograd/winograd.h"

#include <algorithm>
#include <cmath>

#include "kernels/direct/outer_products.h"
#include "kernels/kernels.h"
#include "ops/convolution_time.h"
#include "ops/gradient/convolution_backward.h"
#include "ops/gradient/tiles.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/memory/workspace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;

// The products of this many slabs are summed in registers before they are added to the sums in
// memory. Longer chains lose accuracy.
constexpr std::int64_t kChainSlabs = 4;
// Tiles in a slab, and bytes of slabs transformed at a time. 64@56 at batch 8 has 1568 tiles of 37
// KB.
constexpr std::int64_t kSlab = 28, kSlabsBytes = 10 << 20;
// A tile of the weight. Its sums at 36 positions are 440 KB, which fit in L2.
constexpr GradientTileSize kGradientTile{.channels = 32, .vectors = 6};
// Floats between the sums of two positions, so that they do not crowd the same cache sets.
constexpr std::int64_t kPad = 16;

struct Gradient {
  const kernels::Kernels& table;
  const kernels::WinogradGradient& kernel;
  kernels::WinogradShape shape;
  std::int64_t count, slab, slabs, v_stride, d_stride;  // tiles; tiles in a slab; floats

  Gradient(const Problem& p)
      : table(kernels::kernels_for(p.src_format.block)),
        kernel(*table.winograd_gradient),
        shape(winograd_shape(p)),
        count(winograd_tiles(p, {1, kernel.m, kernel.m})),
        slab(ceil_div(count, ceil_div(count, kSlab))),
        slabs(ceil_div(count, slab)),
        v_stride(kernel.stride(shape.ic, slab)),
        d_stride(kernel.stride(shape.oc, slab)) {}

  std::int64_t v_size() const { return kernel.positions * v_stride; }
  std::int64_t d_size() const { return kernel.positions * d_stride; }
  // How many slabs are transformed at a time.
  std::int64_t at_a_time() const {
    const auto bytes = (v_size() + d_size()) * static_cast<std::int64_t>(sizeof(float));
    return std::clamp<std::int64_t>(kSlabsBytes / bytes, 1, slabs);
  }
  kernels::WinogradTiles tiles_of_slab(std::int64_t i) const {
    return {i * slab, std::min(slab, count - i * slab)};
  }
};

// The transformed slabs [first, first + count).
struct Slabs {
  std::int64_t first, count;
  float *v, *d;
};

void transform(const Gradient& g, const Slabs& slabs, const float* src, const float* diff_dst) {
  parallel_units(2 * slabs.count, kLargeUnit, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const std::int64_t i = unit / 2;
      const kernels::WinogradTiles tiles = g.tiles_of_slab(slabs.first + i);
      if (unit % 2 == 0) {
        g.kernel.src(g.shape, tiles, g.slab, src, slabs.v + i * g.v_size());
      } else {
        g.kernel.diff_dst(g.shape, tiles, g.slab, diff_dst, slabs.d + i * g.d_size());
      }
    }
  });
}

std::int64_t position_stride(const GradientTile& tile, std::int64_t width) {
  return tile.ic_count * tile.vectors * width + kPad;
}

// sums [positions, ic, vectors, width] of one tile of the weight
void multiply(const Gradient& g, const Slabs& slabs, const GradientTile& tile, bool add,
              float* sums) {
  const std::int64_t width = g.table.width;
  const kernels::OuterProducts p{.a = slabs.v + tile.ic * g.slab,
                                 .b = slabs.d,
                                 .sums = sums,
                                 .images = 0,
                                 .rows = 1,
                                 .pixels = g.slab,
                                 .a_image = g.v_size(),
                                 .a_row = 0,
                                 .a_pixel = width,
                                 .b_image = g.d_size(),
                                 .b_row = 0,
                                 .b_pixel = width,
                                 .a_ahead = g.v_stride,
                                 .b_ahead = g.d_stride,
                                 .a_count = tile.ic_count,
                                 .a_block = width,
                                 .a_block_stride = g.slab * width,
                                 .b_first = tile.vector,
                                 .b_vectors = tile.vectors,
                                 .b_block = width,
                                 .b_block_stride = g.slab * width,
                                 .sums_row = tile.vectors * width,
                                 .sums_vector = width,
                                 .add = add};
  for (std::int64_t position = 0; position < g.kernel.positions; ++position) {
    for (std::int64_t first = 0; first < slabs.count; first += kChainSlabs) {
      kernels::OuterProducts chain = p;
      chain.images = std::min(kChainSlabs, slabs.count - first);
      chain.a += first * p.a_image + position * g.v_stride;
      chain.b += first * p.b_image + position * g.d_stride;
      chain.sums += position * position_stride(tile, width);
      chain.add = add || first > 0;
      g.table.outer_products(chain);
    }
  }
}

// Writes G^T sums G of one tile of the weight to the dense gradient.
void finish(const Gradient& g, const GradientTile& tile, const float* sums,
            const PackedGradient& packed, const at::Tensor& diff_weight) {
  const std::int64_t width = g.table.width;
  float* to = packed.sums.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < tile.ic_count; ++i) {
    for (std::int64_t j = 0; j < tile.vectors; ++j, sums += width) {
      g.kernel.weights(
          sums, position_stride(tile, width),
          to + (tile.ic + i) * packed.ic_stride + (tile.vector + j) * packed.vector_stride,
          packed.tap_stride);
    }
  }
  unpack_gradient(packed, tile, diff_weight);
}

void run_slabs(const Problem& p, const Blocked& src, const Blocked& diff_dst,
               const at::Tensor& diff_weight) {
  const Gradient g(p);
  const std::int64_t width = g.table.width, at_a_time = g.at_a_time();
  const GradientTiles tiles(g.shape.ic, ceil_div(g.shape.oc, width), kGradientTile);
  const at::TensorOptions options = src.physical.options();
  const at::Tensor transformed = empty_pooled({at_a_time * (g.v_size() + g.d_size())}, options);
  const PackedGradient packed = empty_packed_gradient(p, diff_weight, width);
  const std::int64_t size =
      g.kernel.positions * (kGradientTile.channels * kGradientTile.vectors * width + kPad);
  // If all slabs are transformed at once, a tile's sums are needed only while a thread works on
  // it.
  const bool at_once = at_a_time == g.slabs;
  const at::Tensor sums = empty_pooled({at_once ? 0 : tiles.count() * size}, options);
  auto *v = transformed.mutable_data_ptr<float>(), *all_sums = sums.mutable_data_ptr<float>();
  for (std::int64_t first = 0; first < g.slabs; first += at_a_time) {
    const Slabs slabs{first, std::min(at_a_time, g.slabs - first), v, v + at_a_time * g.v_size()};
    transform(g, slabs, src.physical.const_data_ptr<float>(),
              diff_dst.physical.const_data_ptr<float>());
    parallel_units(tiles.count(), kLargeUnit, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        float* to = at_once ? workspace(size) : all_sums + i * size;
        multiply(g, slabs, tiles[i], first > 0, to);
        if (first + slabs.count == g.slabs) finish(g, tiles[i], to, packed, diff_weight);
      }
    });
  }
}

// Costs are in FMAs per pair of channels, as in the forward: transforms per tile and vector of
// channels, and G^T sums G per pair. The direct gradient runs at the pace of a direct convolution,
// this one at 0.9 of that pace.
const char* refuses_winograd(const WeightGradientProblem& problem) {
  const auto& [p, diff_weight] = problem;
  if (p.dtype != at::kFloat) return "computes float32 only";
  if (const char* refusal = refuses_winograd_sizes(p)) return refusal;
  const bool deep = as_3d(at::IntArrayRef(p.weight_dims).slice(2), 1)[0] > 1;
  if (deep) return "takes 3x3 kernels only";
  const bool in_order = diff_weight.is_contiguous() || is_channels_last(diff_weight);
  return in_order ? nullptr : "writes weights in order, or with channels last";
}

double estimate_winograd(const WeightGradientProblem& problem) {
  const Problem& p = problem.convolution;
  const auto tiles = static_cast<double>(winograd_tiles(p, {1, 4, 4})),
             block = static_cast<double>(p.src_format.block);
  const auto ic = static_cast<double>(p.src_dims[1]), oc = static_cast<double>(p.dst_dims[1]);
  const auto whole = [&](double channels) {
    return std::ceil(channels / block) * block / channels;
  };
  const double fmas = 36 * tiles + 200 + tiles * (280 / oc * whole(ic) + 200 / ic * whole(oc));
  return microseconds_of(fmas * ic * oc) / 0.9;
}

std::optional<RunWeightGradient> plan_winograd(const WeightGradientProblem& problem) {
  return [p = problem.convolution](const Blocked& src, const Blocked& diff_dst,
                                   const at::Tensor& diff_weight) {
    run_slabs(p, src, diff_dst, diff_weight);
  };
}

}  // namespace

constinit const WeightGradient weight_gradients::winograd = {
    .name = "winograd",
    .refuses = refuses_winograd,
    .plan = plan_winograd,
    .estimate = estimate_winograd,
};

}  // namespace torch_blocked

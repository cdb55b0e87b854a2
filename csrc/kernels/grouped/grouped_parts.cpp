// Goes through the output rows of depthwise and grouped convolutions in tiles.
#include "format/sizes.h"
#include "kernels/grouped/grouped_tiles.h"
#include "kernels/vector/finish.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The pixels to which one loop applies the epilogue. A tile has too few pixels for a long function
// such as SiLU.
constexpr std::int64_t kFinishedPixels = 64;
// Bytes that rows computed together may read and write, so that their next tiles find them in L1.
constexpr std::int64_t kRowsBytes = 16 << 10;

// The tile size with the least time for a row: a tile costs its pixels plus about 1.
std::size_t tile_size(std::int64_t pixels) {
  const auto cost = [&](std::size_t i) {
    const std::int64_t size = kTilePixels[i];
    return (pixels + size - 1) / size * (size + 1);
  };
  std::size_t best = 0;
  for (std::size_t i = 1; i < kTilePixels.size(); ++i) {
    if (cost(i) <= cost(best)) best = i;
  }
  return best;
}

struct Taps {
  std::int64_t begin, end;

  bool operator==(const Taps&) const = default;
};

// The taps that see the input when tap 0 is at input index `at`.
Taps taps_inside(const GroupedAxis& axis, std::int64_t at) {
  const auto first_from = [&](std::int64_t index) {  // the first tap at `index` or beyond
    if (index <= at) return std::int64_t{0};
    return axis.dilation == 1 ? index - at : (index - at - 1) / axis.dilation + 1;
  };
  const std::int64_t end = std::min(first_from(axis.in), axis.kernel);
  return {std::min(first_from(0), end), end};
}

template <typename Number>
struct Walk {
  const GroupedConvolution& g;
  const GroupedTiles<Number>& tiles;
  std::size_t size = tile_size(std::min(g.axes[2].out, g.part));
  std::int64_t pixels = kTilePixels[size];
  std::int64_t parts = (g.axes[2].out + g.part - 1) / g.part;  // of a row
  std::int64_t plane_parts = g.axes[0].out * g.axes[1].out * parts;
  std::int64_t weights_h = g.inputs * g.axes[2].kernel * kWidth;
  std::int64_t weights_d = g.axes[1].kernel * weights_h;
  bool clamps = g.epilogue.empty() ||
                (g.epilogue.before.kind == Activation::Kind::kClamp && !g.epilogue.residual);
  std::int64_t tiled_pixels = ceil_div(std::min(g.axes[2].out, g.part), pixels) * pixels;
  std::int64_t most_rows = rows_at_once();

  // For how many rows a tile is computed before the next tile. On small maps a call costs as much
  // as the products of one row.
  std::int64_t rows_at_once() const {
    if (parts > 1) return 1;
    const auto bytes = static_cast<std::int64_t>(sizeof(Number)) * kWidth *
                       (g.axes[2].in * g.axes[1].stride + g.axes[2].out);
    const std::int64_t rows =
        clamps ? kRowsBytes / bytes : std::min(kRowsBytes / bytes, kFinishedPixels / tiled_pixels);
    return std::max<std::int64_t>(rows, 1);
  }

  // The arguments that the rows of an output plane (a block of an image) share.
  GroupedRows<Number> plane_rows(std::int64_t block) const {
    const GroupedAxis &d = g.axes[0], &h = g.axes[1];
    const std::int64_t count = std::min(kWidth, g.oc - block * kWidth);
    const Activation& activation = g.epilogue.before;
    const bool clamp = activation.kind == Activation::Kind::kClamp;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return {.src = nullptr,
            .weights = nullptr,
            .lanes = g.lanes + block * g.inputs * g.sources,
            .dst = nullptr,
            .count = 1,
            .src_step = h.stride * g.src_row,
            .dst_step = h.dst_step * g.dst_row,
            .kd = 0,
            .kh = 0,
            .src_d = d.dilation * h.in * g.src_row,
            .src_h = h.dilation * g.src_row,
            .weights_d = weights_d,
            .weights_h = weights_h,
            .src_plane = g.src_plane,
            .bias = g.bias ? load(g.bias + block * kWidth, count) : Vec(0.f),
            .lanes_mask = lanes_mask(count),
            .least = Vec(clamp ? activation.alpha : -kInfinity),
            .greatest = Vec(clamp ? activation.beta : kInfinity),
            .clamps = clamps,
            .sums = nullptr,
            .first = 0,
            .sums_step = tiled_pixels * kWidth};
  }

  // How many of the next `most` rows see the input with the same taps. Tap 0 of the first row is
  // at `ih`.
  std::int64_t rows_alike(std::int64_t ih, const Taps& taps, std::int64_t most) const {
    const GroupedAxis& h = g.axes[1];
    std::int64_t rows = 1;
    while (rows < most && taps_inside(h, ih + rows * h.stride) == taps) ++rows;
    return rows;
  }

  // Runs parts [begin, end) of an output plane.
  void plane(std::int64_t image, std::int64_t block, std::int64_t begin, std::int64_t end) const {
    const auto& [d, h, w] = g.axes;
    GroupedRows<Number> rows = plane_rows(block);
    const Number* src = static_cast<const Number*>(g.src) + image * g.src_image +
                        (g.lanes ? 0 : block) * g.src_plane;
    const float* weights = g.weights + block * d.kernel * weights_d;
    Number* dst = static_cast<Number*>(g.dst) + image * g.dst_image + block * g.dst_plane +
                  w.dst_first * g.dst_pixel;
    std::int64_t part = 0, oh = 0, od = 0;
    if (begin > 0) {  // seldom, and it costs six divisions of 64 bits
      part = begin % parts;
      oh = begin / parts % h.out;
      od = begin / parts / h.out;
    }
    for (std::int64_t at = begin; at < end; at += rows.count) {
      const std::int64_t id = od * d.stride + d.origin, ih = oh * h.stride + h.origin;
      const Taps taps_d = taps_inside(d, id), taps_h = taps_inside(h, ih);
      rows.count = rows_alike(ih, taps_h, std::min({most_rows, end - at, h.out - oh}));
      rows.kd = taps_d.end - taps_d.begin;
      rows.kh = taps_h.end - taps_h.begin;
      rows.src = src + (id * h.in + ih) * g.src_row + taps_d.begin * rows.src_d +
                 taps_h.begin * rows.src_h;
      rows.weights = weights + taps_d.begin * weights_d + taps_h.begin * weights_h;
      rows.dst = dst + ((d.dst_first + od * d.dst_step) * h.dst + h.dst_first + oh * h.dst_step) *
                           g.dst_row;
      run_any(rows, part * g.part, std::min(w.out, (part + 1) * g.part));
      if (++part < parts) continue;
      part = 0;
      oh += rows.count;
      if (oh < h.out) continue;
      oh = 0;
      ++od;
    }
  }

  // Runs output pixels [first, last) of rows, with any epilogue.
  void run_any(GroupedRows<Number>& rows, std::int64_t first, std::int64_t last) const {
    if (clamps) return run(rows, first, last);
    // Pixels of the last tile beyond `last` are not stored.
    alignas(64) std::array<float, (kFinishedPixels + kTilePixels.back()) * kWidth> sums;
    rows.sums = sums.data();
    for (const std::int64_t step = kFinishedPixels / pixels * pixels; first < last; first += step) {
      rows.first = first;
      const std::int64_t end = std::min(last, first + step);
      run(rows, first, end);
      finish(rows, end - first);
    }
  }

  // dst = epilogue(sums) for `pixels` pixels of each row, in one loop if they are adjacent.
  void finish(const GroupedRows<Number>& rows, std::int64_t pixels) const {
    const std::int64_t step = g.axes[2].dst_step * g.dst_pixel;
    const bool dense = rows.sums_step == pixels * kWidth && rows.dst_step == pixels * step;
    const std::int64_t loops = dense ? 1 : rows.count, count = dense ? rows.count * pixels : pixels;
    const Vec mask = rows.lanes_mask;
    with_finish<Number>(g.epilogue, g.residual, g.dst, [&](const auto& finish) {
      for (std::int64_t row = 0; row < loops; ++row) {
        const float* from = rows.sums + row * rows.sums_step;
        Number* to = rows.dst + rows.first * step + row * rows.dst_step;
        for (std::int64_t i = 0; i < count; ++i, from += kWidth, to += step) {
          store_lanes<kWidth>(finish(Vec::loadu(from), to) & mask, to);
        }
      }
    });
  }

  // Runs output pixels [first, last) of rows.
  void run(const GroupedRows<Number>& rows, std::int64_t first, std::int64_t last) const {
    const GroupedAxis& w = g.axes[2];
    const std::int64_t reach = (pixels - 1) * w.stride + (w.kernel - 1) * w.dilation;
    for (; first < last; first += pixels) {
      const std::int64_t in = first * w.stride + w.origin;
      tiles[size][in >= 0 && in + reach < w.in](g, rows, first, std::min(pixels, last - first));
    }
  }
};

}  // namespace

template <typename Number>
void grouped_parts(const GroupedConvolution& g, const GroupedKernel<Number>* kernels,
                   std::int64_t begin, std::int64_t end) {
  const GroupedAxis& w = g.axes[2];
  const auto fits = [&](const GroupedKernel<Number>& kernel) {
    const bool same = kernel.taps == w.kernel && kernel.stride == w.stride && w.dilation == 1;
    return kernel.taps == 0 || same;
  };
  while (!fits(*kernels)) ++kernels;
  const Walk<Number> walk{g, kernels->tiles};
  const std::int64_t plane = begin / walk.plane_parts;
  std::int64_t image = plane / g.dst_blocks, block = plane % g.dst_blocks,
               first = begin - plane * walk.plane_parts;
  for (std::int64_t left = end - begin; left > 0; first = 0) {
    const std::int64_t last = std::min(walk.plane_parts, first + left);
    walk.plane(image, block, first, last);
    left -= last - first;
    if (++block < g.dst_blocks) continue;
    block = 0;
    ++image;
  }
}

template void grouped_parts(const GroupedConvolution&, const GroupedKernel<float>*, std::int64_t,
                            std::int64_t);
template void grouped_parts(const GroupedConvolution&, const GroupedKernel<std::uint16_t>*,
                            std::int64_t, std::int64_t);

}  // namespace torch_blocked::kernels::CPU_CAPABILITY

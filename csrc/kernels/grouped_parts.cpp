// Walks the output rows of depthwise and grouped convolutions in tiles.
#include "kernels/finish.h"
#include "kernels/grouped_tiles.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Sums of a row whose epilogue is one loop: a tile's pixels are too few for one that is long, as
// SiLU's.
constexpr std::int64_t kFinishedPixels = 64;

// The size that takes the least time for a row: a tile costs its pixels and about 1 more.
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

  // What the rows of an output plane, a block of an image, share.
  GroupedRow<Number> plane_row(std::int64_t block) const {
    const GroupedAxis &d = g.axes[0], &h = g.axes[1];
    const std::int64_t count = std::min(kWidth, g.oc - block * kWidth);
    const Activation& activation = g.epilogue.before;
    const bool clamp = activation.kind == Activation::Kind::kClamp;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return {.src = nullptr,
            .weights = nullptr,
            .lanes = g.lanes + block * g.inputs * g.sources,
            .dst = nullptr,
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
            .clamps = g.epilogue.empty() || (clamp && !g.epilogue.residual),
            .sums = nullptr,
            .first = 0};
  }

  // Parts [begin, end) of one output plane.
  void plane(std::int64_t plane, std::int64_t begin, std::int64_t end) const {
    const auto& [d, h, w] = g.axes;
    const std::int64_t block = plane % g.dst_blocks, image = plane / g.dst_blocks;
    GroupedRow<Number> row = plane_row(block);
    const Number* src = static_cast<const Number*>(g.src) + image * g.src_image +
                        (g.lanes ? 0 : block) * g.src_plane;
    const float* weights = g.weights + block * d.kernel * weights_d;
    Number* dst = static_cast<Number*>(g.dst) + image * g.dst_image + block * g.dst_plane +
                  w.dst_first * g.dst_pixel;
    std::int64_t part = begin % parts, oh = begin / parts % h.out, od = begin / parts / h.out;
    for (std::int64_t at = begin; at < end; ++at) {
      const std::int64_t id = od * d.stride + d.origin, ih = oh * h.stride + h.origin;
      const Taps taps_d = taps_inside(d, id), taps_h = taps_inside(h, ih);
      row.kd = taps_d.end - taps_d.begin;
      row.kh = taps_h.end - taps_h.begin;
      row.src =
          src + (id * h.in + ih) * g.src_row + taps_d.begin * row.src_d + taps_h.begin * row.src_h;
      row.weights = weights + taps_d.begin * weights_d + taps_h.begin * weights_h;
      row.dst = dst + ((d.dst_first + od * d.dst_step) * h.dst + h.dst_first + oh * h.dst_step) *
                          g.dst_row;
      run_any(row, part * g.part, std::min(w.out, (part + 1) * g.part));
      if (++part < parts) continue;
      part = 0;
      if (++oh < h.out) continue;
      oh = 0;
      ++od;
    }
  }

  // Output pixels [first, last) of a row, with any epilogue.
  void run_any(GroupedRow<Number>& row, std::int64_t first, std::int64_t last) const {
    if (row.clamps) return run(row, first, last);
    // What the last tile has beyond `last` is not stored.
    alignas(64) std::array<float, (kFinishedPixels + kTilePixels.back()) * kWidth> sums;
    row.sums = sums.data();
    for (const std::int64_t step = kFinishedPixels / pixels * pixels; first < last; first += step) {
      row.first = first;
      const std::int64_t end = std::min(last, first + step);
      run(row, first, end);
      finish(row, end - first);
    }
  }

  // dst = epilogue(sums)
  void finish(const GroupedRow<Number>& row, std::int64_t count) const {
    const std::int64_t step = g.axes[2].dst_step * g.dst_pixel;
    const float* sums = row.sums;
    Number* dst = row.dst + row.first * step;
    const Vec mask = row.lanes_mask;
    with_finish<Number>(g.epilogue, g.residual, g.dst, [=](const auto& finish) {
      const float* from = sums;
      Number* to = dst;
      for (std::int64_t i = 0; i < count; ++i, from += kWidth, to += step) {
        store_lanes<kWidth>(finish(Vec::loadu(from), to) & mask, to);
      }
    });
  }

  // Output pixels [first, last) of a row.
  void run(const GroupedRow<Number>& row, std::int64_t first, std::int64_t last) const {
    const GroupedAxis& w = g.axes[2];
    const std::int64_t reach = (pixels - 1) * w.stride + (w.kernel - 1) * w.dilation;
    for (; first < last; first += pixels) {
      const std::int64_t in = first * w.stride + w.origin;
      tiles[size][in >= 0 && in + reach < w.in](g, row, first, std::min(pixels, last - first));
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
  while (begin < end) {
    const std::int64_t plane = begin / walk.plane_parts, first = begin % walk.plane_parts;
    const std::int64_t last = std::min(walk.plane_parts, first + end - begin);
    walk.plane(plane, first, last);
    begin += last - first;
  }
}

template void grouped_parts(const GroupedConvolution&, const GroupedKernel<float>*, std::int64_t,
                            std::int64_t);
template void grouped_parts(const GroupedConvolution&, const GroupedKernel<std::uint16_t>*,
                            std::int64_t, std::int64_t);

}  // namespace torch_blocked::kernels::CPU_CAPABILITY

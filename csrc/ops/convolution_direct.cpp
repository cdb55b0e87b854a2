// A direct convolution of ours: any kernel, stride, dilation and padding, float32, groups = 1; and
// transposed ones at stride 1.
//
// The lanes of an output pixel are the src values under the kernel, and the pixels of a row have
// theirs at equal distances. Where that is so in src already (1x1, stride 1, the block as wide as a
// vector) src is read in place; elsewhere it is first copied to a band of slots, which also does
// away with padding and strides. With few input channels the band is planes of pixels, not pixels
// of lanes, so that no lane is wasted.
//
// Work is shared out as (band of output pixels, group of output channels), bands outermost. Sums
// are parts of a fixed number of lanes, so the blocking changes no bit of the result.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/convolution.h"
#include "runtime/huge_pages.h"
#include "runtime/threads.h"
#include "runtime/trace.h"
#include "runtime/workspace.h"

namespace torch_blocked {
namespace {

using Problem = ConvolutionProblem;
using kernels::DirectRun;
using kernels::DirectSegment;
using Sizes3 = std::array<std::int64_t, 3>;  // d, h, w

// Up to this many input channels src is taken apart into planes: a vector of lanes would be mostly
// empty.
constexpr std::int64_t kPlaneChannels = 4;

// Bands times groups of output channels for each thread, so that no thread waits long.
constexpr std::int64_t kUnitsPerThread = 8;

// dst larger than this is written past the cache, as by winograd.
constexpr std::int64_t kStreamBytes = 8 << 20;

// Output channels [first, first + vectors * width).
struct Group {
  std::int64_t first, vectors;
};

// What the problem is, seen as 3-D: missing spatial dims have size 1.
struct Direct {
  const kernels::Kernels* kernels;
  std::int64_t n, ic, oc, src_block, dst_block;  // blocks: lanes between pixels
  Sizes3 in, out, kernel, stride, padding, dilation;
  bool transposed, in_place, planes;
  Activation activation;
  std::vector<Group> groups;

  const kernels::DirectSizes& sizes() const { return *kernels->direct_sizes; }
  std::int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  std::int64_t lanes() const { return taps() * ic; }
  // Channels whose weights for one tap follow each other: those of a vector, or one of a plane.
  std::int64_t step() const { return planes ? 1 : sizes().width; }
  std::int64_t src_blocks() const { return ceil_div(ic, src_block); }
  std::int64_t dst_blocks() const { return ceil_div(oc, dst_block); }
  static std::int64_t volume(const Sizes3& s) { return s[0] * s[1] * s[2]; }
};

// Groups of the best number of vectors; what is left over makes some a vector larger or smaller.
std::vector<Group> groups_of(std::int64_t vectors, std::int64_t best, std::int64_t width) {
  std::vector<Group> groups;
  for (std::int64_t first = 0; first < vectors;) {
    const std::int64_t left = vectors - first;
    std::int64_t take = std::min(left, best);
    if (best == 2 && left == 3) take = 3;
    if (best == 3 && (left == 4 || left == 2)) take = 2;
    groups.push_back({first * width, take});
    first += take;
  }
  return groups;
}

Direct direct_of(const Problem& p) {
  const auto spatial = [](const Dims& dims) { return at::IntArrayRef(dims).slice(2); };
  Direct d{.kernels = p.dst_block >= 4 ? &kernels::kernels_for(p.dst_block) : &kernels::kernels(),
           .n = p.src_dims[0],
           .ic = p.src_dims[1],
           .oc = p.dst_dims[1],
           .src_block = p.src_block == kChannelsLast ? p.src_dims[1] : p.src_block,
           .dst_block = p.dst_block == kChannelsLast ? p.dst_dims[1] : p.dst_block,
           .in = as_3d(spatial(p.src_dims), 1),
           .out = as_3d(spatial(p.dst_dims), 1),
           .kernel = as_3d(spatial(p.weight_dims), 1),
           .stride = as_3d(p.stride, 1),
           .padding = as_3d(p.padding, 0),
           .dilation = as_3d(p.dilation, 1),
           .transposed = p.transposed,
           .in_place = false,
           .planes = false,
           .activation = p.epilogue.residual ? p.epilogue.after : p.epilogue.before,
           .groups = {}};
  // At stride 1 the transposed convolution is one with flipped weights and what padding is left.
  for (std::size_t i = 0; p.transposed && i < 3; ++i) {
    d.padding[i] = d.dilation[i] * (d.kernel[i] - 1) - d.padding[i];
  }
  const std::int64_t width = d.sizes().width;
  const bool pixelwise = d.taps() == 1 && d.in == d.out && d.padding == Sizes3{0, 0, 0};
  if (pixelwise) {  // one long row; where sizes are 1 the stride means nothing
    d.in = d.out = {1, 1, Direct::volume(d.in)};
    d.stride = {1, 1, 1};
  }
  d.planes = p.src_block == kPlain || d.ic <= kPlaneChannels;
  d.in_place = pixelwise && !d.planes && d.src_block == width;
  const std::int64_t vectors = ceil_div(d.dst_blocks() * d.dst_block, width);
  // Three vectors make up for few pixels in a row.
  const std::int64_t best = d.out[2] <= 4 ? 3 : d.sizes().vectors;
  d.groups = groups_of(vectors, best, width);
  return d;
}

// The taps along w in the order of their weights: those of planes that meet common positions side
// by side, so that they are lanes of one segment.
std::vector<std::int64_t> taps_in_order(const Direct& d) {
  std::vector<std::int64_t> taps(static_cast<std::size_t>(d.kernel[2]));
  std::iota(taps.begin(), taps.end(), 0);
  if (d.planes) {
    std::ranges::stable_sort(taps, {},
                             [&](std::int64_t tap) { return tap * d.dilation[2] % d.stride[2]; });
  }
  return taps;
}

// How the positions of one dim that `count` outputs meet are laid out in slots: those of tap k are
// tap_slot[k], tap_slot[k] + 1, ...; taps share slots where they meet the same positions.
struct Axis {
  std::vector<std::int64_t> tap_slot;
  std::vector<DirectRun> runs;  // `first` as if the outputs began at position 0
  std::int64_t slots = 0;
};

Axis axis_of(std::int64_t kernel, std::int64_t stride, std::int64_t dilation, std::int64_t count) {
  Axis axis;
  axis.tap_slot.resize(static_cast<std::size_t>(kernel));
  std::vector<std::int64_t> taps(static_cast<std::size_t>(kernel));
  std::iota(taps.begin(), taps.end(), 0);
  // Taps whose distance is a multiple of the stride meet common positions.
  std::ranges::stable_sort(taps, {}, [&](std::int64_t tap) { return tap * dilation % stride; });
  for (const std::int64_t tap : taps) {
    const std::int64_t position = tap * dilation;
    std::int64_t behind = -1;  // slots that this tap is behind the last run's first
    if (!axis.runs.empty() && (position - axis.runs.back().first) % stride == 0) {
      behind = (position - axis.runs.back().first) / stride;
    }
    if (behind < 0 || behind > axis.runs.back().count) {
      axis.runs.push_back({axis.slots, 0, position});
      behind = 0;
    }
    DirectRun& run = axis.runs.back();
    run.count = behind + count;
    axis.slots = run.slot + run.count;
    axis.tap_slot[static_cast<std::size_t>(tap)] = run.slot + behind;
  }
  return axis;
}

// The segments of the output rows that meet the same taps inside src, channel step by channel step,
// and one more.
struct Reach {
  std::vector<std::int64_t> kd, kh;  // the taps
  std::vector<DirectSegment> segments;
  std::vector<std::int64_t> step_begin;  // the first segment of each channel step, and the end
};

// How the work is cut up.
struct Cut {
  std::int64_t rows, columns;            // of outputs in a band, at most
  std::int64_t row_bands, column_bands;  // in a plane of outputs
  std::array<Axis, 3> axes;
  std::vector<Reach> reaches;
  std::vector<std::size_t> reach_of;  // [planes of outputs, rows]
  std::int64_t part_steps;            // channel steps (vectors, or channels of planes) of one part

  std::int64_t slots() const { return axes[0].slots * axes[1].slots * axes[2].slots; }
};

std::int64_t band_floats(const Direct& d, std::int64_t rows, std::int64_t columns) {
  const std::int64_t width = d.sizes().width;
  const std::int64_t channels = d.planes ? d.ic : ceil_div(d.ic, width) * width;
  if (d.in_place) return channels * rows * columns;
  std::int64_t slots = axis_of(d.kernel[0], d.stride[0], d.dilation[0], 1).slots;
  slots *= axis_of(d.kernel[1], d.stride[1], d.dilation[1], rows).slots;
  slots *= axis_of(d.kernel[2], d.stride[2], d.dilation[2], columns).slots;
  return channels * slots;
}

std::int64_t units_of(const Direct& d, std::int64_t rows, std::int64_t columns) {
  return d.n * d.out[0] * ceil_div(d.out[1], rows) * ceil_div(d.out[2], columns) *
         static_cast<std::int64_t>(d.groups.size());
}

// The largest bands that fit in the cache and are enough for all threads.
void choose_band(const Direct& d, Cut& cut) {
  const std::int64_t threads = at::get_num_threads();
  const std::int64_t least = d.sizes().pixels[static_cast<std::size_t>(d.groups[0].vectors - 1)];
  const std::int64_t floats = d.sizes().band_bytes / static_cast<std::int64_t>(sizeof(float));
  const auto good = [&](std::int64_t rows, std::int64_t columns) {
    return band_floats(d, rows, columns) <= floats &&
           (threads == 1 || units_of(d, rows, columns) >= kUnitsPerThread * threads);
  };
  cut.rows = d.out[1];
  cut.columns = d.out[2];
  while (cut.rows > 1 && !good(cut.rows, cut.columns)) cut.rows = ceil_div(cut.rows, 2);
  while (cut.columns > least && !good(cut.rows, cut.columns)) {
    cut.columns = std::max(least, ceil_div(ceil_div(cut.columns, 2), least) * least);
  }
  cut.row_bands = ceil_div(d.out[1], cut.rows);
  cut.column_bands = ceil_div(d.out[2], cut.columns);
  cut.rows = ceil_div(d.out[1], cut.row_bands);
  cut.columns = ceil_div(d.out[2], cut.column_bands);
}

// The taps along dim i that meet src from output `at`: padding has no lanes.
std::vector<std::int64_t> taps_inside(const Direct& d, std::size_t i, std::int64_t at) {
  std::vector<std::int64_t> taps;
  for (std::int64_t tap = 0; tap < d.kernel[i]; ++tap) {
    const std::int64_t position = at * d.stride[i] - d.padding[i] + tap * d.dilation[i];
    if (position >= 0 && position < d.in[i]) taps.push_back(tap);
  }
  return taps;
}

void add_segments(const Direct& d, const Cut& cut, Reach& reach) {
  const std::int64_t step = d.step();
  const std::int64_t step_size = d.in_place ? d.in[2] * step : cut.slots() * step;
  const auto slot = [&](std::size_t i, std::int64_t tap) {
    return cut.axes[i].tap_slot[static_cast<std::size_t>(tap)];
  };
  const std::vector<std::int64_t> order = taps_in_order(d);
  for (std::int64_t channel = 0; channel < d.ic; channel += step) {
    reach.step_begin.push_back(static_cast<std::int64_t>(reach.segments.size()));
    const std::int64_t lanes = std::min(step, d.ic - channel);
    for (const std::int64_t kd : reach.kd) {
      for (const std::int64_t kh : reach.kh) {
        const std::int64_t row = slot(0, kd) * cut.axes[1].slots + slot(1, kh);
        const std::int64_t first = channel / step * step_size + row * cut.axes[2].slots * step;
        const std::int64_t weights =
            channel * d.taps() + (kd * d.kernel[1] + kh) * d.kernel[2] * lanes;
        for (std::size_t i = 0; i < order.size(); ++i) {
          const std::int64_t offset = first + slot(2, order[i]) * step;
          DirectSegment* last = i > 0 ? &reach.segments.back() : nullptr;
          if (d.planes && last && last->offset + last->lanes == offset) {
            ++last->lanes;  // the next tap's pixels are one float on, as a lane is
          } else {
            reach.segments.push_back(
                {offset, lanes, weights + static_cast<std::int64_t>(i) * lanes});
          }
        }
      }
    }
  }
  reach.step_begin.push_back(static_cast<std::int64_t>(reach.segments.size()));
  reach.segments.push_back({0, 0, 0});
}

void make_reaches(const Direct& d, Cut& cut) {
  for (std::int64_t plane = 0; plane < d.out[0]; ++plane) {
    for (std::int64_t row = 0; row < d.out[1]; ++row) {
      Reach reach{taps_inside(d, 0, plane), taps_inside(d, 1, row), {}, {}};
      const auto same = std::ranges::find_if(cut.reaches, [&](const Reach& other) {
        return other.kd == reach.kd && other.kh == reach.kh;
      });
      cut.reach_of.push_back(static_cast<std::size_t>(same - cut.reaches.begin()));
      if (same != cut.reaches.end()) continue;
      add_segments(d, cut, reach);
      cut.reaches.push_back(std::move(reach));
    }
  }
}

Cut cut_of(const Direct& d) {
  Cut cut{};
  choose_band(d, cut);
  const Sizes3 counts{1, cut.rows, cut.columns};
  for (std::size_t i = 0; i < 3; ++i) {
    cut.axes[i] = axis_of(d.kernel[i], d.stride[i], d.dilation[i], counts[i]);
  }
  make_reaches(d, cut);
  // Blocks narrower than a vector are written once.
  const bool whole = d.dst_block < d.sizes().width;
  cut.part_steps =
      whole ? d.ic : std::max<std::int64_t>(1, d.sizes().lanes / (d.taps() * d.step()));
  return cut;
}

// weight [OC, IC, *kernel], transposed [IC, OC, *kernel], any strides
//   -> [groups, vectors of IC, taps, lanes, channels of the group], planes [groups, IC, taps, ...],
// zeros beyond OC.
at::Tensor pack(const Direct& d, const at::Tensor& weight) {
  const std::int64_t width = d.sizes().width, step = d.step(), taps = d.taps();
  const std::int64_t padded_oc = d.groups.back().first + d.groups.back().vectors * width;
  const at::Tensor packed = at::empty({padded_oc * d.lanes()}, weight.options());
  trace::Timed timed(trace::Kind::kPack, "convolution",
                     static_cast<std::int64_t>(weight.nbytes() + packed.nbytes()));
  const auto* from = weight.const_data_ptr<float>();
  float* to = packed.mutable_data_ptr<float>();
  prefer_huge_pages(to, packed.nbytes());
  const std::int64_t oc_stride = weight.stride(d.transposed ? 1 : 0);
  const std::int64_t ic_stride = weight.stride(d.transposed ? 0 : 1);
  // Offset of each tap.
  const Sizes3 strides = as_3d(weight.strides().slice(2), 0);
  std::vector<std::int64_t> tap_offsets;
  for (std::int64_t kd = 0; kd < d.kernel[0]; ++kd) {
    for (std::int64_t kh = 0; kh < d.kernel[1]; ++kh) {
      for (const std::int64_t kw : taps_in_order(d)) {
        const Sizes3 tap{kd, kh, kw};
        std::int64_t offset = 0;
        for (std::size_t i = 0; i < 3; ++i) {
          offset += (d.transposed ? d.kernel[i] - 1 - tap[i] : tap[i]) * strides[i];
        }
        tap_offsets.push_back(offset);
      }
    }
  }
  const auto pack_vector = [&](const Group& group, std::int64_t channel) {
    const std::int64_t size = group.vectors * width;
    const std::int64_t oc = std::clamp<std::int64_t>(d.oc - group.first, 0, size);
    const std::int64_t lanes = std::min(step, d.ic - channel);
    float* out = to + group.first * d.lanes() + channel * taps * size;
    for (const std::int64_t tap : tap_offsets) {
      for (std::int64_t lane = 0; lane < lanes; ++lane, out += size) {
        const float* in = from + group.first * oc_stride + (channel + lane) * ic_stride + tap;
        for (std::int64_t i = 0; i < oc; ++i) out[i] = in[i * oc_stride];
        std::fill(out + oc, out + size, 0.f);
      }
    }
  };
  const std::int64_t channels = ceil_div(d.ic, step);
  parallel_units(static_cast<std::int64_t>(d.groups.size()) * channels, step * taps * 2 * width,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t unit = begin; unit < end; ++unit) {
                     pack_vector(d.groups[static_cast<std::size_t>(unit / channels)],
                                 unit % channels * step);
                   }
                 });
  return packed;
}

// Output pixels [row, row + rows) x [column, column + columns) of one plane of one image.
struct Band {
  std::int64_t image, plane, row, rows, column, columns;
};

Band band_of(const Direct& d, const Cut& cut, std::int64_t i) {
  const std::int64_t column = i % cut.column_bands;
  i /= cut.column_bands;
  const std::int64_t row = i % cut.row_bands;
  i /= cut.row_bands;
  const auto at = [](std::int64_t part, std::int64_t size, std::int64_t parts) {
    return part * size / parts;
  };
  Band band{i / d.out[0],
            i % d.out[0],
            at(row, d.out[1], cut.row_bands),
            0,
            at(column, d.out[2], cut.column_bands),
            0};
  band.rows = at(row + 1, d.out[1], cut.row_bands) - band.row;
  band.columns = at(column + 1, d.out[2], cut.column_bands) - band.column;
  return band;
}

// Copies what is under the band into `slots`.
void fill_band(const Direct& d, const Cut& cut, const Band& band, const float* src, float* slots) {
  const auto origin = [&](std::size_t i, std::int64_t first) {
    return first * d.stride[i] - d.padding[i];
  };
  const auto positions = [&](std::size_t i, std::int64_t first) {
    std::vector<std::int64_t> result;
    for (const DirectRun& run : cut.axes[i].runs) {
      for (std::int64_t k = 0; k < run.count; ++k) {
        result.push_back(origin(i, first) + run.first + k * d.stride[i]);
      }
    }
    return result;
  };
  const std::vector<std::int64_t> planes = positions(0, band.plane), rows = positions(1, band.row);
  std::vector<DirectRun> runs = cut.axes[2].runs;
  for (DirectRun& run : runs) run.first += origin(2, band.column);
  const std::int64_t block_stride = Direct::volume(d.in) * d.src_block;
  const auto fill = d.planes ? d.kernels->direct_plane_band : d.kernels->direct_band;
  fill({.src = src + band.image * d.src_blocks() * block_stride,
        .slots = slots,
        .channels = d.ic,
        .block = d.src_block,
        .block_stride = block_stride,
        .in = d.in,
        .d = planes.data(),
        .h = rows.data(),
        .d_slots = cut.axes[0].slots,
        .h_slots = cut.axes[1].slots,
        .w_slots = cut.axes[2].slots,
        .runs = runs.data(),
        .run_count = static_cast<std::int64_t>(runs.size()),
        .w_stride = d.stride[2]});
}

// What all rows of a band and a group of output channels have in common.
kernels::DirectTiles tiles_of(const Direct& d, const Cut& cut, const Group& group,
                              const ConvolutionBuffers& buffers) {
  const std::int64_t width = d.sizes().width;
  const std::int64_t block_stride = Direct::volume(d.out) * d.dst_block;
  const std::int64_t lane = group.first % d.dst_block;
  const std::int64_t out_bytes =
      d.n * d.dst_blocks() * block_stride * static_cast<std::int64_t>(sizeof(float));
  kernels::DirectTiles tiles{
      .src = nullptr,
      .segments = nullptr,
      .count = 0,
      .weights = static_cast<const float*>(buffers.weights) + group.first * d.lanes(),
      .bias = buffers.bias ? static_cast<const float*>(buffers.bias) + group.first : nullptr,
      .residual = nullptr,
      .dst = nullptr,
      .pixels = 0,
      .vectors = group.vectors,
      .channels = d.oc - group.first,
      .dst_step = d.dst_block,
      .dst_offsets = {},
      .parts = 0,
      .part_stride = block_stride,
      .first = true,
      .last = true,
      .ahead = 0,
      .tile = 0,
      .stream =
          out_bytes > kStreamBytes && cut.part_steps * d.step() >= d.ic && d.dst_block == width,
      .activation = d.activation};
  for (std::int64_t j = 0; j < group.vectors; ++j) {
    const std::int64_t channel = lane + j * width;
    tiles.dst_offsets[static_cast<std::size_t>(j)] =
        channel / d.dst_block * block_stride + channel % d.dst_block - lane;
  }
  if (d.dst_block < width) {
    tiles.parts =
        std::min(group.vectors * width / d.dst_block, d.dst_blocks() - group.first / d.dst_block);
  }
  return tiles;
}

// One band and one group of output channels; `src` is pixel 0 of the band, in place or in slots.
void run_unit(const Direct& d, const Cut& cut, const Band& band, const Group& group,
              const float* src, const ConvolutionBuffers& buffers) {
  const std::int64_t step = d.step();
  const std::int64_t first_row = band.plane * d.out[1] + band.row;
  const std::int64_t offset = (band.image * d.dst_blocks() + group.first / d.dst_block) *
                                  Direct::volume(d.out) * d.dst_block +
                              (first_row * d.out[2] + band.column) * d.dst_block +
                              group.first % d.dst_block;
  kernels::DirectTiles tiles = tiles_of(d, cut, group, buffers);
  const std::int64_t pitch = d.in_place ? d.out[2] : cut.axes[2].slots;
  // Where rows have no slots but their own pixels, and meet the same taps, they are one long row.
  const auto reach = cut.reach_of.begin() + first_row;
  const bool merge =
      pitch == band.columns && band.columns == d.out[2] && d.kernel[1] == 1 &&
      std::all_of(reach, reach + band.rows, [&](auto each) { return each == *reach; });
  const std::int64_t rows = merge ? 1 : band.rows;
  tiles.pixels = merge ? band.rows * band.columns : band.columns;
  const std::int64_t row_tiles =
      ceil_div(tiles.pixels, d.sizes().pixels[static_cast<std::size_t>(group.vectors - 1)]);
  const auto run = d.planes ? d.kernels->direct_plane_tiles : d.kernels->direct_tiles;
  const std::int64_t steps = ceil_div(d.ic, step);
  for (std::int64_t first = 0; first < steps; first += cut.part_steps) {
    const std::int64_t count = std::min(cut.part_steps, steps - first);
    tiles.first = first == 0;
    tiles.last = first + count == steps;
    const std::int64_t lanes = std::min(count * step, d.ic - first * step) * d.taps();
    tiles.ahead = lanes * group.vectors * d.sizes().width;
    for (std::int64_t row = 0; row < rows; ++row) {
      const Reach& reach = cut.reaches[cut.reach_of[static_cast<std::size_t>(first_row + row)]];
      const std::int64_t to = offset + row * d.out[2] * d.dst_block;
      const std::int64_t begin = reach.step_begin[static_cast<std::size_t>(first)];
      tiles.segments = reach.segments.data() + begin;
      tiles.count = reach.step_begin[static_cast<std::size_t>(first + count)] - begin;
      tiles.src = src + row * pitch * step;
      tiles.dst = static_cast<float*>(buffers.dst) + to;
      tiles.residual =
          buffers.residual ? static_cast<const float*>(buffers.residual) + to : nullptr;
      tiles.tile = row * row_tiles;
      run(tiles);
    }
  }
}

void run(const Direct& d, const Cut& cut, const ConvolutionBuffers& buffers) {
  const auto groups = static_cast<std::int64_t>(d.groups.size());
  const auto* src = static_cast<const float*>(buffers.src);
  const std::int64_t bands = d.n * d.out[0] * cut.row_bands * cut.column_bands;
  at::parallel_for(0, bands * groups, 1, [&](std::int64_t begin, std::int64_t end) {
    float* slots = d.in_place ? nullptr : workspace(band_floats(d, cut.rows, cut.columns));
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const Band band = band_of(d, cut, unit / groups);
      const float* first = slots;
      if (d.in_place) {
        first =
            src + band.image * d.src_blocks() * d.in[2] * d.src_block + band.column * d.src_block;
      } else if (unit == begin || unit % groups == 0) {
        fill_band(d, cut, band, src, slots);
      }
      run_unit(d, cut, band, d.groups[static_cast<std::size_t>(unit % groups)], first, buffers);
    }
  });
}

bool possible(const Problem& p) {
  if (p.dtype != at::kFloat || p.groups != 1) return false;
  if (p.transposed && std::ranges::any_of(p.stride, [](std::int64_t s) { return s != 1; })) {
    return false;
  }
  // The residual is what sums begin with.
  const bool adds_last = p.epilogue.residual && p.epilogue.before.kind != Activation::Kind::kNone;
  if (adds_last || p.dst_block == kPlain) return false;
  if (p.dst_block == kChannelsLast) {
    return p.dst_dims[1] % kernels::kernels().direct_sizes->width == 0;
  }
  const bool narrow = p.dst_block < kernels::kernels_for(p.dst_block).direct_sizes->width;
  return !narrow || p.epilogue.empty();
}

// Measured on Zen 4 with oneDNN 3.2, both instruction sets. At large sizes both reach 90 to 97 % of
// the FMA peak; ours is faster at
//   few input channels, which oneDNN's blocked kernels do not take
//   1x1 with stride (1.0 to 1.2 times), or more output than input channels (1.0 to 1.2), or input
//     channels that fill no block (24 to 144: 1.15)
//   larger kernels where the weights outgrow L2: in 8c from 0.5 MB on (1.0 to 1.4 times), in 16c
//     from 8 MB on and on small maps only (512@7: 1.06)
// while oneDNN is up to 5 % faster at other larger kernels, which it reads in place; along rows it
// leaves out the padding, too.
bool beats_onednn(const Problem& p) {
  const std::int64_t ic = p.src_dims[1], oc = p.dst_dims[1];
  if (ic <= kPlaneChannels) return true;
  const std::int64_t weights = c10::multiply_integers(p.weight_dims);
  if (weights > ic * oc) {
    const std::int64_t bytes = weights * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t pixels = c10::multiply_integers(p.dst_dims) / oc;
    return p.dst_block == 8 ? bytes >= 512 << 10 : bytes >= 8 << 20 && pixels <= 64;
  }
  const bool strided = std::ranges::any_of(p.stride, [](std::int64_t s) { return s > 1; });
  return strided || oc > ic || ic % p.src_block != 0;
}

}  // namespace

bool direct_wins(const Problem& p) {
  return possible(p) && (beats_onednn(p) || !plan_onednn_blocked(p));
}

std::optional<ConvolutionPlan> plan_direct(const Problem& p) {
  if (!possible(p)) return std::nullopt;
  const auto direct = std::make_shared<const Direct>(direct_of(p));
  const Group& last = direct->groups.back();
  return ConvolutionPlan{
      .weights_format = text("direct/", direct->sizes().width, "/", direct->groups[0].vectors, "/",
                             last.first, "/", last.vectors, direct->planes ? "/planes" : "",
                             direct->transposed ? "/transposed" : ""),
      .pack = [direct](const at::Tensor& weight) { return pack(*direct, weight); },
      // The cut depends on the number of threads, which may change between runs.
      .run =
          [direct, cut = std::make_shared<Cut>(),
           threads = 0](const ConvolutionBuffers& buffers) mutable {
            if (threads != at::get_num_threads()) {
              *cut = cut_of(*direct);
              threads = at::get_num_threads();
            }
            run(*direct, *cut, buffers);
          }};
}

}  // namespace torch_blocked

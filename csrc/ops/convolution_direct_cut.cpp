// The phases of a direct convolution, the slots of its src and the cut of its work.

#include <algorithm>
#include <numeric>
#include <utility>

#include "ops/convolution_direct.h"
#include "ops/phases.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::direct {
namespace {

// Bands times groups of output channels for each thread, so that no thread waits long.
constexpr std::int64_t kUnitsPerThread = 8;

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

// Makes dim i phase `rest` of a transposed convolution; false if it has no outputs or taps.
bool make_phase(Direct& d, std::size_t i, std::int64_t rest) {
  const Window whole{d.kernel[i], d.stride[i], d.padding[i], d.dilation[i]};
  const auto phase = phase_axis(whole, d.dst[i], rest);
  if (!phase || rest >= d.dst[i]) return false;
  d.tap_first[i] = phase->tap_first;
  d.tap_step[i] = phase->tap_step;
  d.kernel[i] = phase->kernel;
  d.padding[i] = phase->padding;
  d.dilation[i] = phase->dilation;
  d.out[i] = phase->outputs;
  d.dst_first[i] = rest;
  d.dst_step[i] = d.stride[i];
  d.stride[i] = 1;
  return true;
}

// The taps along dim i that meet src, not padding, from output `at`.
std::vector<std::int64_t> taps_inside(const Direct& d, std::size_t i, std::int64_t at) {
  std::vector<std::int64_t> taps;
  for (std::int64_t tap = 0; tap < d.kernel[i]; ++tap) {
    const std::int64_t position = at * d.stride[i] - d.padding[i] + tap * d.dilation[i];
    if (position >= 0 && position < d.in[i]) taps.push_back(tap);
  }
  return taps;
}

// Cut where a tap begins to meet src, and where it ends, at stride 1.
std::vector<Range> stretches_of(const Direct& d) {
  std::vector<std::int64_t> cuts{0, d.out[2]};
  for (std::int64_t tap = 0; tap < d.kernel[2]; ++tap) {
    const std::int64_t first = d.padding[2] - tap * d.dilation[2];
    for (const std::int64_t at : {first, first + d.in[2]}) {
      if (at > 0 && at < d.out[2]) cuts.push_back(at);
    }
  }
  std::ranges::sort(cuts);
  std::vector<Range> stretches;
  for (std::size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i - 1] < cuts[i]) stretches.push_back({cuts[i - 1], cuts[i]});
  }
  return stretches;
}

// Whether all outputs of a stretch of a row, at stride 1, fill at least a tile. Then src is read in
// place, and what lies in the padding is left out: of taps 12 pixels apart on 16x16 that is three
// quarters. Copied, the pixels under such taps are few at a time, since they share none, and each
// time all weights come from memory again.
bool has_long_stretches(const Direct& d) {
  if (d.stride != Sizes3{1, 1, 1} || !d.whole() || d.tap_step != Sizes3{1, 1, 1}) return false;
  const std::int64_t tile = d.sizes().pixels.back();
  return std::ranges::all_of(stretches_of(d),
                             [&](const Range& each) { return each.end - each.begin >= tile; });
}

// Decides how src is read, and makes the groups of output channels.
void complete(Direct& d, bool plain_src) {
  const std::int64_t width = d.sizes().width;
  bool pixelwise = d.taps() == 1 && d.in == d.out && d.padding == Sizes3{0, 0, 0};
  // Where sizes are 1 the stride means nothing; elsewhere as many outputs reach beyond src.
  for (std::size_t i = 0; i < 3; ++i) pixelwise &= d.stride[i] == 1 || d.out[i] == 1;
  if (pixelwise && d.whole()) {  // one long row
    d.in = d.out = d.dst = {1, 1, Direct::volume(d.in)};
    d.stride = {1, 1, 1};
  }
  d.planes = plain_src || d.ic <= kPlaneChannels;
  d.pixelwise = pixelwise;
  d.in_place = !d.planes && d.src_block == width && (pixelwise || has_long_stretches(d));
  d.stretches = {{0, d.out[2]}};
  if (d.in_place && !pixelwise) d.stretches = stretches_of(d);
  const std::int64_t vectors = ceil_div(d.dst_blocks() * d.dst_block, width);
  // Three vectors make up for few pixels in a row.
  const std::int64_t best = d.out[2] <= 4 ? 3 : d.sizes().vectors;
  d.groups = groups_of(vectors, best, width);
}

}  // namespace

std::vector<Direct> phases_of(const Problem& p) {
  const SpatialSizes sizes = spatial_sizes(p);
  const Sizes3& stride = sizes.stride;
  const Direct whole{.kernels = p.dst_format.is_blocked()
                                    ? &kernels::kernels_for(p.dst_format.block)
                                    : &kernels::kernels(),
                     .n = p.src_dims[0],
                     .ic = p.src_dims[1],
                     .oc = p.dst_dims[1],
                     .src_block = p.src_format.lanes(p.src_dims[1]),
                     .dst_block = p.dst_format.lanes(p.dst_dims[1]),
                     .in = sizes.in,
                     .out = sizes.out,
                     .kernel = sizes.kernel,
                     .stride = stride,
                     .padding = sizes.padding,
                     .dilation = sizes.dilation,
                     .dst = sizes.out,
                     .dst_first = {0, 0, 0},
                     .dst_step = {1, 1, 1},
                     .tap_first = {0, 0, 0},
                     .tap_step = {1, 1, 1},
                     .pixelwise = false,
                     .in_place = false,
                     .planes = false,
                     .activation = p.epilogue.residual ? p.epilogue.after : p.epilogue.before,
                     .groups = {},
                     .stretches = {}};
  std::vector<Direct> phases;
  const std::int64_t count = p.transposed ? Direct::volume(stride) : 1;
  for (std::int64_t phase = 0; phase < count; ++phase) {
    Direct d = whole;
    const Sizes3 rests{phase / (stride[1] * stride[2]), phase / stride[2] % stride[1],
                       phase % stride[2]};
    for (std::size_t i = 0; p.transposed && i < 3; ++i) {
      if (!make_phase(d, i, rests[i])) return {};
    }
    complete(d, p.src_format == kPlain);
    phases.push_back(std::move(d));
  }
  return phases;
}

std::vector<std::int64_t> taps_in_order(const Direct& d) {
  std::vector<std::int64_t> taps(static_cast<std::size_t>(d.kernel[2]));
  std::iota(taps.begin(), taps.end(), 0);
  if (d.planes && !d.whole_rows()) {
    std::ranges::stable_sort(taps, {},
                             [&](std::int64_t tap) { return tap * d.dilation[2] % d.stride[2]; });
  }
  return taps;
}

namespace {

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

// Under so many outputs.
Axis axis_of(const Direct& d, std::size_t i, std::int64_t outputs) {
  if (i < 2 || !d.whole_rows()) return axis_of(d.kernel[i], d.stride[i], d.dilation[i], outputs);
  return axis_of(d.kernel[2], 1, 1, (outputs - 1) * d.stride[2] + 1);
}

}  // namespace

std::int64_t band_floats(const Direct& d, std::int64_t rows, std::int64_t columns) {
  const std::int64_t width = d.sizes().width;
  const std::int64_t channels = d.planes ? d.ic : ceil_div(d.ic, width) * width;
  if (d.in_place) return channels * rows * columns;
  return channels * axis_of(d, 0, 1).slots * axis_of(d, 1, rows).slots *
         axis_of(d, 2, columns).slots;
}

namespace {

std::int64_t units_of(const Direct& d, std::int64_t rows, std::int64_t columns) {
  return d.n * d.out[0] * ceil_div(d.out[1], rows) * ceil_div(d.out[2], columns) *
         static_cast<std::int64_t>(d.groups.size());
}

// The largest bands that fit in the cache and are enough for all threads.
void choose_band(const Direct& d, Cut& cut) {
  const std::int64_t threads = torch_blocked::threads();
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

// Segments begin at a pixel of the output's row and column, where src is read in place, or at the
// first slot of the band.
void add_segments(const Direct& d, const Cut& cut, Reach& reach) {
  const std::int64_t step = d.step();
  const std::int64_t step_size = (d.in_place ? Direct::volume(d.in) : cut.slots()) * step;
  const auto at = [&](std::size_t i, std::int64_t tap) {
    if (d.in_place) return tap * d.dilation[i] - d.padding[i];
    return cut.axes[i].tap_slot[static_cast<std::size_t>(tap)];
  };
  const std::int64_t rows = d.in_place ? d.in[1] : cut.axes[1].slots,
                     columns = d.in_place ? d.in[2] : cut.axes[2].slots;
  const std::vector<std::int64_t> order = taps_in_order(d);
  for (std::int64_t channel = 0; channel < d.ic; channel += step) {
    reach.step_begin.push_back(static_cast<std::int64_t>(reach.segments.size()));
    const std::int64_t lanes = std::min(step, d.ic - channel);
    for (const std::int64_t kd : reach.kd) {
      for (const std::int64_t kh : reach.kh) {
        const std::int64_t row = at(0, kd) * rows + at(1, kh);
        const std::int64_t first = channel / step * step_size + row * columns * step;
        const std::int64_t weights =
            channel * d.taps() + (kd * d.kernel[1] + kh) * d.kernel[2] * lanes;
        for (const std::int64_t kw : reach.kw) {
          const std::int64_t offset = first + at(2, order[static_cast<std::size_t>(kw)]) * step;
          DirectSegment* last = kw != reach.kw.front() ? &reach.segments.back() : nullptr;
          if (d.planes && last && last->offset + last->lanes == offset) {
            ++last->lanes;  // the next tap's pixels are one float on, as a lane is
          } else {
            reach.segments.push_back({offset, lanes, weights + kw * lanes});
          }
        }
      }
    }
  }
  reach.step_begin.push_back(static_cast<std::int64_t>(reach.segments.size()));
  reach.segments.push_back({0, 0, 0});
}

// The taps that meet src in a stretch of each row. Slots hold padding beside rows of src, too.
void make_reaches(const Direct& d, Cut& cut) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(d.kernel[2]));
  std::iota(all.begin(), all.end(), 0);
  const auto add = [&](Reach reach) {
    const auto same = std::ranges::find_if(cut.reaches, [&](const Reach& other) {
      return other.kd == reach.kd && other.kh == reach.kh && other.kw == reach.kw;
    });
    cut.reach_of.push_back(static_cast<std::size_t>(same - cut.reaches.begin()));
    if (same != cut.reaches.end()) return;
    add_segments(d, cut, reach);
    cut.reaches.push_back(std::move(reach));
  };
  for (std::int64_t plane = 0; plane < d.out[0]; ++plane) {
    for (std::int64_t row = 0; row < d.out[1]; ++row) {
      for (const Range& stretch : d.stretches) {
        add({taps_inside(d, 0, plane),
             taps_inside(d, 1, row),
             d.in_place ? taps_inside(d, 2, stretch.begin) : all,
             {},
             {}});
      }
    }
  }
}

// Channel steps of one part of a sum. Blocks narrower than a vector are written once.
std::int64_t part_steps_of(const Direct& d) {
  if (d.dst_block < d.sizes().width) return d.ic;
  const std::int64_t lanes = d.taps() == 1 ? d.sizes().lanes : d.sizes().tap_lanes;
  return std::max<std::int64_t>(1, lanes / (d.taps() * d.step()));
}

}  // namespace

GatheredSegments gather_segments(const Direct& d, const std::vector<ChannelOf>& channels) {
  const std::int64_t part = part_steps_of(d);
  const std::int64_t step = d.step(), pixels = Direct::volume(d.in);
  GatheredSegments result;
  result.order.resize(channels.size());
  std::iota(result.order.begin(), result.order.end(), 0);
  const auto from = [&](std::int64_t i) { return channels[static_cast<std::size_t>(i)]; };
  std::ranges::stable_sort(result.order, {},
                           [&](std::int64_t i) { return std::pair(from(i).src, from(i).channel); });
  for (std::int64_t lane = 0; lane < d.ic; ++lane) {
    const auto [src, channel] = from(result.order[static_cast<std::size_t>(lane)]);
    const std::int64_t offset = channel / step * pixels * step + channel % step;
    if (lane % step == 0) result.step_begin.push_back(std::ssize(result.segments));
    // A segment may go beyond a channel step, but not into another part or another vector of src.
    if (lane % (part * step) != 0 && channel % step != 0) {
      auto& [last_src, last] = result.segments.back();
      if (last_src == src && last.offset + last.lanes == offset) {
        ++last.lanes;
        continue;
      }
    }
    result.segments.push_back({src, {offset, 1, lane}});
  }
  result.step_begin.push_back(std::ssize(result.segments));
  return result;
}

std::int64_t units_of(const Direct& d) {
  Cut cut{};
  choose_band(d, cut);
  return units_of(d, cut.rows, cut.columns);
}

Cut cut_of(const Direct& d) {
  Cut cut{};
  choose_band(d, cut);
  const Sizes3 counts{1, cut.rows, cut.columns};
  for (std::size_t i = 0; i < 3; ++i) {
    cut.axes[i] = axis_of(d, i, counts[i]);
  }
  make_reaches(d, cut);
  cut.part_steps = part_steps_of(d);
  // The order in which each thread reads a share of the larger of weights and src, not all of it:
  // 1x1 with 512 to 992 inputs and 128 outputs @7 on two threads took 1.4 to 1.6 times as long as
  // oneDNN's in the other order, and takes as long in this. A copied band serves all its groups.
  cut.by_group = d.in_place && d.packed_floats() > d.n * d.ic * Direct::volume(d.in);
  return cut;
}

}  // namespace torch_blocked::direct

// Our direct convolution: float32 with any kernel, stride, dilation, padding and groups. A
// transposed convolution runs as one ordinary convolution at stride 1 for each phase: the outputs
// whose indices have the same remainder by the stride meet the same taps.
//
// The lanes of an output pixel are the src values under the kernel. The tiles need the lanes of
// neighbouring pixels at equal distances. If src is laid out so (1x1, stride 1, the block as wide
// as a vector), it is read in place. Otherwise it is first copied to a band of slots, which also
// removes padding and strides. With few input channels the band holds planes instead of vectors of
// channels, so that no lane is wasted. Rows of planes keep their order, and pixels are a stride
// apart.
//
// A unit of work is a band of output pixels and a group of output channels. Sums have parts of a
// fixed number of lanes, so the cut changes no bit of the result.
//
// A tile of 14 pixels by 2 vectors of channels (AVX2: 4 by 3) stays in registers for all lanes of a
// part of the sum. Rows in the padding cost nothing.
#include "ops/convolution/direct.h"

#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "kernels/rows/reorder.h"
#include "ops/convolution_time.h"
#include "runtime/memory/packed_place.h"
#include "runtime/memory/workspace.h"
#include "runtime/per_threads.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using namespace direct;

// A dst larger than this is written past the cache, as in Winograd.
constexpr std::int64_t kStreamBytes = 8 << 20;

// A unit of work: a band of output pixels and a group of output channels.
struct Unit {
  std::int64_t band, group;
};

Unit unit_of(const Direct& d, const Cut& cut, std::int64_t i) {
  const std::int64_t groups = std::ssize(d.groups);
  const std::int64_t bands = d.n * d.out[0] * cut.row_bands * cut.column_bands;
  return cut.by_group ? Unit{i % bands, i / bands} : Unit{i / groups, i % groups};
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

// Copies the src under the band to `slots`.
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
        .w_stride = d.whole_rows() ? 1 : d.stride[2]});
}

// The arguments that all rows of a band and a group of output channels share, in one image.
kernels::DirectTiles tiles_of(const Direct& d, std::int64_t image, const Group& group,
                              const LayerBuffers& buffers) {
  const std::int64_t bundle = image % d.bundles;
  const std::int64_t width = d.sizes().width;
  const std::int64_t block_stride = Direct::volume(d.dst) * d.dst_block;
  const std::int64_t lane = group.first % d.dst_block;
  kernels::DirectTiles tiles{
      .src = nullptr,
      .src_step = d.pixel_step(),
      .segments = nullptr,
      .count = 0,
      .weights = static_cast<const float*>(buffers.weights) + bundle * d.bundle_floats(),
      .bias = buffers.bias ? static_cast<const float*>(buffers.bias) + bundle * d.oc + group.first
                           : nullptr,
      .residual = nullptr,
      .dst = nullptr,
      .pixels = 0,
      .vectors = group.vectors,
      .channels = d.oc - group.first,
      .dst_step = d.dst_step[2] * d.dst_block,
      .dst_offsets = {},
      .parts = 0,
      .part_stride = block_stride,
      .first = true,
      .last = true,
      .ahead = 0,
      .row = 0,
      .rows = 1,
      .stream = false,
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

// Whether dst is written pixel after pixel in vectors that are whole blocks.
bool writes_rows(const Problem& p, const std::vector<Direct>& phases) {
  const Direct& d = phases.front();
  return p.dst_format.is_blocked() && d.dst_block == d.sizes().width && d.whole();
}

// Reports `pixels` stored pixels of a group's vectors, from dst[to] on.
void call_on_stored(const Direct& d, std::int64_t image, const Group& group, std::int64_t to,
                    std::int64_t pixels, const OnStored& on_stored) {
  const std::int64_t first = to / d.dst_block % Direct::volume(d.dst);
  const std::int64_t row = image * d.dst_blocks() + group.first / d.dst_block;
  for (std::int64_t i = 0; i < group.vectors; ++i) on_stored(row + i, first, pixels);
}

// Runs one band and one pass of a group of output channels. `tiles` has what the passes share.
// `src` is pixel 0 of the band, in place or in slots. `offset` is the band's first pixel in dst.
void run_pass(const Direct& d, const Cut& cut, const Band& band, const Group& group,
              const Pass& pass, bool last_pass, const float* src, std::int64_t offset,
              const LayerBuffers& buffers, kernels::DirectTiles tiles) {
  const std::int64_t step = d.step(), steps = d.steps(pass.inputs);
  const std::int64_t pitch = d.in_place ? d.in[2] : cut.axes[2].slots;
  const std::int64_t first_row = band.plane * d.out[1] + band.row;
  // Adjacent rows without a gap that meet the same taps run as one long row.
  const std::int64_t stretches = std::ssize(d.stretches);
  const auto reach_of = cut.reach_of.begin() + first_row * stretches;
  const bool merge =
      d.whole() && d.pixel_step() == step && pitch == band.columns && band.columns == d.out[2] &&
      d.kernel[1] == 1 && stretches == 1 &&
      std::all_of(reach_of, reach_of + band.rows, [&](auto each) { return each == *reach_of; });
  const std::int64_t rows = merge ? 1 : band.rows;
  tiles.rows = rows * stretches;
  tiles.weights += pass.weights;
  tiles.first_lane = pass.lanes.begin;
  tiles.end_lane = pass.lanes.end;
  if (!last_pass) tiles.activation = {};
  const auto run = !d.planes             ? d.kernels->direct_tiles
                   : d.pixel_step() == 1 ? d.kernels->direct_plane_tiles
                                         : d.kernels->direct_row_tiles;
  for (std::int64_t first = 0; first < steps; first += cut.part_steps) {
    const std::int64_t end = std::min(first + cut.part_steps, steps);
    tiles.first = first == 0;
    tiles.last = end == steps;
    const std::int64_t lanes = d.step_begin(pass.inputs, end) - d.step_begin(pass.inputs, first);
    tiles.ahead = lanes * d.taps() * group.vectors * d.sizes().width;
    for (std::int64_t i = 0; i < tiles.rows; ++i) {
      const std::int64_t row = i / stretches;
      const Range& stretch = d.stretches[static_cast<std::size_t>(i % stretches)];
      const std::int64_t skipped = std::max<std::int64_t>(stretch.begin - band.column, 0);
      tiles.pixels = std::min(stretch.end - band.column, band.columns) - skipped;
      if (tiles.pixels <= 0) continue;
      if (merge) tiles.pixels *= band.rows;
      const Segments& segments = cut.reaches[reach_of[i]].segments[pass.reads];
      const std::int64_t to =
          offset + row * d.dst_step[1] * d.dst[2] * d.dst_block + skipped * tiles.dst_step;
      const std::int64_t begin = segments.step_begin[static_cast<std::size_t>(first)];
      tiles.segments = segments.all.data() + begin;
      tiles.count = segments.step_begin[static_cast<std::size_t>(end)] - begin;
      tiles.src = src + (row * pitch + skipped) * step;
      tiles.dst = static_cast<float*>(buffers.dst) + to;
      tiles.residual =
          buffers.residual ? static_cast<const float*>(buffers.residual) + to : nullptr;
      tiles.row = i;
      run(tiles);
      if (buffers.on_stored && tiles.last && last_pass) {
        call_on_stored(d, band.image, group, to, tiles.pixels, *buffers.on_stored);
      }
    }
  }
}

// Runs one band and one group of output channels.
void run_unit(const Direct& d, const Cut& cut, const Band& band, const Group& group,
              const float* src, const LayerBuffers& buffers) {
  const auto to_dst = [&](std::size_t i, std::int64_t at) {
    return d.dst_first[i] + at * d.dst_step[i];
  };
  const std::int64_t dst_row = to_dst(0, band.plane) * d.dst[1] + to_dst(1, band.row);
  const std::int64_t image_floats = d.dst_blocks() * Direct::volume(d.dst) * d.dst_block;
  const std::int64_t offset =
      band.image * image_floats + group.first / d.dst_block * Direct::volume(d.dst) * d.dst_block +
      (dst_row * d.dst[2] + to_dst(2, band.column)) * d.dst_block + group.first % d.dst_block;
  const std::int64_t out_bytes = d.n * image_floats * static_cast<std::int64_t>(sizeof(float));
  kernels::DirectTiles tiles = tiles_of(d, band.image, group, buffers);
  const auto is_one_part = [&](const Pass& pass) { return d.steps(pass.inputs) <= cut.part_steps; };
  tiles.stream = out_bytes > kStreamBytes && d.dst_block == d.sizes().width && !buffers.on_stored &&
                 group.passes.end - group.passes.begin == 1 &&
                 is_one_part(d.passes[static_cast<std::size_t>(group.passes.begin)]);
  for (std::int64_t i = group.passes.begin; i < group.passes.end; ++i) {
    run_pass(d, cut, band, group, d.passes[static_cast<std::size_t>(i)], i + 1 == group.passes.end,
             src, offset, buffers, tiles);
  }
}

// The phases and their cuts.
class Work {
 public:
  std::vector<Direct> phases;

  // The cut of each phase.
  const std::vector<Cut>& cuts() const {
    return cuts_.get([this] {
      std::vector<Cut> cuts;
      for (const Direct& d : phases) cuts.push_back(cut_of(d));
      return cuts;
    });
  }
  std::int64_t units(std::size_t i, const Cut& cut) const {
    const Direct& d = phases[i];
    return d.n * d.out[0] * cut.row_bands * cut.column_bands *
           static_cast<std::int64_t>(d.groups.size());
  }

 private:
  mutable PerThreads<std::vector<Cut>> cuts_;
};

// The band that a thread has in its slots.
struct Filled {
  const Direct* phase = nullptr;
  std::int64_t band = -1;
  float* slots = nullptr;
};

void run_units(const Direct& d, const Cut& cut, Range units, const LayerBuffers& buffers,
               Filled& filled) {
  const auto* src = static_cast<const float*>(buffers.src);
  if (!d.in_place && filled.phase != &d) {
    filled = {&d, -1, workspace(band_floats(d, cut.rows, cut.columns))};
  }
  for (std::int64_t i = units.begin; i < units.end; ++i) {
    const Unit unit = unit_of(d, cut, i);
    const Band band = band_of(d, cut, unit.band);
    const float* first = filled.slots;
    if (d.in_place) {
      const std::int64_t row = (band.image * d.src_blocks() * d.in[0] + band.plane) * d.in[1];
      first = src + ((row + band.row) * d.in[2] + band.column) * d.src_block;
    } else if (filled.band != unit.band) {
      fill_band(d, cut, band, src, filled.slots);
      filled.band = unit.band;
    }
    run_unit(d, cut, band, d.groups[static_cast<std::size_t>(unit.group)], first, buffers);
  }
}

void run(const Work& work, const LayerBuffers& buffers) {
  const std::vector<Cut>& cuts = work.cuts();
  std::int64_t units = 0;
  for (std::size_t i = 0; i < work.phases.size(); ++i) units += work.units(i, cuts[i]);
  share_units(units, kLargeUnit, [&](Pieces& pieces) {
    Filled filled;
    for (Range piece; pieces.next(piece);) {
      LayerBuffers of_phase = buffers;
      for (std::size_t i = 0; i < work.phases.size(); ++i) {
        const Direct& d = work.phases[i];
        const std::int64_t count = work.units(i, cuts[i]);
        const Range part{std::max<std::int64_t>(piece.begin, 0), std::min(piece.end, count)};
        if (part.begin < part.end) run_units(d, cuts[i], part, of_phase, filled);
        piece = {piece.begin - count, piece.end - count};
        of_phase.weights = static_cast<const float*>(of_phase.weights) + d.packed_floats();
      }
    }
  });
}

// Makes rows of a 1x1 that reads src in place, in one thread. Nothing lies between rows of src or
// dst, because no float32 row stage has padding beside them. Vectors of channels are blocks; in
// channels-last they follow each other in a pixel. Sums have the same parts as in run_unit(), so
// the bits are the same.
void run_rows(const Direct& d, std::int64_t part_steps, std::int64_t columns,
              const LayerBuffers& buffers, const BlockedRows& src, const std::uint8_t* residual,
              const BlockedRows& dst, Range rows) {
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  const std::int64_t width = d.sizes().width, steps = ceil_div(d.ic, width);
  const std::int64_t src_vector = d.src_blocks() == 1 ? width : src.block / kFloat,
                     dst_vector = d.dst_blocks() == 1 ? width : dst.block / kFloat;
  const auto run = d.src_block == width ? d.kernels->direct_tiles : d.kernels->direct_row_tiles;
  thread_local std::vector<DirectSegment> segments;
  segments.clear();
  for (std::int64_t i = 0; i < steps; ++i) {
    segments.push_back({i * src_vector, std::min(width, d.ic - i * width), i * width});
  }
  segments.push_back({0, 0, 0});
  for (const Group& group : d.groups) {
    kernels::DirectTiles tiles = tiles_of(d, 0, group, buffers);
    const std::int64_t to = group.first / width * dst_vector * kFloat;
    tiles.weights += d.passes[static_cast<std::size_t>(group.passes.begin)].weights;
    tiles.src = reinterpret_cast<const float*>(src.at(0, rows.begin));
    tiles.dst = reinterpret_cast<float*>(dst.at(0, rows.begin) + to);
    tiles.residual = residual ? reinterpret_cast<const float*>(residual + to) : nullptr;
    tiles.src_step = d.src_block;
    tiles.dst_step = d.dst_block;
    tiles.dst_offsets = {0, dst_vector, 2 * dst_vector};
    tiles.pixels = (rows.end - rows.begin) * columns;
    for (std::int64_t first = 0; first < steps; first += part_steps) {
      const std::int64_t some = std::min(part_steps, steps - first);
      tiles.first = first == 0;
      tiles.last = first + some == steps;
      tiles.ahead = std::min(some * width, d.ic - first * width) * group.vectors * width;
      tiles.segments = segments.data() + first;
      tiles.count = some;
      run(tiles);
    }
  }
}

// The row stage of a 1x1 over images without depth, in blocks of one vector or in channels-last.
std::optional<RowStage> row_stage(const Problem& p, const Direct& d) {
  if (p.groups != 1 || !d.pixelwise || !d.whole() || d.planes) return std::nullopt;
  if (p.dst_format.is_blocked() && d.dst_block != d.sizes().width) return std::nullopt;
  return pixel_row_stage(p, d.packed_floats());
}

// Fills the segments of a gathered problem for one image. Offsets count from the first of `images`.
void place_segments(const GatheredSegments& gathered, const std::vector<const float*>& images,
                    Segments& segments) {
  segments.step_begin = gathered.step_begin;
  segments.all.clear();
  for (const auto& [src, segment] : gathered.segments) {
    const std::int64_t distance = images[static_cast<std::size_t>(src)] - images[0];
    segments.all.push_back({distance + segment.offset, segment.lanes, segment.weights});
  }
  segments.all.push_back({0, 0, 0});
}

void run_gathered(const Work& work, const GatheredSegments& gathered,
                  const std::vector<std::int64_t>& image_floats,
                  const std::vector<const float*>& srcs, const LayerBuffers& buffers) {
  const Direct& d = work.phases[0];
  const std::vector<Cut>& cuts = work.cuts();
  share_units(work.units(0, cuts[0]), kLargeUnit, [&](Pieces& pieces) {
    Cut cut = cuts[0];
    std::vector<const float*> images(srcs);
    std::int64_t image = -1;
    const auto run_gathered_unit = [&](Unit unit) {
      const Band band = band_of(d, cut, unit.band);
      if (band.image != image) {
        image = band.image;
        for (std::size_t i = 0; i < srcs.size(); ++i) images[i] = srcs[i] + image * image_floats[i];
        place_segments(gathered, images, cut.reaches[0].segments[0]);
      }
      run_unit(d, cut, band, d.groups[static_cast<std::size_t>(unit.group)],
               images[0] + band.column * d.src_block, buffers);
    };
    for (Range piece; pieces.next(piece);) {
      for (std::int64_t i = piece.begin; i < piece.end; ++i) run_gathered_unit(unit_of(d, cut, i));
    }
  });
}

bool is_upsampling(const Problem& p) {
  return p.transposed && std::ranges::any_of(p.stride, [](std::int64_t s) { return s > 1; });
}

// Whether this kernel beats oneDNN's. Measured on a Zen 4 with oneDNN 3.2, for both instruction
// sets. At large sizes both reach 90 to 97 % of the FMA peak. Ours is faster
//   - with few input channels, which oneDNN's blocked kernels do not take
//   - transposed with strides: 1.4 to 4 times. Only 2-D kernels larger than the stride are slower
//     (0.7 to 0.9), until in 8c their weights outgrow L2, as in the gradient of a 3x3 at stride 2
//   - at 1x1 with a stride (1.0 to 1.2 times), with more output than input channels (1.0 to 1.2),
//     or where input channels do not fill their blocks (24 to 144: 1.15). With weights in the cache
//     both take the same time (AVX2, ResNet-50 and ResNeXt-50, 1 and 2 threads: 0.95 to 1.1); with
//     weights from memory, as in a model, ours is up to 1.28 times as fast (1024-2048@7)
//   - with larger kernels whose weights outgrow L2: in 8c from 0.5 MB on (1.0 to 1.4 times; not in
//     3-D), in 16c from 8 MB on, and there on small maps only (512@7: 1.06)
//   - with larger kernels in 8c on maps of at most 14x14 (Zen 3: 1.03 to 1.5 times)
// With other larger kernels oneDNN is up to 5 % faster: it reads src in place, and it also skips
// the padding along rows.
bool beats_onednn(const Problem& p) {
  const std::int64_t ic = p.src_dims[1], oc = p.dst_dims[1];
  const std::int64_t weights = c10::multiply_integers(p.weight_dims);
  const std::int64_t bytes = weights * static_cast<std::int64_t>(sizeof(float));
  if (is_upsampling(p)) {
    const bool overlaps = p.weight_dims[2] > p.stride[0] && p.weight_dims.back() > p.stride.back();
    return ic <= kPlaneChannels || p.spatial() != 2 || !overlaps ||
           (p.dst_format.block == 8 && bytes >= 4 << 20);
  }
  if (ic <= kPlaneChannels || p.groups > 1) return true;
  if (weights > ic * oc) {
    const std::int64_t pixels = c10::multiply_integers(p.dst_dims) / oc;
    if (p.dst_format.block == 8) return (bytes >= 512 << 10 || pixels <= 196) && p.spatial() < 3;
    return bytes >= 8 << 20 && pixels <= 64;
  }
  const bool strided = std::ranges::any_of(p.stride, [](std::int64_t s) { return s > 1; });
  return strided || oc > ic || p.src_format.tail(ic) != 0;
}

// More than 1 if there are fewer units than threads. An uneven number of units for each thread does
// not count, because the estimates of other implementations know no units.
double idle_factor(const Problem& p) {
  double units = 0;
  for (const Direct& phase : phases_of(p)) units += static_cast<double>(units_of(phase));
  return std::max(1., threads() / std::max(1., units));
}

// The factor by which the passes of a convolution with groups take longer than its products. A
// single vector of outputs needs a broadcast for each product, and a vector of several groups runs
// once for each.
double pass_factor(const Problem& p) {
  if (p.groups == 1) return 1;
  constexpr double kSingle = 1.15;
  const std::vector<Direct> phases = phases_of(p);
  if (phases.empty()) return 1;
  const Direct& d = phases.front();
  const auto width = static_cast<double>(d.sizes().width);
  double products = 0;
  for (const Group& group : d.groups) {
    const auto passes = static_cast<double>(group.passes.end - group.passes.begin);
    products +=
        passes * static_cast<double>(group.vectors) * width * (group.vectors == 1 ? kSingle : 1);
  }
  return products / static_cast<double>(d.oc);
}

const char* refuses_direct(const Problem& p) {
  if (p.dtype != at::kFloat) return "computes float32 only";
  // Sums start from the residual.
  const bool adds_last = p.epilogue.residual && p.epilogue.before.kind != Activation::Kind::kNone;
  if (adds_last) return "has no activation before a sum";
  if (p.dst_format == kPlain) return "writes no plain format";
  if (p.dst_format == kChannelsLast) {
    const bool whole = p.dst_dims[1] % kernels::kernels().direct_sizes->width == 0;
    return whole ? nullptr : "writes whole vectors of channels where they come last";
  }
  const std::int64_t block = p.dst_format.block;
  const bool narrow = block < kernels::kernels_for(block).direct_sizes->width;
  if (narrow && !p.epilogue.empty()) return "fuses nothing in blocks narrower than a vector";
  if (narrow && is_upsampling(p)) return "has no strides of transposed kernels in narrow blocks";
  if (narrow && p.groups > 1) return "takes one group only in blocks narrower than a vector";
  return nullptr;
}

double estimate_direct(const Problem& p) {
  return direct_microseconds(p) * idle_factor(p) * pass_factor(p) *
         (beats_onednn(p) ? kBarelyFaster : kBarelySlower);
}

std::optional<LayerPlan> plan_direct(const Problem& p) {
  const auto work = std::make_shared<Work>();
  work->phases = phases_of(p);
  if (work->phases.empty()) return std::nullopt;
  const Direct& first = work->phases.front();
  const Group& last = first.groups.back();
  std::string format = text(
      "direct/", first.sizes().width, "/", first.groups[0].vectors, "/", last.first, "/",
      last.vectors, p.groups > 1 ? text("/groups ", p.groups, "/", first.bundles) : "",
      first.planes ? text("/planes", taps_in_order(first)) : "", p.transposed ? "/transposed" : "");
  if (is_upsampling(p)) format += text("/", p.stride, p.padding, p.dilation, p.dst_dims);
  return LayerPlan{
      .weights_format = std::move(format),
      .pack = [work, transposed = p.transposed](
                  const at::Tensor& weight) { return pack(work->phases, transposed, weight); },
      .packed_bytes = packed_floats(work->phases) * kFloatBytes,
      .run = [work](const LayerBuffers& buffers) { run(*work, buffers); },
      .loops_only = true,
      .calls_on_stored = writes_rows(p, work->phases),
      .row_stage = row_stage(p, first),
      .run_rows = [work, columns = p.dst_dims.back()](const LayerBuffers& buffers) -> RunRows {
        const std::int64_t part_steps = work->cuts().front().part_steps;
        return [work, part_steps, columns, buffers](const BlockedRows& src,
                                                    const std::uint8_t* residual,
                                                    const BlockedRows& dst, Range rows) {
          run_rows(work->phases[0], part_steps, columns, buffers, src, residual, dst, rows);
        };
      }};
}

}  // namespace

constinit const ConvolutionImplementation convolutions::direct = {
    .name = "direct",
    .refuses = refuses_direct,
    .plan = plan_direct,
    .estimate = estimate_direct,
    .traits = {.sums_in_place = true, .gathers_channels = true, .in_rows = true},
};

bool gathers_in_place(const Problem& p, const std::vector<ChannelOf>& channels) {
  // If runs of channels are shorter than this, it is faster to move them first.
  constexpr std::int64_t kLeastRun = 4;
  if (refuses_direct(p) || !p.blocked() || p.transposed || p.groups != 1) return false;
  const Direct d = phases_of(p).front();
  if (!d.in_place || !d.pixelwise || d.in[0] * d.in[1] != 1) return false;
  return std::ssize(gather_segments(d, channels).segments) * kLeastRun <= std::ssize(channels);
}

GatheredConvolutionPlan plan_direct_gathered(const Problem& p,
                                             const std::vector<ChannelOf>& channels,
                                             const std::vector<std::int64_t>& src_channels) {
  LayerPlan plan = *plan_direct(p);
  const auto work = std::make_shared<Work>();
  work->phases = phases_of(p);
  const Direct& d = work->phases.front();
  const auto gathered = std::make_shared<GatheredSegments>(gather_segments(d, channels));
  std::vector<std::int64_t> image_floats;
  for (const std::int64_t count : src_channels) {
    image_floats.push_back(ceil_div(count, d.src_block) * d.src_block * Direct::volume(d.in));
  }
  return {.weights_format = plan.weights_format + "/gathered",
          .pack =
              [pack = std::move(plan.pack), gathered](const at::Tensor& weight) {
                return pack(weight.index_select(1, at::tensor(gathered->order, at::kLong)));
              },
          .run =
              [work, gathered, image_floats](const std::vector<const void*>& srcs,
                                             const LayerBuffers& buffers) {
                std::vector<const float*> images;
                for (const void* src : srcs) images.push_back(static_cast<const float*>(src));
                run_gathered(*work, *gathered, image_floats, images, buffers);
              }};
}

}  // namespace torch_blocked

// Our depthwise and grouped convolutions, forward and transposed (which is also the gradient of
// src), with any kernel, stride and dilation. They take float32 and bfloat16 if the channel block
// is one vector. Depthwise float32 also runs in channels-last.
//
// A transposed convolution of stride s splits into s convolutions of stride 1 along each dim, its
// phases: the outputs with one remainder modulo s see every s-th tap. After this split nothing
// knows about transposition.
#include "kernels/grouped/grouped.h"

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <vector>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/convolution/convolution.h"
#include "ops/convolution_time.h"
#include "ops/products/phases.h"
#include "runtime/isa.h"
#include "runtime/memory/packed_place.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using kernels::GroupedAxis;
using kernels::GroupedConvolution;
using kernels::LaneSource;
using kernels::RunGrouped;
using Problem = ConvolutionProblem;

// Threads share 1-D rows in parts of this many pixels. All tile sizes divide it.
constexpr std::int64_t kPart = 140;

// One dim of a phase, and its taps of the weight in its order.
struct Phase {
  GroupedAxis axis;
  std::vector<std::int64_t> taps;
};

struct Dim {
  std::int64_t in, out, kernel, stride, padding, dilation;
};

Phase forward(const Dim& dim) {
  std::vector<std::int64_t> taps(static_cast<std::size_t>(dim.kernel));
  std::iota(taps.begin(), taps.end(), 0);
  return {{.in = dim.in,
           .out = dim.out,
           .dst = dim.out,
           .kernel = dim.kernel,
           .origin = -dim.padding,
           .stride = dim.stride,
           .dilation = dim.dilation,
           .dst_first = 0,
           .dst_step = 1},
          std::move(taps)};
}

Phase transposed(const Dim& dim, std::int64_t rest) {
  const auto found = phase_axis({dim.kernel, dim.stride, dim.padding, dim.dilation}, dim.out, rest);
  // Outputs that meet no tap get only the bias.
  const PhaseAxis axis =
      found.value_or(PhaseAxis{ceil_div(dim.out - rest, dim.stride), 0, 0, 1, 0, 1});
  Phase phase{{.in = dim.in,
               .out = axis.outputs,
               .dst = dim.out,
               .kernel = axis.kernel,
               .origin = -axis.padding,
               .stride = 1,
               .dilation = axis.dilation,
               .dst_first = rest,
               .dst_step = dim.stride},
              {}};
  for (std::int64_t k = 0; k < axis.kernel; ++k) {
    phase.taps.push_back(axis.tap_first + k * axis.tap_step);
  }
  return phase;
}

std::vector<Phase> phases_of(const Dim& dim, bool is_transposed) {
  if (!is_transposed) return {forward(dim)};
  std::vector<Phase> phases;
  for (std::int64_t remainder = 0; remainder < std::min(dim.stride, dim.out); ++remainder) {
    phases.push_back(transposed(dim, remainder));
  }
  return phases;
}

// Everything that does not change from run to run.
struct Grouped {
  struct Part {
    GroupedConvolution convolution;
    std::array<std::vector<std::int64_t>, 3> taps;
    std::int64_t weights;  // where its weights begin, in elements
    std::int64_t units;    // of work
  };

  std::vector<Part> parts;  // one for each phase
  std::vector<LaneSource> lanes;
  std::int64_t n, oc, block, blocks, inputs, weights = 0;
  std::int64_t element;  // bytes of a number
  bool transposed, of_pixels;
  RunGrouped kernel;
};

// Where each output lane of `block` finds the `input`-th input channel of its group. There is one
// entry for each vector of src that holds some of these, so at least one.
std::vector<LaneSource> sources_of(const Problem& p, std::int64_t block, std::int64_t input) {
  const std::int64_t ic = p.src_dims[1] / p.groups, oc = p.dst_dims[1] / p.groups;
  std::vector<LaneSource> sources;
  for (std::int64_t lane = 0; lane < p.dst_format.block; ++lane) {
    const std::int64_t channel = block * p.dst_format.block + lane;
    if (channel >= p.dst_dims[1]) break;
    const std::int64_t from = channel / oc * ic + input, from_block = from / p.src_format.block;
    if (sources.empty() || sources.back().block != from_block) {
      sources.push_back({from_block, 0, {}});
      sources.back().lanes.fill(-1);
    }
    sources.back().lanes[static_cast<std::size_t>(lane)] =
        static_cast<std::int32_t>(from % p.src_format.block);
  }
  return sources;
}

// Fills grouped.lanes [blocks, inputs, sources] and returns the number of sources: the most that
// any block needs for an input. Sources that a block does not need have no lanes.
std::int64_t fill_lanes(const Problem& p, Grouped& grouped) {
  std::vector<std::vector<LaneSource>> all;
  std::size_t most = 1;
  for (std::int64_t block = 0; block < grouped.blocks; ++block) {
    for (std::int64_t input = 0; input < grouped.inputs; ++input) {
      all.push_back(sources_of(p, block, input));
      most = std::max(most, all.back().size());
    }
  }
  for (std::vector<LaneSource>& sources : all) {
    sources.front().count = static_cast<std::int64_t>(sources.size());
    LaneSource nothing{sources.back().block, 0, {}};
    nothing.lanes.fill(-1);
    sources.resize(most, nothing);
    grouped.lanes.insert(grouped.lanes.end(), sources.begin(), sources.end());
  }
  return static_cast<std::int64_t>(most);
}

// Whether every vector of output channels lies in one group.
bool one_group(const std::vector<LaneSource>& lanes) {
  return std::ranges::all_of(lanes, [](const LaneSource& source) {
    return std::ranges::all_of(
        source.lanes, [&](std::int32_t lane) { return lane == source.lanes[0] || lane < 0; });
  });
}

RunGrouped kernel_for(const Grouped& grouped, std::int64_t sources, bool floats) {
  const kernels::Kernels& table = kernels::kernels_for(grouped.block);
  if (sources > 2) return floats ? table.grouped_gather : table.grouped_gather_bfloats;
  if (sources == 1 && one_group(grouped.lanes)) {
    return floats ? table.grouped_broadcast : table.grouped_broadcast_bfloats;
  }
  return floats ? table.grouped_permute : table.grouped_permute_bfloats;
}

bool is_depthwise(const Problem& p) {
  return p.groups == p.src_dims[1] && p.groups == p.dst_dims[1];
}

// Whether the problem is depthwise in channels-last with whole vectors of channels.
bool is_of_pixels(const Problem& p) {
  return p.src_format == kChannelsLast && p.dst_format == kChannelsLast && is_depthwise(p) &&
         p.dtype == at::kFloat && p.dst_dims[1] % kernels::kernels().width == 0;
}

// The refusals that groups of any size and dtype share; null if there is none. The block must be
// one vector of the kernels.
const char* refuses_groups(const Problem& p) {
  const std::int64_t block = p.src_format.block;
  if (p.groups == 1) return "is for several groups";
  if (is_of_pixels(p)) return nullptr;
  if (!p.blocked()) return "reads and writes one blocked format only";
  const bool vector = block == 8 || (block == 16 && isa() >= Isa::kAvx512);
  return vector ? nullptr : "takes blocks of one vector only";
}

std::shared_ptr<Grouped> grouped_of(const Problem& p) {
  const SpatialSizes s = spatial_sizes(p);
  const auto phases = [&](std::size_t i) {
    return phases_of({s.in[i], s.out[i], s.kernel[i], s.stride[i], s.padding[i], s.dilation[i]},
                     p.transposed);
  };
  auto grouped = std::make_shared<Grouped>();
  grouped->n = p.dst_dims[0];
  grouped->oc = p.dst_dims[1];
  const bool of_pixels = grouped->of_pixels = is_of_pixels(p);
  grouped->block = of_pixels ? kernels::kernels().width : p.dst_format.block;
  grouped->blocks = ceil_div(p.dst_dims[1], grouped->block);
  grouped->inputs = p.src_dims[1] / p.groups;
  grouped->element = static_cast<std::int64_t>(c10::elementSize(p.dtype));
  grouped->transposed = p.transposed;
  const bool floats = p.dtype == at::kFloat;
  const std::int64_t block = grouped->block;
  std::int64_t sources = 0;
  if (of_pixels) {
    grouped->kernel = kernels::kernels().depthwise_last;
  } else if (is_depthwise(p)) {
    const kernels::Kernels& table = kernels::kernels_for(block);
    grouped->kernel = floats ? table.depthwise : table.depthwise_bfloats;
  } else {
    sources = fill_lanes(p, *grouped);
    grouped->kernel = kernel_for(*grouped, sources, floats);
  }
  const std::int64_t src_blocks = ceil_div(p.src_dims[1], block);
  const std::int64_t src_pixels = c10::multiply_integers(s.in);
  const std::int64_t dst_pixels = c10::multiply_integers(s.out);
  const std::int64_t pixel = of_pixels ? grouped->oc : block;  // elements to the next pixel
  for (const Phase& d : phases(0)) {
    for (const Phase& h : phases(1)) {
      for (const Phase& w : phases(2)) {
        const bool one_row = d.axis.out * h.axis.out == 1;
        const std::int64_t part = one_row ? std::min(w.axis.out, kPart) : w.axis.out;
        const GroupedConvolution convolution{.axes = {d.axis, h.axis, w.axis},
                                             .dst_blocks = grouped->blocks,
                                             .oc = grouped->oc,
                                             .inputs = grouped->inputs,
                                             .part = part,
                                             .src_pixel = pixel,
                                             .src_row = w.axis.in * pixel,
                                             .src_plane = of_pixels ? block : src_pixels * block,
                                             .src_image = src_blocks * src_pixels * block,
                                             .dst_pixel = pixel,
                                             .dst_row = w.axis.dst * pixel,
                                             .dst_plane = of_pixels ? block : dst_pixels * block,
                                             .dst_image = grouped->blocks * dst_pixels * block,
                                             .lanes = sources ? grouped->lanes.data() : nullptr,
                                             .sources = sources,
                                             .src = nullptr,
                                             .weights = nullptr,
                                             .bias = nullptr,
                                             .residual = nullptr,
                                             .dst = nullptr,
                                             .epilogue = p.epilogue};
        const std::int64_t units =
            grouped->n * grouped->blocks * d.axis.out * h.axis.out * ceil_div(w.axis.out, part);
        grouped->parts.push_back({convolution, {d.taps, h.taps, w.taps}, grouped->weights, units});
        grouped->weights += grouped->blocks * d.axis.kernel * h.axis.kernel * w.axis.kernel *
                            grouped->inputs * grouped->block;
      }
    }
  }
  return grouped;
}

// weight [OC, inputs, *kernel], transposed [IC, OC / groups, *kernel] -> float32 [blocks, KD, KH,
// inputs, KW, block] for the taps of each phase, with zeros beyond OC.
at::Tensor pack(const Grouped& grouped, const at::Tensor& narrow) {
  const at::Tensor weight = narrow.to(at::kFloat);
  const at::Tensor packed = empty_packed(grouped.weights, at::kFloat);
  trace::Timed timed(trace::Kind::kPack, "convolution",
                     static_cast<std::int64_t>(weight.nbytes() + packed.nbytes()));
  // Where the first input of output channel oc begins. In a transposed weight the rows of a group
  // are its inputs.
  const std::int64_t of_group = grouped.transposed ? weight.size(1) : 1;
  const auto first_of = [&](std::int64_t oc) {
    if (!grouped.transposed) return oc * weight.stride(0);
    return oc / of_group * grouped.inputs * weight.stride(0) + oc % of_group * weight.stride(1);
  };
  const std::int64_t input_stride = weight.stride(grouped.transposed ? 0 : 1);
  const std::array<std::int64_t, 3> strides = as_3d(weight.strides().slice(2), 0);
  const auto* from = weight.const_data_ptr<float>();
  const auto pack_block = [&](const Grouped::Part& part, std::int64_t block, float* out) {
    const std::int64_t first = block * grouped.block;
    const std::int64_t used = std::min(grouped.block, grouped.oc - first);
    for (const std::int64_t kd : part.taps[0]) {
      for (const std::int64_t kh : part.taps[1]) {
        for (std::int64_t input = 0; input < grouped.inputs; ++input) {
          for (const std::int64_t kw : part.taps[2]) {
            const float* in =
                from + kd * strides[0] + kh * strides[1] + kw * strides[2] + input * input_stride;
            for (std::int64_t i = 0; i < used; ++i) out[i] = in[first_of(first + i)];
            std::fill(out + used, out + grouped.block, 0.f);
            out += grouped.block;
          }
        }
      }
    }
  };
  for (const Grouped::Part& part : grouped.parts) {
    const auto& [d, h, w] = part.taps;
    const auto taps = static_cast<std::int64_t>(d.size() * h.size() * w.size());
    const std::int64_t size = taps * grouped.inputs * grouped.block;
    float* to = packed.mutable_data_ptr<float>() + part.weights;
    parallel_units(grouped.blocks, size, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) pack_block(part, i, to + i * size);
    });
  }
  return packed;
}

// Runs units: parts of rows, or rows numbered through d, the blocks and the images.
void run_units(const Grouped& grouped, const GroupedConvolution& g, Range units,
               const OnStored* on_stored) {
  if (!on_stored) return grouped.kernel(g, units.begin, units.end);
  // The pixels to store before on_stored is called for them, while they are in cache.
  constexpr std::int64_t kPixels = 1024;
  const auto& [d, h, w] = g.axes;
  const std::int64_t parts = ceil_div(w.out, g.part), of_block = d.out * h.out * parts;
  const std::int64_t at_once = std::max<std::int64_t>(1, kPixels / g.part);
  for (std::int64_t i = units.begin; i < units.end;) {
    const std::int64_t of_rows = i % of_block;
    const std::int64_t count = std::min({at_once, of_block - of_rows, units.end - i});
    grouped.kernel(g, i, i + count);
    const auto pixel_of = [&](std::int64_t unit) {
      return unit / parts * w.out + std::min(unit % parts * g.part, w.out);
    };
    const std::int64_t first = pixel_of(of_rows);
    (*on_stored)(i / of_block, first, pixel_of(of_rows + count) - first);
    i += count;
  }
}

void run(const Grouped& grouped, const LayerBuffers& buffers) {
  std::int64_t units = 0, work = 0;
  for (const Grouped::Part& part : grouped.parts) {
    const auto& [d, h, w] = part.convolution.axes;
    units += part.units;
    work = std::max(work, part.convolution.part * grouped.block * grouped.inputs * d.kernel *
                              h.kernel * w.kernel);
  }
  parallel_units(units, work, [&](std::int64_t begin, std::int64_t end) {
    for (const Grouped::Part& part : grouped.parts) {
      if (begin < part.units && end > 0) {
        GroupedConvolution convolution = part.convolution;
        convolution.src = buffers.src;
        convolution.weights = static_cast<const float*>(buffers.weights) + part.weights;
        convolution.bias = static_cast<const float*>(buffers.bias);
        convolution.residual = buffers.residual;
        convolution.dst = buffers.dst;
        run_units(grouped, convolution,
                  {std::max<std::int64_t>(begin, 0), std::min(end, part.units)}, buffers.on_stored);
      }
      begin -= part.units;
      end -= part.units;
    }
  });
}

// Makes rows of dst from rows of src, in one thread.
void run_rows(const Grouped& grouped, const LayerBuffers& buffers, const BlockedRows& src,
              const std::uint8_t* residual, const BlockedRows& dst, Range rows) {
  GroupedConvolution g = grouped.parts[0].convolution;
  auto& [d, h, w] = g.axes;
  const std::int64_t element = grouped.element;
  h.origin += rows.begin * h.stride;
  h.out = rows.end - rows.begin;
  g.part = w.out;
  g.src_row = src.row / element;
  g.dst_row = dst.row / element;
  if (!grouped.of_pixels) {
    g.src_plane = src.block / element;
    g.dst_plane = dst.block / element;
  }
  g.src = src.at(0, 0);
  g.weights = static_cast<const float*>(buffers.weights);
  g.bias = static_cast<const float*>(buffers.bias);
  g.residual = residual;
  g.dst = dst.at(0, rows.begin);
  grouped.kernel(g, 0, grouped.blocks * h.out);
}

// The row stage, for images without depth. Taps beyond src are skipped. A pixel of channels-last is
// one block.
std::optional<RowStage> row_stage(const Problem& p, const Grouped& grouped) {
  const SpatialSizes s = spatial_sizes(p);
  if (p.transposed || s.kernel[0] != 1 || s.in[0] != 1 || s.padding[0] != 0) return std::nullopt;
  if (!p.blocked() && !grouped.of_pixels) return std::nullopt;
  const auto blocks = [&](std::int64_t own) { return grouped.of_pixels ? 1 : own; };
  const std::int64_t pixel_bytes = grouped.parts[0].convolution.dst_pixel * grouped.element;
  return RowStage{.window = {s.kernel[1], s.stride[1], s.padding[1], s.dilation[1]},
                  .src = {s.in[2], 0, s.in[2], pixel_bytes, 0, false},
                  .n = grouped.n,
                  .src_rows = s.in[1],
                  .src_blocks = blocks(p.src_format.blocks(p.src_dims[1])),
                  .dst_rows = s.out[1],
                  .dst_columns = s.out[2],
                  .dst_blocks = blocks(grouped.blocks),
                  .dst_pixel_bytes = pixel_bytes,
                  .weight_bytes = grouped.weights * static_cast<std::int64_t>(sizeof(float)),
                  .reads_padding = false};
}

LayerPlan plan(const Problem& p) {
  const auto grouped = grouped_of(p);
  std::string format = text("grouped/", p.groups, "/", grouped->block);
  if (p.transposed) format += text("/transposed/", p.stride, p.padding, p.dilation, p.dst_dims);
  return LayerPlan{.weights_format = std::move(format),
                   .pack = [grouped](const at::Tensor& weight) { return pack(*grouped, weight); },
                   .packed_bytes = grouped->weights * kFloatBytes,
                   .run = [grouped](const LayerBuffers& buffers) { run(*grouped, buffers); },
                   .loops_only = true,
                   .calls_on_stored = p.dst_format.is_blocked() && !p.transposed,
                   .row_stage = row_stage(p, *grouped),
                   .run_rows = [grouped](const LayerBuffers& buffers) -> RunRows {
                     return [grouped, buffers](const BlockedRows& src, const std::uint8_t* residual,
                                               const BlockedRows& dst, Range rows) {
                       run_rows(*grouped, buffers, src, residual, dst, rows);
                     };
                   }};
}

const char* refuses_type(const Problem& p) {
  if (p.dtype == at::kFloat) return nullptr;
  if (p.dtype != at::kBFloat16) return "computes float32 and bfloat16 only";
  return multiplies_bfloats() ? nullptr : "has no kernel for the dtype on this CPU";
}

const char* refuses_depthwise(const Problem& p) {
  if (const char* refusal = refuses_type(p)) return refusal;
  const char* refusal = refuses_groups(p);
  return refusal || is_depthwise(p) ? refusal : "is for one channel a group";
}

const char* refuses_grouped(const Problem& p) {
  if (const char* refusal = refuses_type(p)) return refusal;
  const char* refusal = refuses_groups(p);
  return refusal || !is_depthwise(p) ? refusal : "is for several channels a group";
}

std::optional<LayerPlan> plan_groups(const Problem& p) {
  return p.dtype == at::kFloat ? plan(p) : with_float_bias(plan(p), p.dst_dims[1]);
}

// Ours is faster than oneDNN's (1.0 to 1.4 times), except with a stride in 8c (0.9 times) or with a
// stride on maps that come from memory (0.8 times). Kernels of 7x7 and 9x9 are as fast (0.75 to 1.2
// times). With a dilation along rows each product needs its own load, and oneDNN's is faster (ours
// runs at 0.55 times its speed).
double estimate_depthwise(const Problem& p) {
  if (p.dtype == at::kBFloat16) return kBarelyFaster * direct_microseconds(p) / 2;
  if (isa() == Isa::kDefault) return kNever;
  if (p.dilation.back() > 1) return kBarelySlower * direct_microseconds(p);
  const bool large = p.weight_dims.back() > 5;
  if (large) return direct_microseconds(p);
  const bool strided = std::ranges::any_of(p.stride, [](std::int64_t s) { return s > 1; });
  const auto bytes = c10::multiply_integers(p.src_dims) * static_cast<std::int64_t>(sizeof(float));
  const bool slower = strided && !p.transposed && (p.dst_format.block == 8 || bytes > 8 << 20);
  return direct_microseconds(p) * (slower ? kBarelySlower : kBarelyFaster);
}

// Measured on Zen 4, one thread, 3x3, GF/s of ours and of oneDNN's blocked and channels-last
// kernels (which cost two reorders besides), for as many channels a group:
//   16c    4 102 - 39     8 107 - 77    16 108 118 97    24 76 - 79    3 57 - 13
//    8c    4  78 - 22     8  90 47 61   16  94  74 81    32 101 94 78  64 93 109 111
// The taps of a kernel row share one permutation of input lanes and its loads. A 1x1 kernel has
// nothing to share, and neither have kernel rows for which there is no grouped_kernel. On a Zen 3
// in 8c, 1x1 kernels of 32 and 80 channels a group run at 41 and 45 GF/s and direct at 76 and 89;
// 5x5 kernels of 24 channels run at 42 and direct at 99. Lanes from several vectors are slow too:
// 3x3 of 28 and 20 channels run at 28 and 21, direct at 52 and 46.
// bfloat16 is summed in float32. Its dot products would multiply whole blocks, of which a group has
// only a part.
double estimate_grouped(const Problem& p) {
  if (p.dtype == at::kBFloat16) return kBarelySlower * direct_microseconds(p);
  if (isa() == Isa::kDefault) return kNever;
  const std::int64_t inputs = p.src_dims[1] / p.groups, taps = p.weight_dims.back();
  Grouped grouped;
  grouped.blocks = p.dst_format.blocks(p.dst_dims[1]);
  grouped.inputs = inputs;
  const bool permutes = fill_lanes(p, grouped) > 1;
  const bool shares = (taps == 3 || (taps == 2 && p.stride.back() == 1)) && p.dilation.back() == 1;
  const bool faster = permutes || !one_group(grouped.lanes) ||
                      (p.dst_format.block == 8 && inputs <= 32 && taps == 3);
  return direct_microseconds(p) * (faster ? kBarelyFaster : kBarelySlower) * (shares ? 1 : 2) *
         (permutes ? 2 : 1);
}

}  // namespace

constinit const ConvolutionImplementation convolutions::depthwise = {
    .name = "depthwise",
    .refuses = refuses_depthwise,
    .plan = plan_groups,
    .estimate = estimate_depthwise,
    .traits = {.sums_in_place = true, .in_rows = true},
};

constinit const ConvolutionImplementation convolutions::grouped = {
    .name = "grouped",
    .refuses = refuses_grouped,
    .plan = plan_groups,
    .estimate = estimate_grouped,
    .traits = {.sums_in_place = true, .in_rows = true},
};

}  // namespace torch_blocked

// A linear layer of many rows, by the tiles of direct convolution: a row is a pixel, an input a
// lane. Threads go through its loops together, as they do not through oneDNN's kernel, which by
// itself is as fast, more or less by the shape: optimize times both.
#include <algorithm>
#include <array>
#include <string>

#include "format/sizes.h"
#include "kernels/direct.h"
#include "kernels/kernels.h"
#include "ops/linear.h"
#include "runtime/memory_pool.h"
#include "runtime/threads.h"
#include "runtime/trace.h"

namespace torch_blocked {
namespace {

using kernels::DirectSegment;
using kernels::DirectTiles;

// Rows of a unit: src stays in L2 while all groups of outputs go over it.
constexpr std::int64_t kMostRows = 224, kMostWidth = 48;
// Inputs that are summed in registers before their sum joins the total: rounding then grows only
// with the root of the number of inputs, and their weights stay in L1 for all rows of a unit.
constexpr std::int64_t kChain = 256;

// How a problem is cut: units are some rows and a group of outputs, some vectors of them.
struct Cut {
  const kernels::Kernels* kernels;
  std::int64_t group;  // outputs
  std::int64_t rows;   // of a unit
  std::int64_t lanes;  // inputs of one part of a sum

  explicit Cut(const LinearProblem& p)
      : kernels(&kernels::kernels()), lanes(std::min(kChain, kernels->direct_sizes->lanes)) {
    const kernels::DirectSizes& sizes = *kernels->direct_sizes;
    group = sizes.vectors * sizes.width;
    const std::int64_t tile = sizes.pixels[static_cast<std::size_t>(sizes.vectors - 1)];
    const std::int64_t fitting = sizes.band_bytes / (p.inputs * std::int64_t{sizeof(float)});
    rows = std::clamp(fitting / tile * tile, tile, kMostRows / tile * tile);
  }
};

// [outputs, inputs] -> [groups of outputs, inputs, outputs of the group]
at::Tensor pack(const at::Tensor& weight, std::int64_t group) {
  trace::Timed timed(trace::Kind::kPack, "linear", static_cast<std::int64_t>(weight.nbytes()));
  const std::int64_t outputs = weight.size(0), inputs = weight.size(1);
  const std::int64_t groups = ceil_div(outputs, group);
  at::Tensor packed = empty_pooled({groups, inputs, group}, at::kFloat);
  if (outputs % group != 0) packed.zero_();
  for (std::int64_t i = 0; i < groups; ++i) {
    const std::int64_t count = std::min(group, outputs - i * group);
    packed.select(0, i).narrow(1, 0, count).copy_(weight.narrow(0, i * group, count).t());
  }
  return packed;
}

struct Buffers {
  const float *src, *weights, *bias;
  float* dst;
};

// One group of outputs of rows [first, first + rows).
void run_unit(const LinearProblem& p, const Cut& cut, const Buffers& buffers, std::int64_t first,
              std::int64_t rows, std::int64_t output) {
  const std::int64_t width = cut.kernels->direct_sizes->width;
  const std::int64_t channels = std::min(cut.group, p.outputs - output);
  alignas(64) std::array<float, kMostRows * kMostWidth> whole;  // vectors, where dst has not all
  const bool fits = channels == cut.group;
  float* dst = fits ? buffers.dst + first * p.outputs + output : whole.data();
  DirectTiles tiles{.src = buffers.src + first * p.inputs,
                    .src_step = p.inputs,
                    .segments = nullptr,
                    .count = 1,
                    .weights = buffers.weights + output * p.inputs,
                    .bias = buffers.bias ? buffers.bias + output : nullptr,
                    .residual = nullptr,
                    .dst = dst,
                    .pixels = rows,
                    .vectors = cut.group / width,
                    .channels = channels,
                    .dst_step = fits ? p.outputs : cut.group,
                    .dst_offsets = {0, width, 2 * width},
                    .parts = 0,
                    .part_stride = 0,
                    .first = true,
                    .last = true,
                    .ahead = 0,
                    .tile = 0,
                    .stream = false,
                    .activation = p.activation};
  for (std::int64_t lane = 0; lane < p.inputs; lane += cut.lanes) {
    const std::int64_t lanes = std::min(cut.lanes, p.inputs - lane);
    const std::array<DirectSegment, 2> segments{{{lane, lanes, lane}, {}}};
    tiles.segments = segments.data();
    tiles.first = lane == 0;
    tiles.last = lane + lanes == p.inputs;
    tiles.ahead = lanes * cut.group;
    cut.kernels->direct_row_tiles(tiles);
  }
  for (std::int64_t row = 0; row < rows && !fits; ++row) {
    std::copy_n(dst + row * cut.group, channels, buffers.dst + (first + row) * p.outputs + output);
  }
}

void run(const LinearProblem& p, const Cut& cut, const Buffers& buffers) {
  const std::int64_t groups = ceil_div(p.outputs, cut.group);
  const std::int64_t parts = ceil_div(p.rows, cut.rows);
  parallel_units(groups * parts, cut.rows * p.inputs, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i / groups * cut.rows;
      run_unit(p, cut, buffers, first, std::min(cut.rows, p.rows - first), i % groups * cut.group);
    }
  });
}

}  // namespace

std::optional<LinearPlan> plan_linear_direct(const LinearProblem& p) {
  const Cut cut(p);
  if (p.rows == 0 || p.inputs == 0) return std::nullopt;
  LinearPlan plan{
      .weights_format = "linear by " + std::to_string(cut.group),
      .pack = [group = cut.group](const at::Tensor& weight) { return pack(weight, group); },
      .run = {}};
  plan.run = [p, cut](const float* src, const void* weights, const float* bias, float* dst) {
    run(p, cut, {src, static_cast<const float*>(weights), bias, dst});
  };
  plan.loops_only = true;
  return plan;
}

// Its weights come in pieces, as oneDNN's do.
double estimate_linear_direct(const LinearProblem& p) {
  constexpr double kFlops = 120e3, kBytes = 17e3;  // per microsecond
  const std::int64_t group = Cut(p).group;
  const auto weights = static_cast<double>(p.inputs * ceil_div(p.outputs, group) * group);
  return std::max(2 * static_cast<double>(p.rows) * weights / kFlops, 4 * weights / kBytes);
}

}  // namespace torch_blocked

// Runs a linear layer of many rows by the tiles of direct convolution: a row is a pixel, an input a
// lane. Threads can go through its loops together, which oneDNN's kernel does not allow. Alone,
// oneDNN's kernel is about as fast, depending on the shape; optimize times both.
#include <algorithm>
#include <array>
#include <string>

#include "ops/linear/linear.h"
#include "ops/products/row_product.h"
#include "runtime/memory/packed_place.h"
#include "runtime/memory/workspace.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// The most rows of a unit: src stays in L2 while all groups of outputs go over it.
constexpr std::int64_t kMostRows = 224, kMostWidth = 48;
// Rows at multiples of this distance, in floats, have their lines in one set of L1, which holds 8
// lines. A tile of more rows would read each line 16 times: 1024 x 1024 -> 256 took 1.7 times as
// long.
constexpr std::int64_t kSameSet = 1024, kWays = 8;
// Such rows are copied to another distance, some lanes at a time, for up to kCopiedGroups groups of
// outputs. There are fewer groups if threads would have too few units to share.
constexpr std::int64_t kCopiedRows = 56, kCopiedGroups = 8, kApart = 16, kUnits = 12;

// How a problem is cut. A unit is some rows and some groups of outputs.
struct Cut {
  PackedColumns outputs;
  bool copies;
  std::int64_t rows, groups;  // of a unit

  explicit Cut(const LinearProblem& p)
      : outputs{&kernels::kernels(), p.inputs, p.outputs},
        copies(outputs.tile() > kWays && p.inputs % kSameSet == 0) {
    const std::int64_t tile = outputs.tile();
    const std::int64_t fitting =
        outputs.sizes().band_bytes / (p.inputs * std::int64_t{sizeof(float)});
    const std::int64_t most =
        copies ? kCopiedRows : std::clamp(fitting / tile * tile, tile, kMostRows / tile * tile);
    const std::int64_t parts = ceil_div(p.rows, most);
    rows = ceil_div(ceil_div(p.rows, parts), tile) * tile;
    const std::int64_t all = outputs.groups();
    const std::int64_t share = std::clamp(all * parts / kUnits, std::int64_t{1}, kCopiedGroups);
    groups = copies ? ceil_div(all, ceil_div(all, share)) : 1;
  }
};

at::Tensor pack_columns(const at::Tensor& weight, const PackedColumns& outputs) {
  trace::Timed timed(trace::Kind::kPack, "linear", static_cast<std::int64_t>(weight.nbytes()));
  at::Tensor packed = empty_packed(outputs.floats(), at::kFloat);
  outputs.pack({weight.const_data_ptr<float>(), weight.size(1), weight.size(0), weight.stride(1),
                weight.stride(0)},
               packed.mutable_data_ptr<float>());
  return packed;
}

struct Buffers {
  const float *src, *weights, *bias, *residual;
  float* dst;
};

// Rows [row, row + rows) and groups of outputs [group, end).
struct Unit {
  std::int64_t row, rows, group, end;
};

// Adds lanes [lane, lane + lanes) to the unit's sums. src begins with that lane.
void run_part(const LinearProblem& p, const Cut& cut, const Buffers& buffers, const Unit& unit,
              const float* src, std::int64_t src_stride, std::int64_t lane, std::int64_t lanes,
              float* whole) {
  for (std::int64_t group = unit.group; group < unit.end; ++group) {
    const std::int64_t output = group * cut.outputs.group();
    const std::int64_t wide = cut.outputs.vectors(output) * cut.outputs.sizes().width;
    const bool fits = output + wide <= p.outputs;  // false only for the last group
    const std::int64_t at = unit.row * p.outputs + output;
    float* dst = buffers.dst + at;
    const float* residual = buffers.residual ? buffers.residual + at : nullptr;
    if (!fits && residual && lane == 0) {
      for (std::int64_t row = 0; row < unit.rows; ++row) {
        std::copy_n(residual + row * p.outputs, p.outputs - output, whole + row * wide);
      }
    }
    multiply_part(cut.outputs,
                  {.src = src,
                   .src_stride = src_stride,
                   .rows = unit.rows,
                   .packed = buffers.weights,
                   .first = output,
                   .bias = buffers.bias,
                   .dst = fits ? dst : whole,
                   .dst_stride = fits ? p.outputs : wide,
                   .activation = p.activation(),
                   .residual = fits || !residual ? residual : whole},
                  lane, lanes, (cut.copies ? p.inputs : lanes) * wide);
    if (fits || lane + lanes < p.inputs) continue;
    for (std::int64_t row = 0; row < unit.rows; ++row) {
      std::copy_n(whole + row * wide, p.outputs - output, dst + row * p.outputs);
    }
  }
}

void run_unit(const LinearProblem& p, const Cut& cut, const Buffers& buffers, const Unit& unit) {
  alignas(64) std::array<float, kMostRows * kMostWidth> whole;  // vectors, if dst has not all
  const float* src = buffers.src + unit.row * p.inputs;
  const std::int64_t part = lanes_of_part(cut.outputs);
  const std::int64_t apart = part + kApart;
  float* copy = cut.copies ? workspace(unit.rows * apart) : nullptr;
  for (std::int64_t lane = 0; lane < p.inputs; lane += part, src += part) {
    const std::int64_t lanes = std::min(part, p.inputs - lane);
    for (std::int64_t row = 0; row < unit.rows && copy; ++row) {
      std::copy_n(src + row * p.inputs, lanes, copy + row * apart);
    }
    run_part(p, cut, buffers, unit, copy ? copy : src, copy ? apart : p.inputs, lane, lanes,
             whole.data());
  }
}

void run(const LinearProblem& p, const Cut& cut, const Buffers& buffers) {
  const std::int64_t spans = ceil_div(cut.outputs.groups(), cut.groups);
  const std::int64_t parts = ceil_div(p.rows, cut.rows);
  // A product takes about an eighth of the time of a pointwise operation on an element.
  const std::int64_t work = cut.rows * p.inputs * cut.groups * cut.outputs.group() / 8;
  parallel_units(spans * parts, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = i / spans * cut.rows, group = i % spans * cut.groups;
      run_unit(p, cut, buffers,
               {row, std::min(cut.rows, p.rows - row), group,
                std::min(group + cut.groups, cut.outputs.groups())});
    }
  });
}

const char* refuses_direct(const LinearProblem& p) {
  if (p.dtype != at::kFloat) return "computes float32 only";
  return p.rows == 0 || p.inputs == 0 ? "takes no empty tensors" : nullptr;
}

std::optional<LayerPlan> plan_direct(const LinearProblem& p) {
  const Cut cut(p);
  LayerPlan plan{
      .weights_format = "linear by " + std::to_string(cut.outputs.group()),
      .pack = [cut](const at::Tensor& weight) { return pack_columns(weight, cut.outputs); },
      .run = {}};
  plan.run = [p, cut](const LayerBuffers& b) {
    run(p, cut,
        {static_cast<const float*>(b.src), static_cast<const float*>(b.weights),
         static_cast<const float*>(b.bias), static_cast<const float*>(b.residual),
         static_cast<float*>(b.dst)});
  };
  plan.loops_only = true;
  return plan;
}

// Reads weights in pieces, as oneDNN does, and so at the same pace.
double estimate_direct(const LinearProblem& p) {
  constexpr double kFlops = 120e3, kBytes = 17e3;  // per microsecond
  const auto weights =
      static_cast<double>(PackedColumns{&kernels::kernels(), p.inputs, p.outputs}.floats());
  return std::max(2 * static_cast<double>(p.rows) * weights / kFlops, 4 * weights / kBytes);
}

}  // namespace

constinit const LinearImplementation linears::direct = {
    .name = "direct",
    .refuses = refuses_direct,
    .plan = plan_direct,
    .estimate = estimate_direct,
    .traits = {.sums_in_place = true},
};

}  // namespace torch_blocked

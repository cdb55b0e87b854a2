// Runs linear layers of bfloat16 by dot products of two numbers at a time, summed in float32.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "kernels/matrix/linear.h"
#include "kernels/rows/reorder.h"
#include "ops/convolution/convolution.h"
#include "ops/linear/linear.h"
#include "ops/linear/rows_of_blocks.h"
#include "runtime/isa.h"
#include "runtime/memory/packed_place.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using kernels::LinearRows;

std::int64_t block_of_outputs() { return LinearRows::kMostVectors * kernels::kernels().width; }

// weight [outputs, inputs] -> [blocks of outputs, inputs / 2, outputs, 2]. Two numbers count as one
// of 32 bits, so packing is a transposition.
at::Tensor pack_bfloat16(const at::Tensor& weight) {
  trace::Timed timed(trace::Kind::kPack, "linear", static_cast<std::int64_t>(weight.nbytes()));
  const at::Tensor dense = weight.contiguous();
  const std::int64_t outputs = weight.size(0), pairs = weight.size(1) / 2;
  const std::int64_t block = block_of_outputs(), size = block * pairs;
  at::Tensor packed = empty_packed(ceil_div(outputs, block) * size, at::kFloat);
  const auto* from = static_cast<const float*>(dense.const_data_ptr());
  float* to = packed.mutable_data_ptr<float>();
  parallel_units(ceil_div(outputs, block), size, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t count = std::min(block, outputs - i * block);
      if (count < block) std::fill_n(to + i * size, size, 0.f);
      kernels::kernels().transpose({from + i * size, pairs, to + i * size, block, count, pairs});
    }
  });
  return packed;
}

const char* refuses_dots_bfloat16(const LinearProblem& p) {
  if (p.dtype != at::kBFloat16) return "is for bfloat16";
  if (!multiplies_bfloats()) return "has no kernel for the dtype on this CPU";
  if (p.rows == 0 || p.inputs == 0) return "takes no empty tensors";
  if (p.epilogue.residual) return "adds nothing";
  return p.inputs % 2 == 0 ? nullptr : "takes an even number of inputs";
}

const char* refuses_few_rows_bfloat16(const LinearProblem& p) {
  if (const char* refusal = refuses_dots_bfloat16(p)) return refusal;
  return p.rows > LinearRows::kMostRows ? "is for few rows" : nullptr;
}

std::optional<LayerPlan> plan_few_rows_bfloat16(const LinearProblem& p) {
  const std::int64_t block = block_of_outputs();
  LinearRows rows{};
  rows.rows = p.rows;
  rows.inputs = p.inputs;
  rows.outputs = p.outputs;
  rows.block = block;
  rows.weights_stride = p.inputs * block;
  rows.activation = p.activation();
  const auto run = [rows, block](const LayerBuffers& buffers) {
    LinearRows of_tensors = rows;
    of_tensors.src = buffers.src;
    of_tensors.weights = buffers.weights;
    of_tensors.bias = buffers.bias;
    of_tensors.dst = buffers.dst;
    parallel_units(ceil_div(rows.outputs, block), rows.weights_stride,
                   [&](std::int64_t begin, std::int64_t end) {
                     kernels::kernels().linear_bfloat_rows(of_tensors, begin, end);
                   });
  };
  return LayerPlan{.weights_format = text("linear of pairs by ", block),
                   .pack = pack_bfloat16,
                   .run = run,
                   .loops_only = true};
}

std::optional<LayerPlan> plan_dots_bfloat16(const LinearProblem& p) {
  const std::int64_t width = kernels::kernels().width;
  auto plan = convolutions::dots_bfloat16.plan(
      pixels_of_rows(p.rows, p.inputs, p.outputs, width, at::kBFloat16, p.activation()));
  if (!plan) return std::nullopt;
  const RowsOfBlocks blocks{p.rows, p.outputs, width};
  const auto run = [blocks, inner = std::move(plan->run)](const LayerBuffers& buffers) {
    const at::Tensor in_blocks = at::empty(
        {ceil_div(blocks.channels, blocks.block) * blocks.rows * blocks.block}, at::kBFloat16);
    inner({buffers.src, buffers.weights, buffers.bias, nullptr, in_blocks.mutable_data_ptr()});
    join_rows<std::uint16_t>(blocks, in_blocks.const_data_ptr(), buffers.dst);
  };
  return LayerPlan{.weights_format = "linear, " + plan->weights_format,
                   .pack =
                       [p, inner = std::move(plan->pack)](const at::Tensor& weight) {
                         return inner(weight.reshape({p.outputs, p.inputs, 1}));
                       },
                   .run = run};
}

double estimate_few_rows_bfloat16(const LinearProblem& p) {
  constexpr double kBytes = 31e3;  // per microsecond, from memory
  return 2 * static_cast<double>(p.inputs * p.outputs) / kBytes;
}

double estimate_dots_bfloat16(const LinearProblem& p) {
  constexpr double kFlops = 200e3, kBytes = 17e3;
  const double products = static_cast<double>(p.inputs * p.outputs);
  return std::max(2 * products * static_cast<double>(p.rows) / kFlops, 2 * products / kBytes);
}

}  // namespace

constinit const LinearImplementation linears::few_rows_bfloat16 = {
    .name = "few_rows_bfloat16",
    .refuses = refuses_few_rows_bfloat16,
    .plan = plan_few_rows_bfloat16,
    .estimate = estimate_few_rows_bfloat16,
};

constinit const LinearImplementation linears::dots_bfloat16 = {
    .name = "dots_bfloat16",
    .refuses = refuses_dots_bfloat16,
    .plan = plan_dots_bfloat16,
    .estimate = estimate_dots_bfloat16,
};

}  // namespace torch_blocked

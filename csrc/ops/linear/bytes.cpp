// Runs linear layers of few rows whose weights are signed bytes: float32 rows, and a quarter of the
// memory to read.
#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/linear/byte_blocks.h"
#include "ops/linear/linear.h"
#include "runtime/memory/packed_place.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

using kernels::LinearRows;

std::int64_t ByteBlocks::blocks() const { return ceil_div(outputs, block); }

std::int64_t ByteBlocks::bytes() const { return round_up(blocks() * block * inputs, 64); }

std::int64_t ByteBlocks::all_bytes() const {
  return bytes() + blocks() * block * static_cast<std::int64_t>(sizeof(float));
}

void ByteBlocks::pack(const at::Tensor& weight, const at::Tensor& scales, void* to) const {
  const at::Tensor dense = weight.contiguous(), of_outputs = scales.contiguous();
  const auto* from = dense.const_data_ptr<std::int8_t>();
  auto* packed = static_cast<std::int8_t*>(to);
  auto* factors = reinterpret_cast<float*>(packed + bytes());
  std::fill_n(factors, blocks() * block, 0.f);
  std::copy_n(of_outputs.const_data_ptr<float>(), outputs, factors);
  parallel_units(blocks(), block * inputs, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t count = std::min(block, outputs - i * block);
      std::int8_t* own = packed + i * block * inputs;
      std::fill_n(own, block * inputs, std::int8_t{0});
      for (std::int64_t input = 0; input < inputs; ++input, own += block) {
        for (std::int64_t k = 0; k < count; ++k) own[k] = from[(i * block + k) * inputs + input];
      }
    }
  });
}

void ByteBlocks::give(LinearRows& rows, const void* packed) const {
  rows.weights = packed;
  rows.scales = reinterpret_cast<const float*>(static_cast<const std::int8_t*>(packed) + bytes());
  rows.block = block;
  rows.weights_stride = inputs * block;
}

namespace {

const char* refuses_few_rows_of_bytes(const LinearProblem& p) {
  if (!p.has_bytes || p.dtype != at::kFloat) return "is for weights of bytes";
  if (p.rows == 0 || p.inputs == 0) return "takes no empty tensors";
  if (p.epilogue.residual) return "adds nothing";
  return p.rows > LinearRows::kMostRows ? "is for few rows" : nullptr;
}

std::optional<LayerPlan> plan_few_rows_of_bytes(const LinearProblem& p) {
  const ByteBlocks packed{p.inputs, p.outputs, LinearRows::kMostVectors * kernels::kernels().width};
  LinearRows rows{};
  rows.rows = p.rows;
  rows.inputs = p.inputs;
  rows.outputs = p.outputs;
  rows.activation = p.activation();
  const auto run = [rows, packed](const LayerBuffers& buffers) {
    LinearRows of_tensors = rows;
    of_tensors.src = buffers.src;
    packed.give(of_tensors, buffers.weights);
    of_tensors.bias = buffers.bias;
    of_tensors.dst = buffers.dst;
    parallel_units(packed.blocks(), of_tensors.weights_stride,
                   [&](std::int64_t begin, std::int64_t end) {
                     kernels::kernels().linear_byte_rows(of_tensors, begin, end);
                   });
  };
  return LayerPlan{.weights_format = text("linear of bytes by ", packed.block),
                   .pack = nullptr,
                   .pack_bytes =
                       [packed](const at::Tensor& bytes, const at::Tensor& scales) {
                         trace::Timed timed(trace::Kind::kPack, "linear", packed.all_bytes());
                         at::Tensor all = empty_packed(packed.all_bytes(), at::kByte);
                         packed.pack(bytes, scales, all.mutable_data_ptr());
                         return all;
                       },
                   .packed_bytes = packed.all_bytes(),
                   .run = run,
                   .loops_only = true};
}

// As few_rows, at a quarter of the bytes.
double estimate_few_rows_of_bytes(const LinearProblem& p) {
  constexpr double kBytes = 31e3;  // per microsecond, from memory
  return static_cast<double>(p.inputs * p.outputs) / kBytes;
}

}  // namespace

constinit const LinearImplementation linears::few_rows_of_bytes = {
    .name = "few_rows_of_bytes",
    .refuses = refuses_few_rows_of_bytes,
    .plan = plan_few_rows_of_bytes,
    .estimate = estimate_few_rows_of_bytes,
};

}  // namespace torch_blocked

// Runs linear layers of few rows whose weights are signed bytes: float32 rows, and a quarter of the
// memory to read.
#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "kernels/matrix/linear.h"
#include "ops/linear/linear.h"
#include "runtime/memory/packed_place.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

using kernels::LinearRows;

// How the packed weights lie: [blocks, inputs, block] bytes, then [blocks * block] scales.
struct ByteBlocks {
  std::int64_t inputs, outputs, block;

  explicit ByteBlocks(const LinearProblem& p)
      : inputs(p.inputs),
        outputs(p.outputs),
        block(LinearRows::kMostVectors * kernels::kernels().width) {}
  std::int64_t blocks() const { return ceil_div(outputs, block); }
  std::int64_t bytes() const { return round_up(blocks() * block * inputs, 64); }
  std::int64_t all_bytes() const {
    return bytes() + blocks() * block * static_cast<std::int64_t>(sizeof(float));
  }

  at::Tensor pack(const at::Tensor& bytes_of, const at::Tensor& scales_of) const {
    trace::Timed timed(trace::Kind::kPack, "linear", all_bytes());
    const at::Tensor dense = bytes_of.contiguous(), scales = scales_of.contiguous();
    at::Tensor packed = empty_packed(all_bytes(), at::kByte);
    const auto* from = dense.const_data_ptr<std::int8_t>();
    auto* to = static_cast<std::int8_t*>(packed.mutable_data_ptr());
    auto* factors = reinterpret_cast<float*>(to + bytes());
    std::fill_n(factors, blocks() * block, 0.f);
    std::copy_n(scales.const_data_ptr<float>(), outputs, factors);
    parallel_units(blocks(), block * inputs, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t count = std::min(block, outputs - i * block);
        std::int8_t* own = to + i * block * inputs;
        std::fill_n(own, block * inputs, std::int8_t{0});
        for (std::int64_t input = 0; input < inputs; ++input, own += block) {
          for (std::int64_t k = 0; k < count; ++k) own[k] = from[(i * block + k) * inputs + input];
        }
      }
    });
    return packed;
  }
};

const char* refuses_few_rows_of_bytes(const LinearProblem& p) {
  if (!p.has_bytes || p.dtype != at::kFloat) return "is for weights of bytes";
  if (p.rows == 0 || p.inputs == 0) return "takes no empty tensors";
  if (p.epilogue.residual) return "adds nothing";
  return p.rows > LinearRows::kMostRows ? "is for few rows" : nullptr;
}

std::optional<LayerPlan> plan_few_rows_of_bytes(const LinearProblem& p) {
  const ByteBlocks packed(p);
  LinearRows rows{};
  rows.rows = p.rows;
  rows.inputs = p.inputs;
  rows.outputs = p.outputs;
  rows.block = packed.block;
  rows.weights_stride = p.inputs * packed.block;
  rows.activation = p.activation();
  const auto run = [rows, packed](const LayerBuffers& buffers) {
    LinearRows of_tensors = rows;
    of_tensors.src = buffers.src;
    of_tensors.weights = buffers.weights;
    of_tensors.scales = reinterpret_cast<const float*>(
        static_cast<const std::int8_t*>(buffers.weights) + packed.bytes());
    of_tensors.bias = buffers.bias;
    of_tensors.dst = buffers.dst;
    parallel_units(packed.blocks(), rows.weights_stride, [&](std::int64_t begin, std::int64_t end) {
      kernels::kernels().linear_byte_rows(of_tensors, begin, end);
    });
  };
  return LayerPlan{
      .weights_format = text("linear of bytes by ", packed.block),
      .pack = nullptr,
      .pack_bytes = [packed](const at::Tensor& bytes,
                             const at::Tensor& scales) { return packed.pack(bytes, scales); },
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

// Runs a pointwise program on what a layer has just stored, for any part of an image.
#include "graph/nodes/stored_program.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "runtime/memory/workspace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {

using kernels::ProgramOperand;

at::Tensor padded_vector(const at::Tensor& vector, Format format) {
  const std::int64_t channels = vector.numel();
  at::Tensor padded = at::zeros({format.lanes(channels) * format.blocks(channels)});
  padded.narrow(0, 0, channels).copy_(vector);
  return padded;
}

StoredProgramRun::StoredProgramRun(const StoredProgram& program, const Dims& dims, Format format,
                                   at::ScalarType dtype)
    : instructions_(program.instructions),
      is_bfloat16_(dtype == at::kBFloat16),
      images_(dims[0]),
      blocks_(format.blocks(dims[1])),
      pixels_(c10::multiply_integers(at::IntArrayRef(dims).slice(2))),
      lanes_(format.lanes(dims[1])),
      tail_(format.tail(dims[1])),
      kernels_(lanes_ % 8 == 0 ? &kernels::kernels_for(lanes_) : &kernels::kernels()) {
  for (const at::Tensor& vector : program.vectors) {
    vectors_.push_back(padded_vector(vector, format));
  }
}

void StoredProgramRun::run(float* dst, std::int64_t block, std::int64_t pixels) const {
  std::array<ProgramOperand, kernels::Program::kMostOperands> operands;
  operands[0] = {ProgramOperand::Kind::kFull, dst, 0};
  for (std::size_t i = 0; i < vectors_.size(); ++i) {
    operands[i + 1] = {ProgramOperand::Kind::kLanes,
                       vectors_[i].const_data_ptr<float>() + block * lanes_, 0};
  }
  kernels_->run_program(
      {.instructions = instructions_.data(),
       .count = std::ssize(instructions_),
       .operands = std::ssize(vectors_) + 1},
      {.operands = operands.data(), .dst = dst, .pixels = pixels, .lanes = lanes_});
  if (block == blocks_ - 1) clear_lanes(dst, pixels, lanes_, tail_ == 0 ? lanes_ : tail_);
}

// bfloat16 is converted to float32 and back, as many pixels at a time as fit into L1.
void StoredProgramRun::operator()(void* dst, std::int64_t block, std::int64_t pixels) const {
  if (!is_bfloat16_) return run(static_cast<float*>(dst), block, pixels);
  constexpr std::int64_t kUnit = 4 * kernels::ProgramRow::kMostLanes;
  const std::int64_t most = std::max<std::int64_t>(1, kUnit / lanes_);
  float* numbers = workspace(most * lanes_, WorkspaceOf::kStored);
  for (std::int64_t first = 0; first < pixels; first += most) {
    const std::int64_t count = std::min(most, pixels - first);
    auto* bits = static_cast<std::uint16_t*>(dst) + first * lanes_;
    kernels_->widen_bfloats(bits, numbers, count * lanes_);
    run(numbers, block, count);
    kernels_->narrow_floats(numbers, bits, count * lanes_);
  }
}

void StoredProgramRun::operator()(void* dst, std::int64_t row, std::int64_t first,
                                  std::int64_t pixels) const {
  const std::int64_t size = is_bfloat16_ ? 2 : 4;
  (*this)(static_cast<char*>(dst) + (row * pixels_ + first) * lanes_ * size, row % blocks_, pixels);
}

void StoredProgramRun::all(void* dst) const {
  // A unit is several strips, but not so many that threads have no work.
  constexpr std::int64_t kUnit = 8 * kernels::ProgramRow::kMostLanes;
  const std::int64_t most = std::max<std::int64_t>(1, kUnit / lanes_),
                     parts = ceil_div(pixels_, most);
  parallel_units(images_ * blocks_ * parts, most * lanes_,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; ++i) {
                     const std::int64_t first = i % parts * most;
                     (*this)(dst, i / parts, first, std::min(most, pixels_ - first));
                   }
                 });
}

void StoredProgramRun::rows(const BlockedRows& dst, std::int64_t columns, Range rows) const {
  const std::int64_t row_bytes = columns * lanes_ * (is_bfloat16_ ? 2 : 4);
  const std::int64_t at_once = dst.row == row_bytes ? rows.end - rows.begin : 1;
  for (std::int64_t block = 0; block < blocks_; ++block) {
    for (std::int64_t row = rows.begin; row < rows.end; row += at_once) {
      (*this)(dst.at(block, row), block, at_once* columns);
    }
  }
}

}  // namespace torch_blocked::graph

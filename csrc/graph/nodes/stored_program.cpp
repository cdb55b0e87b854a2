// Runs a pointwise program on what a layer has just stored, for any part of an image.
#include "graph/nodes/stored_program.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "torch_blocked/threads.h"

namespace torch_blocked::graph {

using kernels::ProgramOperand;

at::Tensor padded_vector(const at::Tensor& vector, Format format) {
  const std::int64_t channels = vector.numel();
  at::Tensor padded = at::zeros({format.lanes(channels) * format.blocks(channels)});
  padded.narrow(0, 0, channels).copy_(vector);
  return padded;
}

StoredProgramRun::StoredProgramRun(const StoredProgram& program, const Dims& dims, Format format)
    : instructions_(program.instructions),
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

void StoredProgramRun::operator()(float* dst, std::int64_t block, std::int64_t pixels) const {
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

void StoredProgramRun::operator()(float* dst, std::int64_t row, std::int64_t first,
                                  std::int64_t pixels) const {
  (*this)(dst + (row * pixels_ + first) * lanes_, row % blocks_, pixels);
}

void StoredProgramRun::all(float* dst) const {
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
  const std::int64_t row_bytes = columns * lanes_ * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t at_once = dst.row == row_bytes ? rows.end - rows.begin : 1;
  for (std::int64_t block = 0; block < blocks_; ++block) {
    for (std::int64_t row = rows.begin; row < rows.end; row += at_once) {
      (*this)(reinterpret_cast<float*>(dst.at(block, row)), block, at_once* columns);
    }
  }
}

}  // namespace torch_blocked::graph

// A program on what a layer has just stored, while that is in the cache: of the result's own
// numbers and of constants, so that it can run on any pixels of a block of channels.
#pragma once

#include "kernels/kernels.h"
#include "kernels/rows/program.h"
#include "ops/convolution_problem.h"

namespace torch_blocked::graph {

// The result is operand 0, `vectors` are the others.
struct StoredProgram {
  std::vector<kernels::Instruction> instructions;
  std::vector<at::Tensor> vectors;  // [C]
};

// A vector [C] with zeros for the lanes beyond C of a format.
at::Tensor padded_vector(const at::Tensor& vector, Format format);

// Sets the lanes from `channels` on of each of `pixels` pixels to 0.
template <typename Number>
void clear_lanes(Number* dst, std::int64_t pixels, std::int64_t lanes, std::int64_t channels) {
  for (std::int64_t pixel = 0; pixel < pixels && channels < lanes; ++pixel, dst += lanes) {
    std::fill(dst + channels, dst + lanes, Number{0});
  }
}

// A program on images of `dims` in a format that has pixels of at most ProgramRow::kMostLanes.
class StoredProgramRun {
 public:
  StoredProgramRun(const StoredProgram& program, const Dims& dims, Format format);

  // `pixels` of one block of channels, in place.
  void operator()(float* dst, std::int64_t block, std::int64_t pixels) const;
  // Pixels of a whole image, counted as OnStored does.
  void operator()(float* dst, std::int64_t row, std::int64_t first, std::int64_t pixels) const;
  // All of it, on all threads.
  void all(float* dst) const;
  // Rows [begin, end) of an image, as a RowStage stores them.
  void rows(const BlockedRows& dst, std::int64_t columns, Range rows) const;

 private:
  std::vector<kernels::Instruction> instructions_;
  std::vector<at::Tensor> vectors_;  // [blocks * lanes]
  std::int64_t images_, blocks_, pixels_, lanes_, tail_;
  const kernels::Kernels* kernels_;
};

}  // namespace torch_blocked::graph

// A pointwise program that runs on what a layer has just stored, while that is still in the cache.
// It reads only the result's own numbers and constants, so it can run on any pixels of a block of
// channels.
#pragma once

#include "kernels/kernels.h"
#include "kernels/rows/program.h"
#include "ops/convolution_problem.h"
#include "ops/products/row_chain.h"

namespace torch_blocked::graph {

// Operand 0 is the layer's result; `vectors` are the others.
struct StoredProgram {
  std::vector<kernels::Instruction> instructions;
  std::vector<at::Tensor> vectors;  // [C]
};

// A vector [C], with zeros for the lanes beyond C that a format has.
at::Tensor padded_vector(const at::Tensor& vector, Format format);

// Sets the lanes from `channels` on of each of `pixels` pixels to 0.
template <typename Number>
void clear_lanes(Number* dst, std::int64_t pixels, std::int64_t lanes, std::int64_t channels) {
  for (std::int64_t pixel = 0; pixel < pixels && channels < lanes; ++pixel, dst += lanes) {
    std::fill(dst + channels, dst + lanes, Number{0});
  }
}

// A program made ready for images of `dims`, in a format with at most ProgramRow::kMostLanes lanes
// per pixel.
class StoredProgramRun {
 public:
  // dtype: float32 or bfloat16, of what is stored.
  StoredProgramRun(const StoredProgram& program, const Dims& dims, Format format,
                   at::ScalarType dtype);

  // Runs on `pixels` pixels of one block of channels, in place.
  void operator()(void* dst, std::int64_t block, std::int64_t pixels) const;
  // Runs on pixels of a whole image, counted as OnStored does.
  void operator()(void* dst, std::int64_t row, std::int64_t first, std::int64_t pixels) const;
  // Runs on everything, with all threads.
  void all(void* dst) const;
  // Runs on rows [begin, end) of an image, as a RowStage stores them.
  void rows(const BlockedRows& dst, std::int64_t columns, Range rows) const;

 private:
  void run(float* numbers, std::int64_t block, std::int64_t pixels) const;

  std::vector<kernels::Instruction> instructions_;
  std::vector<at::Tensor> vectors_;  // [blocks * lanes]
  bool is_bfloat16_;
  std::int64_t images_, blocks_, pixels_, lanes_, tail_;
  const kernels::Kernels* kernels_;
};

}  // namespace torch_blocked::graph

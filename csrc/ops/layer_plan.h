// A layer with weights, made ready to run: a convolution, or a linear layer, whose rows are pixels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "ops/convolution_problem.h"
#include "ops/products/row_chain.h"
#include "torch_blocked/descriptor.h"

namespace torch_blocked {

// The data of one run, in the formats that the problem names. bias has one number of the problem's
// dtype for each output channel, or is null; residual lies as dst, and is null unless the epilogue
// adds it.
struct LayerBuffers {
  const void *src, *weights, *bias, *residual;
  void* dst;
  const OnStored* on_stored = nullptr;  // null unless the plan calls it
};

// It owns primitives and sizes, so one thread runs it at a time.
struct LayerPlan {
  // The name of what pack() makes, the key of packed weights; empty: the weights stay dense.
  std::string weights_format;
  std::function<at::Tensor(const at::Tensor& weight)> pack;
  // Of what pack() makes; 0: only that tells.
  std::int64_t packed_bytes = 0;
  std::function<void(const LayerBuffers& buffers)> run;
  // All that run() does is in loops of share_units: threads may go through it together.
  bool loops_only = false;
  // run() calls on_stored for each pixel of dst once.
  bool calls_on_stored = false;
  // What pack() makes, with oneDNN's dims: (G,) O, I, *kernel; nothing where no descriptor can say
  // it.
  std::optional<Descriptor> weights_desc = {};
  // By so much it must be faster than others, where all are timed, to be taken.
  double handicap = 1;
  // How it runs for some rows at a time, and what does so; nothing where it does not. Of the
  // buffers weights and bias count.
  std::optional<RowStage> row_stage = {};
  std::function<RunRows(const LayerBuffers& buffers)> run_rows = {};
};

}  // namespace torch_blocked

// A layer with weights, made ready to run: a convolution, or a linear layer whose rows count as
// pixels.
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
// dtype for each output channel, or is null. residual is laid out as dst and is null unless the
// epilogue adds it.
struct LayerBuffers {
  const void *src, *weights, *bias, *residual;
  void* dst;
  const OnStored* on_stored = nullptr;  // null unless the plan calls it
};

// A plan owns primitives and sizes, so one thread runs it at a time.
struct LayerPlan {
  // Names the format that pack() makes, and is the key of packed weights. Empty: the weights stay
  // dense.
  std::string weights_format;
  std::function<at::Tensor(const at::Tensor& weight)> pack;
  // Packs signed bytes [outputs, inputs] and their scales [outputs], float32, instead; null: pack()
  // takes weights as numbers.
  std::function<at::Tensor(const at::Tensor& bytes, const at::Tensor& scales)> pack_bytes = {};
  // The size of what pack() makes; 0 if only packing tells.
  std::int64_t packed_bytes = 0;
  std::function<void(const LayerBuffers& buffers)> run;
  // run() consists of loops of share_units only, so threads may go through it together.
  bool loops_only = false;
  // run() calls on_stored for each pixel of dst once.
  bool calls_on_stored = false;
  // Describes what pack() makes, with oneDNN's dims: (G,) O, I, *kernel. Nothing if no descriptor
  // can.
  std::optional<Descriptor> weights_desc = {};
  // Where implementations are timed, it is chosen only if it is this many times faster than the
  // others.
  double handicap = 1;
  // How it runs a few rows at a time, and the function that does; nothing if it cannot. run_rows
  // reads only weights and bias of the buffers.
  std::optional<RowStage> row_stage = {};
  std::function<RunRows(const LayerBuffers& buffers)> run_rows = {};
};

}  // namespace torch_blocked

// Shared by layer norms of rows and layer norms of an image's channels.
#pragma once

#include "graph/nodes/boxed.h"
#include "graph/nodes/layers.h"
#include "graph/nodes/quantized/quantized.h"
#include "graph/running/run.h"
#include "kernels/kernels.h"
#include "kernels/rows/normalization.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {

struct LayerNorm {
  at::Tensor weight, bias;  // [C], or undefined
  double eps;
  at::ScalarType dtype = at::kFloat;  // of the result, where that is not bytes
  Bytes bytes = {};

  Meta result(const Meta& src) const { return {src.dims, bytes.dst ? at::kByte : dtype}; }
};

// The arguments of the norm's kernel, except memory. Parameters are made dense and kept alive by
// `kept`.
kernels::RowNormalization normalization_of(const LayerNorm& norm, std::int64_t channels,
                                           std::vector<at::Tensor>& kept);

void own(LayerNorm& norm, Weights& weights);

}  // namespace torch_blocked::graph

// What layer norms of rows and those of an image's channels share.
#pragma once

#include "graph/nodes/boxed.h"
#include "graph/nodes/layers.h"
#include "graph/running/run.h"
#include "kernels/kernels.h"
#include "kernels/rows/normalization.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {

struct LayerNorm {
  at::Tensor weight, bias;  // [C], or undefined
  double eps;
};

// The norm without its memory; parameters are dense, and kept by `kept`.
kernels::RowNormalization normalization_of(const LayerNorm& norm, std::int64_t channels,
                                           std::vector<at::Tensor>& kept);

void own(LayerNorm& norm, Weights& weights);

}  // namespace torch_blocked::graph

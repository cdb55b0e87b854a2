// What the steps of convolutions and linear layers share: they join what follows, are timed and run
// alike.
#pragma once

#include <map>

#include "graph/nodes/layers.h"
#include "graph/passes/types.h"
#include "graph/planning/plan.h"
#include "graph/running/run.h"
#include "ops/layer_plan.h"

namespace torch_blocked::graph {

// Adds the only reader of `node`, if that is a Layer, to its epilogue; false if it cannot. The
// layer then runs in the reader's place, because the residual may not exist before. `takes` tells
// whether kernels take the layer with what was joined.
template <typename Layer>
bool join_reader(const Rewrite& rewrite, Node& node, const Uses& uses,
                 bool (*takes)(const Rewrite& rewrite, const Layer& fused, Value residual)) {
  Node* reader = node.as<Layer>() ? uses.only_reader(node.output()) : nullptr;
  if (!reader || reader->held.has_value()) return false;
  Layer fused = *node.as<Layer>();
  Value residual = node.read(1);
  if (!join_epilogue(rewrite.graph, *reader, node.output(), rewrite.metas, fused.epilogue,
                     residual) ||
      !takes(rewrite, fused, residual)) {
    return false;
  }
  reader->name = joined_name(node.name, *reader);
  reader->origin = node.origin;
  reader->become(*node.kind, with_residual(node.read(0), residual), std::move(fused));
  node.outputs.clear();
  return true;
}

template <typename Layer>
void own_bias(Node& node, Weights& weights) {
  at::Tensor& bias = node.as<Layer>()->bias;
  if (bias.defined()) bias = weights.own(bias);
}

// Makes a layer compute in bfloat16.
template <typename Layer>
void narrow_layer(Rewrite& rewrite, Node& node) {
  Layer& layer = *node.as<Layer>();
  layer.weight.narrowed = at::kBFloat16;
  if (layer.bias.defined()) layer.bias = narrowed(rewrite, layer.bias);
}

template <typename Layer>
void release_weight(Node& node) {
  node.as<Layer>()->weight = {};
}

// Memory on which the plans of one problem are timed. A linear layer's is pixels_of(it), and its
// weight has two dims.
class LayerProbe {
 public:
  LayerProbe(const ConvolutionProblem& problem, Dims weight_dims);
  // The plan on this memory, which must outlive the entry.
  Contest::Entry entry(LayerPlan plan);

 private:
  at::Tensor weights(const LayerPlan& plan);

  at::ScalarType dtype_;
  Dims weight_dims_;
  at::Tensor src_, dst_, bias_;
  bool has_residual_;
  at::Tensor room_;                           // for packed weights whose size plans know
  std::map<std::string, at::Tensor> packed_;  // others, by their format
};

// A layer's tensors in a run. src is none where the layer reads something else than one slot.
struct LayerTensors {
  const std::vector<at::Tensor>& all;  // by slot
  at::Tensor packed, bias;
  std::optional<Slot> src, residual;
  Slot dst;

  LayerBuffers parameters() const;  // only weights and bias
  LayerBuffers buffers() const;
};

// Those of a step whose node reads src first and the residual second. pack() makes the weights in
// the format, once for all steps that have the same.
LayerTensors tensors_of(const Step& step, const Running& running, const Weight& weight,
                        const at::Tensor& bias, const std::string& weights_format,
                        const std::function<at::Tensor()>& pack);

}  // namespace torch_blocked::graph

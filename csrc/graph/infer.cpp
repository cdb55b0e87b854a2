// Infers the sizes and types of all values of a graph from those of its inputs.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_empty_affine_quantized.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <functional>

#include "format/errors.h"
#include "graph/capture/well_formed.h"
#include "graph/node_kind.h"
#include "graph/nodes/boxed.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;

Meta meta_of(const IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return {};
  return {value.toTensor().sizes().vec(), value.toTensor().scalar_type()};
}

// Whether the capture's run recorded the sizes of the results, and they do not depend on values.
bool is_in_run(const Graph& graph, const Node& node) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
  const bool by_values = !op || op->hasTag(at::Tag::dynamic_output_shape) ||
                         op->hasTag(at::Tag::data_dependent_output);
  return !by_values && std::ranges::all_of(
                           node.outputs, [&](Value value) { return graph.metas.contains(value); });
}

// Checks that h and c of an LSTM are equally many: ATen reads as many of one as it has of the
// other.
void check_states(const Node& node, const std::vector<Meta>& metas) {
  if (node.name != "aten::lstm") return;
  const Argument& given = node.arguments[node.overload == "data" ? 2 : 1];
  const auto* states = std::get_if<std::vector<Argument>>(&given.held);
  if (!states || states->size() != 2) return;
  const auto dims = [&](std::size_t i) -> const Dims& {
    return metas[static_cast<std::size_t>((*states)[i].value())].dims;
  };
  if (!dims(0).empty() && !dims(1).empty() && dims(0)[0] == dims(1)[0]) return;
  fail_value("optimize", "as many hidden states as cell states", text(dims(0), " and ", dims(1)),
             "optimize the model again");
}

// Called for a node whose op does not tell the sizes of its results without data, so that those of
// the capture's run are taken.
using OnUnknown = std::function<void(const Node& node, const std::vector<Meta>& metas)>;

std::vector<Meta> inferred(const Graph& graph, const std::vector<Meta>& inputs,
                           const OnUnknown& on_unknown) {
  std::vector<Meta> metas(static_cast<std::size_t>(graph.values));
  const auto meta = [&](Value value) -> Meta& { return metas[static_cast<std::size_t>(value)]; };
  for (std::size_t i = 0; i < inputs.size(); ++i) meta(graph.inputs[i]) = inputs[i];
  for (const auto& [value, tensor] : graph.constants) {
    meta(value) = {tensor.sizes().vec(), tensor.scalar_type()};
  }
  const auto value_of = [&](Value value) -> IValue {
    const Meta& m = meta(value);
    return at::empty(m.dims, at::TensorOptions().dtype(m.dtype).device(at::kMeta));
  };
  for (const Node& node : graph.nodes) {
    if (const std::vector<Meta> own = node.kind->results(node, metas); !own.empty()) {
      for (std::size_t i = 0; i < own.size(); ++i) meta(node.outputs[i]) = own[i];
      continue;
    }
    if (const auto known = known_results(node, metas)) {
      for (std::size_t i = 0; i < known->size(); ++i) {
        meta(node.outputs[i]) = (*known)[i];
      }
      continue;
    }
    check_states(node, metas);
    std::vector<IValue> results;
    try {
      results = call(node, value_of, /*on_meta=*/true);
    } catch (const c10::Error&) {
      if (inputs != graph.input_metas || !is_in_run(graph, node)) throw;
      if (on_unknown) on_unknown(node, metas);
      for (const Value value : node.outputs) meta(value) = graph.metas.at(value);
      continue;
    }
    // x.unbind() has one result per index of a dim, and the model was captured with a fixed number.
    if (results.size() != node.outputs.size()) {
      fail_value("optimize", text(node.outputs.size(), " results of ", node.name),
                 text(results.size()), "optimize the model for these sizes");
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      meta(node.outputs[i]) = meta_of(results[i]);
      check_dims(meta(node.outputs[i]).dims);  // strides of 0 allow more than memory holds
    }
  }
  return metas;
}

// A tensor of these sizes, filled with one number.
at::Tensor filled(const Meta& meta, int number) {
  if (!c10::isQIntType(meta.dtype)) return at::full(meta.dims, number, meta.dtype);
  const at::TensorOptions options(meta.dtype);
  return at::_empty_affine_quantized(meta.dims, options, 1, 0).fill_(number);
}

void run_filled(const Node& node, const std::vector<Meta>& metas, int number) {
  call(
      node,
      [&](Value value) -> IValue { return filled(metas[static_cast<std::size_t>(value)], number); },
      /*on_meta=*/false);
}

}  // namespace

std::vector<Meta> infer(const Graph& graph, const std::vector<Meta>& inputs) {
  return inferred(graph, inputs, {});
}

void check_unknown(const Graph& graph) {
  inferred(graph, graph.input_metas, [](const Node& node, const std::vector<Meta>& metas) {
    try {
      run_filled(node, metas, 0);  // a valid index of any dim
    } catch (const c10::Error&) {
      run_filled(node, metas, 1);  // valid as a length or as a divisor
    }
  });
}

}  // namespace torch_blocked::graph

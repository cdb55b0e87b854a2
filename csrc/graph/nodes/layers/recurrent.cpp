// Recurrent layers: LSTM, GRU and RNN. One linear layer in front multiplies all tokens by the input
// weights of both directions; the rest goes from step to step.
#include "ops/tokens/recurrent.h"

#include <ATen/ops/cat.h>

#include "format/errors.h"
#include "graph/nodes/boxed.h"
#include "graph/nodes/quantized/quantized.h"
#include "graph/passes/rules.h"
#include "graph/planning/plan.h"
#include "graph/running/run.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;

// What a node holds; a node is one layer. It reads the products, h and, for an LSTM, c of all
// layers. It makes dst and the last h and c of this layer.
struct Recurrent {
  Cell cell;
  std::int64_t hidden, directions, layer;
  bool batch_first;
  std::vector<RecurrentWeights> weights;  // one per direction
};

// ---- from ops to nodes --------------------------------------------------------------------------

std::optional<Cell> cell_of(const Node& node) {
  if (node.overload != "input") return std::nullopt;
  if (node.name == "aten::lstm") return Cell::kLstm;
  if (node.name == "aten::gru") return Cell::kGru;
  if (node.name == "aten::rnn_tanh") return Cell::kTanh;
  if (node.name == "aten::rnn_relu") return Cell::kRelu;
  return std::nullopt;
}

const std::vector<Argument>* list_of(const Argument& argument) {
  return std::get_if<std::vector<Argument>>(&argument.held);
}

// The arguments (input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
// batch_first) of an op whose weights are constants.
class Layers {
 public:
  Layers(Rewrite& rewrite, const Uses& uses, const Node& node, Cell cell)
      : rewrite_(rewrite), uses_(uses), node_(node), cell_(cell) {}

  bool fits() {
    const auto& a = node_.arguments;
    if (a.size() != 9 || !read_states() || node_.read(0) == kNone) return false;
    for (const std::size_t flag : {3, 4, 6, 7, 8}) {
      if (!a[flag].is_constant()) return false;
    }
    const Meta& input = rewrite_.meta(node_.read(0));
    if (input.dtype != at::kFloat || input.dims.size() != 3) return false;
    if (std::ranges::count(input.dims, 0) > 0) return false;
    if (a[6].constant().toBool() && number(a[5], 1) != 0) return false;  // dropout of training
    layers_ = a[4].constant().toInt();
    directions_ = a[7].constant().toBool() ? 2 : 1;
    batch_first_ = a[8].constant().toBool();
    per_direction_ = a[3].constant().toBool() ? 4 : 2;
    return read_parameters(a[2]);
  }

  // Makes the nodes that replace the op: the linear layers, the steps, and the last states side by
  // side.
  void make(std::vector<Node>& made) {
    Value input = node_.read(0);
    std::vector<std::vector<Argument>> last(states_.size());
    for (std::int64_t layer = 0; layer < layers_; ++layer) {
      const bool is_last = layer + 1 == layers_;
      input = make_layer(made, layer, input, is_last ? node_.output() : kNone, last);
    }
    for (std::size_t i = 0; i < states_.size() && layers_ > 1; ++i) {
      made.push_back({.name = "aten::cat",
                      .overload = "",
                      .arguments = {{last[i]}, {IValue(0)}},
                      .outputs = {node_.outputs[i + 1]},
                      .origin = node_.origin});
    }
  }

 private:
  // Reads h, and c of an LSTM.
  bool read_states() {
    const Argument& hx = node_.arguments[1];
    if (const auto* list = list_of(hx)) {
      for (const Argument& each : *list) states_.push_back(each.value());
    } else {
      states_.push_back(hx.value());
    }
    const std::size_t wanted = cell_ == Cell::kLstm ? 2 : 1;
    return states_.size() == wanted && node_.outputs.size() == 1 + wanted &&
           std::ranges::all_of(states_, [&](Value value) {
             return value != kNone && rewrite_.meta(value).dtype == at::kFloat;
           });
  }

  bool read_parameters(const Argument& list) {
    const auto* all = list_of(list);
    if (!all || std::ssize(*all) != layers_ * directions_ * per_direction_) return false;
    for (const Argument& each : *all) {
      const auto parameter = read_parameter(each);
      if (!parameter) return false;
      parameters_.push_back(*parameter);
    }
    hidden_ = parameters_[1].values.size(-1);  // with a projection there would be five
    return true;
  }

  // Numbers, or int8 weights and the scale of each row.
  struct Parameter {
    at::Tensor values, scales;
  };

  std::optional<Parameter> read_parameter(const Argument& argument) const {
    if (const at::Tensor* constant = constant_of(rewrite_.graph, argument)) {
      if (constant->scalar_type() != at::kFloat) return std::nullopt;
      return Parameter{*constant, {}};
    }
    const Value value = argument.value();
    const Node* maker = value == kNone ? nullptr : uses_.maker[Uses::at(value)];
    const auto bytes = quantized_constant(rewrite_.graph, maker);
    if (!bytes || bytes->axis > 0 || bytes->values.dim() != 2) return std::nullopt;
    return Parameter{bytes->values, bytes->scales.expand({bytes->values.size(0)}).contiguous()};
  }

  // Parameter i of a direction of a layer: (weight_ih, weight_hh, bias_ih, bias_hh), the biases
  // only if there are any.
  const Parameter& parameter(std::int64_t layer, std::int64_t direction, std::int64_t i) const {
    return parameters_[static_cast<std::size_t>((layer * directions_ + direction) * per_direction_ +
                                                i)];
  }

  // These, one per direction, concatenated along the first dim.
  Value joined(const std::vector<at::Tensor>& parts) {
    if (directions_ == 1) return add_constant(rewrite_, parts[0]);
    const auto joins = [&] { return Folded{{at::cat(parts)}, at::Tensor()}; };
    return add_constant(rewrite_, rewrite_.weights.folded(parts, "joined", joins).weight.source);
  }

  // Parameter i of all directions as numbers; of bytes a dequantization makes them.
  Value joined(std::vector<Node>& made, std::int64_t layer, std::int64_t i) {
    std::vector<at::Tensor> values, scales;
    for (std::int64_t d = 0; d < directions_; ++d) {
      values.push_back(parameter(layer, d, i).values);
      scales.push_back(parameter(layer, d, i).scales);
    }
    if (std::ranges::none_of(scales, &at::Tensor::defined)) return joined(values);
    if (!std::ranges::all_of(scales, &at::Tensor::defined)) {
      for (std::size_t d = 0; d < values.size(); ++d) {
        values[d] = RecurrentWeights{values[d], {}, scales[d]}.numbers();
      }
      return add_constant(rewrite_, at::cat(values));
    }
    made.push_back(dequantization(rewrite_, joined(values), joined(scales)));
    return made.back().output();
  }

  // Returns the layer's result: the value `result` unless that is kNone.
  Value make_layer(std::vector<Node>& made, std::int64_t layer, Value input, Value result,
                   std::vector<std::vector<Argument>>& last) {
    Meta meta = rewrite_.meta(input);
    meta.dims.back() = directions_ * kernels::gates_of(cell_) * hidden_;
    const Value gates = add_value(rewrite_, meta);
    const Value weight = joined(made, layer, 0);
    const Argument bias{per_direction_ == 4 ? Argument{ValueRef{joined(made, layer, 2)}}
                                            : Argument{IValue()}};
    made.push_back({.name = "aten::linear",
                    .overload = "",
                    .arguments = {{ValueRef{input}}, {ValueRef{weight}}, bias},
                    .outputs = {gates},
                    .origin = node_.origin});
    meta.dims.back() = directions_ * hidden_;
    if (result == kNone) result = add_value(rewrite_, meta);
    Node node{.name = node_.name,
              .overload = "",
              .arguments = {},
              .outputs = {result},
              .origin = node_.origin};
    std::vector<Argument> reads{{ValueRef{gates}}};
    for (std::size_t i = 0; i < states_.size(); ++i) {
      reads.push_back({ValueRef{states_[i]}});
      Meta state = rewrite_.meta(states_[i]);
      state.dims[0] = directions_;
      node.outputs.push_back(layers_ == 1 ? node_.outputs[i + 1] : add_value(rewrite_, state));
      last[i].push_back({ValueRef{node.outputs.back()}});
    }
    Recurrent holds{cell_, hidden_, directions_, layer, batch_first_, {}};
    for (std::int64_t d = 0; d < directions_; ++d) {
      const auto& [values, scales] = parameter(layer, d, 1);
      const at::Tensor bias_hh = per_direction_ == 4 ? parameter(layer, d, 3).values : at::Tensor();
      holds.weights.push_back({values, bias_hh, scales});
    }
    node.become(nodes::recurrent, std::move(reads), std::move(holds));
    made.push_back(std::move(node));
    return result;
  }

  Rewrite& rewrite_;
  const Uses& uses_;
  const Node& node_;
  Cell cell_;
  std::vector<Value> states_;
  std::vector<Parameter> parameters_;
  std::int64_t layers_ = 0, directions_ = 0, hidden_ = 0;
  std::int64_t per_direction_ = 0;  // parameters
  bool batch_first_ = false;
};

void find(Rewrite& rewrite) {
  std::vector<Node> made;
  std::vector<Node>& nodes = rewrite.graph.nodes;
  if (std::ranges::none_of(nodes, [](const Node& each) { return cell_of(each).has_value(); })) {
    return;
  }
  const Uses uses(rewrite.graph);
  for (Node& node : nodes) {
    const auto cell = node.held.has_value() ? std::nullopt : cell_of(node);
    std::optional<Layers> layers;
    if (cell) layers.emplace(rewrite, uses, node, *cell);
    if (layers && layers->fits()) {
      layers->make(made);
      continue;
    }
    if (cell) {
      node.declined =
          "its kernel takes float32 sequences, weights that are constants, no projection";
    }
    made.push_back(node);  // not moved: `uses` knows it
  }
  nodes = std::move(made);
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  const Recurrent& own = *node.as<Recurrent>();
  Meta dst = metas[Uses::at(node.read(0))];
  dst.dims.back() = own.directions * own.hidden;
  std::vector<Meta> all{dst};
  for (std::size_t i = 1; i < node.arguments.size(); ++i) {
    Meta state = metas[Uses::at(node.read(i))];
    state.dims[0] = own.directions;
    all.push_back(state);
  }
  return all;
}

// ---- running ------------------------------------------------------------------------------------

RecurrentProblem problem_of(const Recurrent& own, const Dims& dims) {
  const std::size_t batch = own.batch_first ? 0 : 1;
  return {.cell = own.cell,
          .batch = dims[batch],
          .steps = dims[1 - batch],
          .hidden = own.hidden,
          .directions = own.directions,
          .batch_first = own.batch_first,
          .has_bytes = std::ranges::all_of(
              own.weights, [](const RecurrentWeights& each) { return each.scales.defined(); })};
}

Prepared prepare(const Step& step, const Running& running) {
  const Node& node = *step.node;
  const Recurrent& own = *node.as<Recurrent>();
  const RecurrentProblem problem = problem_of(own, running.plan.slots[step.writes[0]].dims);
  RecurrentPlan plan = plan_recurrent(problem);
  std::vector<at::Tensor> parts;
  for (const auto& [weight, bias, scales] : own.weights) {
    parts.insert(parts.end(), {weight, bias, scales});
  }
  const at::Tensor packed =
      running.weights.get(node, parts, plan.weights_format, [&] { return plan.pack(own.weights); });
  std::vector<Slot> reads;
  for (std::size_t i = 0; i < node.arguments.size(); ++i) {
    reads.push_back(step.reads.at(node.read(i)));
  }
  const std::int64_t states =
      own.layer * problem.directions * problem.batch * problem.hidden;  // of the layers before
  return {[&tensors = running.tensors, run = std::move(plan.run), packed, reads,
           writes = step.writes, states] {
            const bool has_c = reads.size() > 2;
            run({.gates = tensors[reads[0]].const_data_ptr<float>(),
                 .h = tensors[reads[1]].const_data_ptr<float>() + states,
                 .c = has_c ? tensors[reads[2]].const_data_ptr<float>() + states : nullptr,
                 .weights = packed.const_data_ptr<float>(),
                 .dst = tensors[writes[0]].mutable_data_ptr<float>(),
                 .last_h = tensors[writes[1]].mutable_data_ptr<float>(),
                 .last_c = has_c ? tensors[writes[2]].mutable_data_ptr<float>() : nullptr});
          },
          true};
}

// The products with h. Those with the inputs belong to the linear layer.
double flops(const Plan& plan, const Step& step) {
  const Recurrent& own = *step.node->as<Recurrent>();
  return 2.0 * static_cast<double>(c10::multiply_integers(plan.slots[step.writes[0]].dims) *
                                   kernels::gates_of(own.cell) * own.hidden);
}

void release(Node& node) {
  for (RecurrentWeights& each : node.as<Recurrent>()->weights) {
    for (at::Tensor* part : {&each.weight, &each.bias, &each.scales}) drop_memory(*part);
  }
}

std::string why(const Step& step) {
  return text("the steps; the products with its inputs are the linear layer before, ",
              step.node->as<Recurrent>()->directions, " directions");
}

}  // namespace

constinit const NodeKind nodes::recurrent = {
    .name = "recurrent",
    .find = find,
    .results = results,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kPlain}); },
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .prepare = prepare,
    .flops = flops,
    .implementation = by_torch_blocked,
    .why = why,
    .release = release,
};

}  // namespace torch_blocked::graph

// Linear layers of bytes with int8 weights, fused with the activation and the quantization after
// them.
#include "format/errors.h"
#include "graph/nodes/boxed.h"
#include "graph/nodes/quantized/quantized.h"
#include "graph/nodes/quantized/rivals.h"
#include "graph/planning/planner.h"
#include "graph/report.h"
#include "ops/quantized/convolution.h"

namespace torch_blocked::graph {
namespace {

struct Linear8 {
  at::Tensor weight, scales, bias;  // int8 [O, I]; [O] float32; the same, or undefined
  Activation activation = {};
  Quantization src;
  std::optional<Quantization> dst = {};
};

QuantizedLinearProblem problem_of(const Node& node, const Dims& dims) {
  const Linear8& linear = *node.as<Linear8>();
  return {.rows = c10::multiply_integers(dims) / dims.back(),
          .inputs = dims.back(),
          .outputs = linear.weight.size(0),
          .activation = linear.activation,
          .src = linear.src,
          .dst = linear.dst};
}

void find_one(const Rewrite& rewrite, const Uses& uses, Node& node) {
  if (node.name != "aten::linear" || node.read(0) == kNone || node.read(1) == kNone) return;
  const Node* bytes = uses.maker[Uses::at(node.read(0))];
  const Quantization* src = quantization_of(bytes, nodes::dequantize);
  const auto constant = quantized_constant(rewrite.graph, uses.maker[Uses::at(node.read(1))]);
  const at::Tensor* bias = constant_of(rewrite.graph, node.arguments[2]);
  const Dims& dims = rewrite.meta(node.read(0)).dims;
  if (rewrite.meta(node.output()).dtype != at::kFloat) return;
  if (!src || !constant || constant->axis > 0 || constant->values.dim() != 2) return;
  const std::int64_t outputs = constant->values.size(0);
  if (dims.size() < 2 || dims.back() != constant->values.size(1) || dims.back() % 4 != 0) return;
  if (constant->axis == 0 && constant->scales.numel() != outputs) return;
  if (bias ? bias->scalar_type() != at::kFloat || bias->numel() != outputs
           : !is_none(node.arguments[2])) {
    return;
  }
  node.become(nodes::quantized_linear, {{ValueRef{bytes->read(0)}}},
              Linear8{.weight = constant->values,
                      .scales = constant->scales.expand({outputs}).contiguous(),
                      .bias = bias ? *bias : at::Tensor(),
                      .src = *src});
}

void find(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) find_one(rewrite, uses, node);
}

void fuse(Rewrite& rewrite) {
  for (bool changed = true; changed;) {
    changed = false;
    const Uses uses(rewrite.graph);
    for (Node& node : rewrite.graph.nodes) {
      auto* linear = node.as<Linear8>();
      Node* reader = linear && !linear->dst ? uses.only_reader(node.output()) : nullptr;
      if (!reader) continue;
      const Quantization* dst = quantization_of(reader, nodes::quantize);
      const auto activation = find_activation(*reader);
      if (dst) {
        linear->dst = *dst;
      } else if (activation && linear->activation.kind == Activated::kNone) {
        linear->activation = *activation;
        node.name = joined_name(node.name, *reader);
      } else {
        continue;
      }
      node.outputs = reader->outputs;
      reader->outputs.clear();
      changed = true;
    }
    sweep(rewrite.graph);
  }
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  const Linear8& linear = *node.as<Linear8>();
  Meta dst{metas[Uses::at(node.read(0))].dims, linear.dst ? at::kByte : at::kFloat};
  dst.dims.back() = linear.weight.size(0);
  return {dst};
}

// The step's choice: the problem and the implementation's name.
struct Choice {
  QuantizedLinearProblem problem;
  const char* implementation;
};

const Choice& choice_of(const Step& step) { return *std::any_cast<Choice>(&step.choice); }

QuantizedLinearImplementations::Named plan_of(const QuantizedLinearProblem& p) {
  const auto& list = quantized_linear_implementations();
  const auto describe = [&] {
    return text(p.rows, " rows of ", p.inputs, " inputs, ", p.outputs, " outputs");
  };
  auto named = list.choose(p, list.forced(), describe);
  TORCH_INTERNAL_ASSERT(named.has_value());  // find_one() takes only what `dots` takes
  list.set_last(named->name);
  return std::move(*named);
}

void plan(Planner& planner, const Node& node, Step& step) {
  QuantizedLinearProblem problem = problem_of(node, planner.metas()[Uses::at(node.read(0))].dims);
  const char* name = plan_of(problem).name;
  step.choice = Choice{std::move(problem), name};
}

Prepared prepare(const Step& step, const Running& running) {
  const Linear8& linear = *step.node->as<Linear8>();
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  auto plan = plan_of(choice_of(step).problem).plan;
  const QuantizedWeights weights =
      packed(running, *step.node, plan, linear.weight, linear.scales, linear.bias);
  return {[&tensors = running.tensors, run = std::move(plan.run), weights, src, dst] {
    run(tensors[src].const_data_ptr<std::uint8_t>(), weights, nullptr,
        tensors[dst].mutable_data_ptr());
  }};
}

double flops(const Plan&, const Step& step) {
  const QuantizedLinearProblem& p = choice_of(step).problem;
  return 2.0 * static_cast<double>(p.rows * p.inputs * p.outputs);
}

std::vector<Rival> rivals(Planner& planner, const Step& step) {
  const QuantizedLinearProblem& p = choice_of(step).problem;
  const Meta& dst = planner.metas()[Uses::at(step.node->output())];
  const ByteLayer layer{.words = text("linear of bytes ", p.rows, " x ", p.inputs, " -> ",
                                      p.outputs, p.dst ? "" : " float32"),
                        .formats = format_name({dst, kPlain}),
                        .src = {p.rows, p.inputs},
                        .dst = {p.rows, p.outputs},
                        .weight = {p.outputs, p.inputs},
                        .outputs = p.outputs,
                        .is_float32 = !p.dst,
                        .has_residual = false};
  return byte_rivals(planner.tuner(), quantized_linear_implementations(), p, layer);
}

void own(Node& node, Weights& weights) {
  auto& linear = *node.as<Linear8>();
  for (at::Tensor* parameter : {&linear.scales, &linear.bias}) {
    if (parameter->defined()) *parameter = weights.own(*parameter);
  }
}

}  // namespace

constinit const NodeKind nodes::quantized_linear = {
    .name = "quantized_linear",
    .find = find,
    .fuse = fuse,
    .results = results,
    .fixed = [](const Node&) { return std::optional(FixedFormats{kPlain, kPlain}); },
    .plan = plan,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .prepare = prepare,
    .flops = flops,
    .implementation = [](const Plan&, const Step& step) -> std::string {
      return choice_of(step).implementation;
    },
    .why =
        [](const Step& step) {
          return text("bytes of scale ", step.node->as<Linear8>()->src.scale, ", zero ",
                      step.node->as<Linear8>()->src.zero);
        },
    .rivals = rivals,
    .own = own,
    .release = [](Node& node) { node.as<Linear8>()->weight.reset(); },
};

}  // namespace torch_blocked::graph

// Convolutions of bytes with int8 weights, fused with the activations, the sum and the quantization
// after them.
#include "ops/quantized/convolution.h"

#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>

#include "format/errors.h"
#include "graph/nodes/layers.h"
#include "graph/nodes/quantized/quantized.h"
#include "graph/nodes/quantized/rivals.h"
#include "graph/planning/planner.h"
#include "runtime/isa.h"

namespace torch_blocked::graph {
namespace {

// What a node holds. The node reads src as its first value, and a residual, also bytes, as its
// second.
struct Convolution8 {
  at::Tensor weight, scales, bias;  // int8; [OC] float32; the same, or undefined
  Dims stride, padding, dilation, output_padding;
  Dims padding_end = {};  // more at the far end than `padding` has; empty: none
  bool transposed;
  std::int64_t groups;
  Epilogue epilogue = {};
  Quantization src;
  std::optional<Quantization> residual = {}, dst = {};
};

const Node* maker_of(const Uses& uses, Value value) {
  return value == kNone ? nullptr : uses.maker[Uses::at(value)];
}

std::int64_t inputs_of(const at::Tensor& weight, bool transposed, std::int64_t groups) {
  return transposed ? weight.size(0) : weight.size(1) * groups;
}

// Whether there is a scale per output channel, or one for all. Scales of transposed weights [IC, OC
// / groups, *kernel] lie along dim 1, and all groups share them.
bool scales_fit(const QuantizedConstant& constant, bool transposed) {
  const std::int64_t axis = transposed ? 1 : 0;
  return constant.axis < 0 ||
         (constant.axis == axis && constant.scales.numel() == constant.values.size(axis));
}

at::Tensor scales_of_outputs(const QuantizedConstant& constant, std::int64_t outputs) {
  if (constant.axis < 0) return constant.scales.expand({outputs}).contiguous();
  return constant.scales.repeat({outputs / constant.scales.numel()});
}

std::int64_t inputs_of(const Convolution8& c) {
  return inputs_of(c.weight, c.transposed, c.groups);
}

void find_one(const Rewrite& rewrite, const Uses& uses, Node& node) {
  const ConvolutionOp* row = convolution_op(node.name);
  if (!row) return;
  const Node* bytes = maker_of(uses, node.read(0));
  const Quantization* src = quantization_of(bytes, nodes::dequantize);
  const auto constant = quantized_constant(rewrite.graph, maker_of(uses, node.read(1)));
  const at::Tensor* bias = constant_of(rewrite.graph, node.arguments[2]);
  const Argument& groups = node.arguments[static_cast<std::size_t>(row->groups)];
  if (rewrite.meta(node.output()).dtype != at::kFloat) return;
  if (!src || !constant || !groups.is_constant()) return;
  if (!bias && !is_none(node.arguments[2])) return;
  const Dims& dims = rewrite.meta(node.read(0)).dims;
  const at::Tensor& weight = constant->values;
  const std::int64_t count = groups.constant().toInt();
  const bool ranks = std::ssize(dims) == weight.dim() && weight.dim() >= 3 && weight.dim() <= 5;
  if (!ranks || count < 1 || !scales_fit(*constant, row->transposed)) return;
  const std::int64_t outputs = row->transposed ? weight.size(1) * count : weight.size(0);
  const bool fits = outputs % count == 0 && dims[1] % count == 0 &&
                    inputs_of(weight, row->transposed, count) == dims[1];
  if (!fits || (bias && (bias->scalar_type() != at::kFloat || bias->numel() != outputs))) return;
  const std::size_t spatial = dims.size() - 2;
  const auto list = [&](std::int64_t i) -> std::optional<Dims> {
    if (i < 0) return Dims(spatial, 0);
    return integers(node.arguments[static_cast<std::size_t>(i)], spatial);
  };
  const auto stride = list(row->stride), dilation = list(row->dilation),
             output_padding = list(row->output_padding);
  if (!stride || !dilation || !output_padding) return;
  const auto padding = padding_of(node, *row, weight.sizes().slice(2), *stride, *dilation);
  if (!padding) return;
  node.become(nodes::quantized_convolution, {{ValueRef{bytes->read(0)}}},
              Convolution8{.weight = weight,
                           .scales = scales_of_outputs(*constant, outputs),
                           .bias = bias ? *bias : at::Tensor(),
                           .stride = *stride,
                           .padding = padding->begin,
                           .dilation = *dilation,
                           .output_padding = *output_padding,
                           .padding_end = padding->more,
                           .transposed = row->transposed,
                           .groups = count,
                           .src = *src});
}

// Batch norms of a convolution's sums become part of its scales and bias. Quantizers that leave the
// model as it is, and training for bytes, keep them apart.
void fold_batch_norms(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    auto* c = node.as<Convolution8>();
    Node* reader = c ? uses.only_reader(node.output()) : nullptr;
    const auto norm = reader ? batch_norm_of(rewrite, *reader) : std::nullopt;
    if (!norm || rewrite.meta(reader->output()).dtype != at::kFloat) continue;
    const at::Tensor bias =
        c->bias.defined() ? c->bias.to(at::kDouble) : at::zeros_like(norm->shift);
    c->scales = at::mul(c->scales.to(at::kDouble), norm->scale).to(at::kFloat);
    c->bias = at::add(at::mul(bias, norm->scale), norm->shift).to(at::kFloat);
    node.name = joined_name(node.name, *reader);
    node.outputs = std::exchange(reader->outputs, {});
  }
  sweep(rewrite.graph);
}

void find(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) find_one(rewrite, uses, node);
  // Drops dequantizations that nobody reads any more, so that they do not count as readers of
  // bytes.
  const Uses left(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    const bool read = node.outputs.size() != 1 || left.is_output[Uses::at(node.output())] ||
                      !left.readers[Uses::at(node.output())].empty();
    if (node.is(nodes::dequantize) && !read) node.outputs.clear();
  }
  sweep(rewrite.graph);
  fold_batch_norms(rewrite);
}

// Joins padding with the zero point with the padding of the convolution behind it, as
// layers/padding.cpp does with zeros.
void fuse_padding(Rewrite& rewrite) {
  Graph& graph = rewrite.graph;
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (node.name != "aten::constant_pad_nd" || node.held.has_value()) continue;
    Node* reader = uses.only_reader(node.output());
    auto* c = reader ? reader->as<Convolution8>() : nullptr;
    const bool is_src = c && reader->read(0) == node.output() && reader->read(1) != node.output();
    if (!is_src || c->transposed) continue;
    if (number(node.arguments[2], -1) != static_cast<double>(c->src.zero)) continue;
    const std::size_t spatial = c->stride.size();
    const auto pads = integers(node.arguments[1], 2 * spatial);  // last dim first, begin and end
    if (!pads || pads->size() > 2 * spatial) continue;
    const Dims& dims = rewrite.meta(node.read(0)).dims;
    bool fits = true;
    for (std::size_t i = 0; i < pads->size() / 2; ++i) {
      const std::int64_t begin = (*pads)[2 * i], end = (*pads)[2 * i + 1];
      fits &= begin >= 0 && end >= 0 && dims[dims.size() - 1 - i] + end > begin;
    }
    if (!fits) continue;
    if (c->padding_end.empty()) c->padding_end.resize(spatial, 0);
    for (std::size_t i = 0; i < pads->size() / 2; ++i) {
      c->padding[spatial - 1 - i] += (*pads)[2 * i];
      c->padding_end[spatial - 1 - i] += (*pads)[2 * i + 1] - (*pads)[2 * i];
    }
    reader->arguments[0] = node.arguments[0];
    node.outputs.clear();
  }
  sweep(graph);
}

// The dequantization that a sum adds to `value` as its residual; null if it is no such sum.
const Node* residual_of(const Uses& uses, const Node& sum, Value value) {
  if (sum.name != "aten::add" || sum.overload != "Tensor" || number(sum.arguments[2], 1) != 1) {
    return nullptr;
  }
  const Node* other = maker_of(uses, sum.read(0) == value ? sum.read(1) : sum.read(0));
  return quantization_of(other, nodes::dequantize) ? other : nullptr;
}

// Fuses the only reader of a convolution into it; false if it cannot. The convolution then runs in
// the reader's place, because the residual may not exist before.
bool fuse_reader(const Rewrite& rewrite, Node& node, const Uses& uses) {
  Node* reader = node.as<Convolution8>() ? uses.only_reader(node.output()) : nullptr;
  if (!reader) return false;
  Convolution8 fused = *node.as<Convolution8>();
  if (fused.dst) return false;
  std::vector<Argument> reads = node.arguments;
  Epilogue& epilogue = fused.epilogue;
  if (const Quantization* dst = quantization_of(reader, nodes::quantize)) {
    fused.dst = *dst;
  } else if (const auto activation = find_activation(*reader)) {
    Activation& place = epilogue.residual ? epilogue.after : epilogue.before;
    if (place.kind != Activated::kNone) return false;
    place = *activation;
  } else if (const Node* bytes = residual_of(uses, *reader, node.output())) {
    const bool fits = rewrite.meta(bytes->read(0)).dims == rewrite.meta(node.output()).dims;
    if (!fits || epilogue.residual || inputs_of(fused) <= 4) return false;
    epilogue.residual = true;
    fused.residual = bytes->as<Quantized>()->quantization;
    reads.push_back({ValueRef{bytes->read(0)}});
  } else {
    return false;
  }
  reader->name = fused.dst ? node.name : joined_name(node.name, *reader);
  reader->origin = node.origin;
  reader->become(nodes::quantized_convolution, std::move(reads), std::move(fused));
  node.outputs.clear();
  return true;
}

void fuse(Rewrite& rewrite) {
  fuse_padding(rewrite);
  join_from_end(rewrite, fuse_reader);
}

// ---- sizes and formats --------------------------------------------------------------------------

QuantizedConvolutionProblem problem_of(const Node& node, const std::vector<Meta>& metas) {
  const Convolution8& c = *node.as<Convolution8>();
  QuantizedConvolutionProblem problem{
      .sizes = layer_problem(c, c.weight, {}, metas[Uses::at(node.read(0))].dims),
      .src = c.src,
      .dst = c.dst,
      .residual = c.residual};
  problem.sizes.src_format = quantized_src_format(inputs_of(c));
  problem.sizes.dst_format = Format::blocked(native_blocks()[0]);
  return problem;
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {{problem_of(node, metas).sizes.dst_dims,
           node.as<Convolution8>()->dst ? at::kByte : at::kFloat}};
}

std::optional<FixedFormats> fixed(const Node& node) {
  return FixedFormats{quantized_src_format(inputs_of(*node.as<Convolution8>())),
                      Format::blocked(native_blocks()[0])};
}

// The step's choice: the problem and the implementation's name.
struct Choice {
  QuantizedConvolutionProblem problem;
  const char* implementation;
};

QuantizedConvolutionImplementations::Named plan_of(const QuantizedConvolutionProblem& problem) {
  const auto& list = quantized_convolution_implementations();
  auto named = list.choose(problem, list.forced(), [&] { return text(problem.sizes.src_dims); });
  if (!named) {
    fail_not_implemented("optimize", "a convolution of bytes that some kernel takes",
                         text(problem.sizes.src_dims), "optimize the float32 model");
  }
  return std::move(*named);
}

void plan(Planner& planner, const Node& node, Step& step) {
  QuantizedConvolutionProblem problem = problem_of(node, planner.metas());
  const char* name = plan_of(problem).name;
  step.choice = Choice{std::move(problem), name};
}

const Choice& choice_of(const Step& step) { return *std::any_cast<Choice>(&step.choice); }

// ---- memory and running -------------------------------------------------------------------------

// Bytes may overwrite the residual, but not src.
Value stored_over(const Step& step) {
  const Value residual = step.node->read(1);
  const bool bytes = choice_of(step).problem.dst.has_value();
  return bytes && residual != step.node->read(0) ? residual : kNone;
}

Prepared prepare(const Step& step, const Running& running) {
  const Convolution8& c = *step.node->as<Convolution8>();
  const QuantizedConvolutionProblem& problem = choice_of(step).problem;
  auto plan = plan_of(problem).plan;
  const QuantizedWeights weights = packed(running, *step.node, plan, c.weight, c.scales, c.bias);
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const Value residual = step.node->read(1);
  const auto added = residual == kNone ? std::nullopt : std::optional(step.reads.at(residual));
  return {[&tensors = running.tensors, run = std::move(plan.run), weights, src, added, dst] {
            run(tensors[src].const_data_ptr<std::uint8_t>(), weights,
                added ? tensors[*added].const_data_ptr<std::uint8_t>() : nullptr,
                tensors[dst].mutable_data_ptr());
          },
          true, plan.row_stage ? plan.run_rows(weights) : RunRows()};
}

std::optional<RowStage> row_stage(const Step& step) {
  return plan_of(choice_of(step).problem).plan.row_stage;
}

double flops(const Plan&, const Step& step) {
  const ConvolutionProblem& p = choice_of(step).problem.sizes;
  return 2.0 * static_cast<double>(c10::multiply_integers(p.weight_dims)) *
         static_cast<double>(c10::multiply_integers(p.dst_dims) / p.dst_dims[1]);
}

std::string why(const Step& step) {
  const QuantizedConvolutionProblem& p = choice_of(step).problem;
  const auto bytes = [](const Quantization& q) {
    return text("scale ", q.scale, ", zero ", q.zero);
  };
  return text("bytes of ", bytes(p.src), " to ", p.dst ? bytes(*p.dst) : "float32");
}

std::vector<Rival> rivals(Planner& planner, const Step& step) {
  const QuantizedConvolutionProblem& problem = choice_of(step).problem;
  const ConvolutionProblem& p = problem.sizes;
  const std::string src(p.src_format.name(p.src_dims.size())),
      dst(p.dst_format.name(p.dst_dims.size()));
  const ByteLayer layer{
      .words = text("convolution of bytes ", p.src_dims, p.weight_dims, p.dst_dims, p.stride,
                    p.padding, p.dilation, " g", p.groups, p.transposed ? " transposed" : "",
                    p.epilogue.residual ? " sum" : "", problem.dst ? "" : " float32"),
      .formats = src == dst ? src : text(src, " -> ", dst),
      .src = p.src_format.physical_shape(p.src_dims),
      .dst = p.dst_format.physical_shape(p.dst_dims),
      .weight = p.weight_dims,
      .outputs = p.dst_dims[1],
      .is_float32 = !problem.dst,
      .has_residual = p.epilogue.residual};
  return byte_rivals(planner.tuner(), quantized_convolution_implementations(), problem, layer);
}

void own(Node& node, Weights& weights) {
  auto& c = *node.as<Convolution8>();
  for (at::Tensor* parameter : {&c.scales, &c.bias}) {
    if (parameter->defined()) *parameter = weights.own(*parameter);
  }
}

}  // namespace

constinit const NodeKind nodes::quantized_convolution = {
    .name = "quantized_convolution",
    .find = find,
    .fuse = fuse,
    .results = results,
    .fixed = fixed,
    .plan = plan,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = stored_over,
    .prepare = prepare,
    .row_stage = row_stage,
    .flops = flops,
    .implementation = [](const Plan&, const Step& step) -> std::string {
      return choice_of(step).implementation;
    },
    .why = why,
    .rivals = rivals,
    .own = own,
    .release = [](Node& node) { node.as<Convolution8>()->weight.reset(); },
};

}  // namespace torch_blocked::graph

// Averages of bytes, with the quantization of their result. They are poolings, and means that
// pooling.cpp has turned into poolings. Sums are exact.
#include "graph/nodes/boxed.h"
#include "graph/nodes/layers/pooling.h"
#include "graph/nodes/quantized/quantized.h"
#include "graph/planning/planner.h"
#include "kernels/images/pooling.h"
#include "kernels/kernels.h"
#include "ops/registered.h"
#include "ops/window.h"
#include "runtime/isa.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

struct Average {
  PoolingProblem problem;  // of images of bytes
  Quantization src;
  std::optional<Quantization> dst = {};
};

constexpr std::int64_t kMostTaps = 1 << 16;  // the most bytes whose sum is exact in float32

void find(Rewrite& rewrite) {
  Graph& graph = rewrite.graph;
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    const bool is_op = node.is(nodes::boxed) && !node.held.has_value() && node.outputs.size() == 1;
    if (!is_op || !is_average(node) || node.read(0) == kNone) continue;
    const Node* bytes = uses.maker[Uses::at(node.read(0))];
    const Quantization* src = quantization_of(bytes, nodes::dequantize);
    const Dims& dims = rewrite.meta(node.output()).dims;
    if (!src || rewrite.meta(node.read(0)).dims.size() != dims.size()) continue;
    const Format format = Format::blocked(native_blocks()[0]);
    const auto problem = pooling_problem(node, rewrite.metas, format);
    if (!problem || c10::multiply_integers(problem->kernel) > kMostTaps) continue;
    Average average{.problem = *problem, .src = *src};
    Node* reader = uses.only_reader(node.output());
    if (const Quantization* dst = quantization_of(reader, nodes::quantize)) {
      average.dst = *dst;
      node.outputs = reader->outputs;
      reader->outputs.clear();
    }
    node.become(nodes::quantized_average, {{ValueRef{bytes->read(0)}}}, std::move(average));
  }
  sweep(graph);
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>&) {
  const Average& average = *node.as<Average>();
  return {{average.problem.dst_dims, average.dst ? at::kByte : at::kFloat}};
}

std::optional<FixedFormats> fixed(const Node& node) {
  const Format format = node.as<Average>()->problem.format;
  return FixedFormats{format, format};
}

Prepared prepare(const Step& step, const Running& running) {
  const Average& average = *step.node->as<Average>();
  const PoolingProblem& p = average.problem;
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const kernels::Averages averages{.windows = windows_of(p),
                                   .divisor = p.divisor,
                                   .of_window = p.kind == Pooling::kAverageOfWindow};
  const kernels::PoolingWindows& windows = averages.windows;
  const std::int64_t channels = p.dst_dims[1];
  const std::int64_t rows =
      p.dst_dims[0] * p.format.blocks(channels) * windows.out[0] * windows.out[1];
  const std::int64_t cost = windows.out[2] * windows.lanes * c10::multiply_integers(p.kernel);
  const bool has_tail = p.format.tail(channels) > 0;
  const auto run = [&tensors = running.tensors, src, dst, averages, rows, cost, has_tail, channels,
                    from = average.src.quantizer(),
                    to = average.dst ? std::optional(average.dst->quantizer()) : std::nullopt] {
    kernels::AveragesOfBytes of_tensors{
        .averages = averages, .src = from, .dst = to ? &*to : nullptr};
    of_tensors.averages.windows.src = tensors[src].const_data_ptr();
    of_tensors.averages.windows.dst = tensors[dst].mutable_data_ptr();
    parallel_units(rows, cost, [&](std::int64_t begin, std::int64_t end) {
      kernels::kernels().average_bytes(of_tensors, begin, end);
    });
    if (has_tail) clear_tail_(tensors[dst], channels);
  };
  return {run, !has_tail};
}

}  // namespace

constinit const NodeKind nodes::quantized_average = {
    .name = "quantized_average",
    .find = find,
    .results = results,
    .fixed = fixed,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .prepare = prepare,
    .implementation = [](const Plan&, const Step&) -> std::string { return "sums"; },
};

}  // namespace torch_blocked::graph

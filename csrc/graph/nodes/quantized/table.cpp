// Functions of one value from bytes to bytes, as a table of their results for all 256 bytes. ATen
// computes the table, so any elementwise op may be part of the function.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>

#include "graph/nodes/boxed.h"
#include "graph/nodes/quantized/quantized.h"
#include "graph/passes/arithmetic.h"
#include "kernels/kernels.h"
#include "ops/registered.h"
#include "runtime/isa.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

constexpr std::int64_t kBytes = 256;

struct Table {
  at::Tensor bytes;  // [256]
};

// Whether each element of the result depends only on the operands' elements at the same index.
bool is_elementwise(const Node& node) {
  constexpr std::string_view kAten = "aten::";
  if (!node.is(nodes::boxed) || node.held.has_value() || is_random(node)) return false;
  if (has_arithmetic(node)) return true;
  if (node.name.starts_with(kAten) && is_pointwise(node.name.substr(kAten.size()))) return true;
  const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
  return op && op->hasTag(at::Tag::pointwise);
}

// The results of elementwise nodes for all bytes of the one value that they depend on.
class Function {
 public:
  Function(const Rewrite& rewrite, const Uses& uses) : rewrite_(rewrite), uses_(uses) {}

  // Nothing if `value` also depends on anything else.
  std::optional<at::Tensor> of_all_bytes(Value value) {
    if (const auto found = results_.find(value); found != results_.end()) return found->second;
    const Node* node = uses_.maker[Uses::at(value)];
    auto result = node ? result_of(*node) : std::nullopt;
    results_[value] = result;
    return result;
  }
  Value bytes() const { return bytes_; }

 private:
  static constexpr std::size_t kMostNodes = 64;

  std::optional<at::Tensor> result_of(const Node& node) {
    if (const Quantization* q = quantization_of(&node, nodes::dequantize)) {
      if (bytes_ != kNone && (bytes_ != node.read(0) || quantization_ != *q)) return std::nullopt;
      bytes_ = node.read(0);
      quantization_ = *q;
      return all_numbers(*q);
    }
    if (results_.size() > kMostNodes || node.outputs.size() != 1) return std::nullopt;
    if (!is_elementwise(node)) return std::nullopt;
    const Dims& dims = rewrite_.meta(node.output()).dims;
    bool fits = true;
    for_values(node.arguments, [&](Value value) {
      const at::Tensor* constant = constant_of(rewrite_.graph, {{ValueRef{value}}});
      fits = fits && (constant ? constant->numel() == 1
                               : rewrite_.meta(value).dims == dims && of_all_bytes(value));
    });
    if (!fits) return std::nullopt;
    const auto results = call(node, [&](Value value) -> c10::IValue {
      const at::Tensor* constant = constant_of(rewrite_.graph, {{ValueRef{value}}});
      return constant ? constant->flatten() : *results_.at(value);
    });
    return results.size() == 1 ? std::optional(results[0].toTensor()) : std::nullopt;
  }

  static at::Tensor all_numbers(const Quantization& q) {
    const at::Tensor bytes = at::arange(kBytes, at::kByte), numbers = at::empty({kBytes});
    kernels::kernels().dequantize(q.quantizer(), bytes.const_data_ptr<std::uint8_t>(),
                                  numbers.mutable_data_ptr<float>(), kBytes);
    return numbers;
  }

  const Rewrite& rewrite_;
  const Uses& uses_;
  std::map<Value, std::optional<at::Tensor>> results_;
  Value bytes_ = kNone;
  Quantization quantization_;
};

void find(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    const Quantization* q = quantization_of(&node, nodes::quantize);
    if (!q) continue;
    Function function(rewrite, uses);
    const auto numbers = function.of_all_bytes(node.read(0));
    if (!numbers || numbers->numel() != kBytes || numbers->isnan().any().item<bool>()) continue;
    const at::Tensor table = at::empty({kBytes}, at::kByte);
    kernels::kernels().quantize(q->quantizer(), numbers->contiguous().const_data_ptr<float>(),
                                table.mutable_data_ptr<std::uint8_t>(), kBytes);
    const Node* last = uses.maker[Uses::at(node.read(0))];
    if (!last->is(nodes::dequantize)) {
      node.name = last->name;
      node.origin = last->origin;
    }
    node.become(nodes::quantized_table, {{ValueRef{function.bytes()}}}, Table{table});
  }
}

std::vector<Meta> results(const Node& node, const std::vector<Meta>& metas) {
  return {metas[Uses::at(node.read(0))]};
}

Prepared prepare(const Step& step, const Running& running) {
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  const at::Tensor& table = step.node->as<Table>()->bytes;
  const bool has_tail = slot.is_blocked() && slot.format.tail(slot.dims[1]) > 0 &&
                        table.const_data_ptr<std::uint8_t>()[0] != 0;
  const auto look_up =
      permutes_bytes() ? kernels::kernels().look_up : kernels::kernels_for(8).look_up;
  const auto run = [&tensors = running.tensors, src, dst, table, has_tail, look_up,
                    channels = slot.dims.size() > 1 ? slot.dims[1] : 1] {
    constexpr std::int64_t kPart = 4096;
    const auto* from = tensors[src].const_data_ptr<std::uint8_t>();
    auto* to = tensors[dst].mutable_data_ptr<std::uint8_t>();
    const auto* bytes = table.const_data_ptr<std::uint8_t>();
    const std::int64_t count = tensors[dst].numel();
    parallel_units((count + kPart - 1) / kPart, kPart, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t first = begin * kPart, last = std::min(end * kPart, count);
      if (first < last) look_up(bytes, from + first, to + first, last - first);
    });
    if (has_tail) clear_tail_(tensors[dst], channels);
  };
  return {run, !has_tail};
}

}  // namespace

constinit const NodeKind nodes::quantized_table = {
    .name = "quantized_table",
    .find = find,
    .results = results,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .stored_over = [](const Step& step) { return step.node->read(0); },
    .prepare = prepare,
    .implementation = [](const Plan&, const Step&) -> std::string { return "table"; },
};

}  // namespace torch_blocked::graph

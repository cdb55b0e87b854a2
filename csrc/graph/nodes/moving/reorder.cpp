// Steps between nodes: they bring a value into another format, or a view with any strides into
// order.
#include "ops/moving/reorder.h"

#include "graph/nodes/boxed.h"
#include "graph/passes/rules.h"
#include "ops/moving/contiguous.h"

namespace torch_blocked::graph {
namespace {

// The tensor with lazy conjugation and negation carried out in memory.
at::Tensor resolved(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); }

// Images of one pixel are rows of channels in both formats, unless a tail lies between two images.
bool is_same_memory(const Step&, const SlotPlan& src, const SlotPlan& dst) {
  const Dims& dims = src.dims;
  if (dst.format != kPlain || src.dtype != dst.dtype || dims.size() < 3) return false;
  if (c10::multiply_integers(at::IntArrayRef(dims).slice(2)) != 1) return false;
  return dims[0] == 1 || src.format.tail(dims[1]) == 0;
}

Prepared prepare_reorder(const Step& step, const Running& running) {
  const Slot src = step.reads.begin()->second, dst = step.writes[0];
  return {[&plan = running.plan, &tensors = running.tensors, src, dst] {
    const auto side = [&](Slot slot) -> ReorderSide {
      const SlotPlan& s = plan.slots[slot];
      return {s.format == kStrided ? resolved(tensors[slot]) : tensors[slot], s.format};
    };
    torch_blocked::reorder("optimize", plan.slots[dst].dims, side(src), side(dst));
  }};
}

// Takes the model's own contiguous() where its result is no image.
void find_contiguous(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    if (!node.is(nodes::boxed) || node.name != "aten::contiguous" || node.read(0) == kNone)
      continue;
    const Argument& format = node.arguments[1];
    const bool is_plain =
        is_none(format) || (format.is_constant() &&
                            format.constant().toMemoryFormat() == at::MemoryFormat::Contiguous);
    if (is_plain) node.become(nodes::contiguous, {{ValueRef{node.read(0)}}}, {});
  }
}

// A view with known strides is copied into memory that the plan has.
Prepared prepare_contiguous(const Step& step, const Running& running) {
  const Slot from = step.reads.begin()->second, to = step.writes[0];
  if (running.memory.slots[to].is_given) {
    const CopyInOrder copy(running.tensors[from].sizes(), running.tensors[from].strides());
    return {[&tensors = running.tensors, copy, from, to] {
              copy(tensors[from].const_data_ptr<float>(), tensors[to].mutable_data_ptr<float>());
            },
            true};
  }
  return {[&tensors = running.tensors, src = step.reads.begin()->second, dst = step.writes[0]] {
    tensors[dst] = torch_blocked::contiguous(tensors[src]);
  }};
}

}  // namespace

constinit const NodeKind nodes::reorder = {
    .name = "reorder",
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .is_same_memory = is_same_memory,
    .prepare = prepare_reorder,
    .implementation = by_torch_blocked,
    .why = [](const Step&) -> std::string { return "the next step takes this format"; },
};

// From ATen's strides to plain. A tensor that is in order keeps its memory.
constinit const NodeKind nodes::contiguous = {
    .name = "contiguous",
    .combine = find_contiguous,
    .results =
        [](const Node& node, const std::vector<Meta>& metas) {
          return std::vector{metas[Uses::at(node.read(0))]};
        },
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
    .fixed = [](const Node&) { return std::optional(FixedFormats{kStrided, kPlain}); },
    .fills = [](const Step&, const SlotPlan& dst) { return dst.dtype == at::kFloat; },
    .may_be_view = true,
    .views =
        [](const Step&, const at::Tensor& src) {
          return src.is_contiguous() ? std::vector{src} : std::vector<at::Tensor>();
        },
    .prepare = prepare_contiguous,
    .implementation = by_torch_blocked,
    .why = [](const Step&) -> std::string {
      return "the next step takes no views; a copy if it is one";
    },
};

}  // namespace torch_blocked::graph

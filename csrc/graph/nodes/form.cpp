#include "graph/nodes/form.h"

#include <utility>

#include "graph/nodes/boxed.h"
#include "ops/blocked.h"
#include "ops/blocked_forms.h"

namespace torch_blocked::graph {
namespace {

std::string op_of(const Node& node) {
  return toString(c10::OperatorName(node.name, node.overload));
}

// Calls the form with the op's arguments. It takes the channels after the first argument.
at::Tensor run_form(const Step& step, const std::vector<at::Tensor>& tensors, const SlotPlan& dst) {
  const Node& node = *step.node;
  const c10::OperatorName form = form_of(node);
  Node blocked{.name = form.name,
               .overload = form.overload_name,
               .arguments = node.arguments,
               .outputs = node.outputs};
  blocked.arguments.insert(blocked.arguments.begin() + 1, {c10::IValue(dst.dims[1])});
  const at::Tensor& physical = tensors[step.reads.at(node.read(0))];
  std::vector<at::Tensor> read{physical};
  const auto results = call(blocked, [&](Value value) -> c10::IValue {
    return read.emplace_back(tensors[step.reads.at(value)]);
  });
  const at::Tensor& result = results.at(0).toTensor();
  const std::vector<c10::SymInt> dims(dst.dims.begin(), dst.dims.end());
  check_form_result(op_of(node), toString(form), result, read,
                    {physical.size(-1), dims, dst.dtype});
  return result.contiguous();
}

}  // namespace

c10::OperatorName form_of(const Node& node) {
  return blocked_form({node.name, node.overload}).value();
}

Prepared prepare_form(const Step& step, const Running& running) {
  const Slot dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  return {[&step, &tensors = running.tensors, &slot, dst, is_first = true]() mutable {
    tensors[dst] = run_form(step, tensors, slot);
    if (std::exchange(is_first, false) || checks_tails()) {
      check_form_tail(op_of(*step.node), toString(form_of(*step.node)), tensors[dst], slot.dims[1]);
    }
  }};
}

}  // namespace torch_blocked::graph

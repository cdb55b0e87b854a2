// Ops that no other kind takes: calls the op itself through the dispatcher, on plain tensors, with
// arguments typed by its schema.
#include "graph/nodes/boxed.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/scalar_tensor.h>

#include "format/errors.h"
#include "graph/aten.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;

template <typename T>
IValue typed_list(const std::vector<IValue>& items, T (IValue::*get)() const) {
  c10::List<T> list;
  for (const IValue& item : items) list.push_back((item.*get)());
  return list;
}

IValue tensor_list(const std::vector<IValue>& items) {
  c10::List<at::Tensor> list;
  for (const IValue& item : items) list.push_back(item.toTensor());
  return list;
}

IValue optional_tensor_list(const std::vector<IValue>& items) {
  c10::List<std::optional<at::Tensor>> list;
  for (const IValue& item : items) list.push_back(item.toOptional<at::Tensor>());
  return list;
}

// The items as a list of the schema's type.
IValue list_of(const std::vector<IValue>& items, const c10::Type& element) {
  switch (element.kind()) {
    case c10::TypeKind::TensorType:
      return tensor_list(items);
    case c10::TypeKind::OptionalType:
      return optional_tensor_list(items);
    case c10::TypeKind::FloatType:
      return typed_list<double>(items, &IValue::toDouble);
    case c10::TypeKind::BoolType:
      return typed_list<bool>(items, &IValue::toBool);
    default:
      return typed_list<std::int64_t>(items, &IValue::toInt);
  }
}

const c10::Type& without_optional(const c10::Type& type) {
  const auto* optional = type.castRaw<c10::OptionalType>();
  return optional ? *optional->getElementType() : type;
}

IValue to_ivalue(const Argument& argument, const c10::Type& declared,
                 const std::function<IValue(Value)>& value_of, bool on_meta) {
  const c10::Type& type = without_optional(declared);
  if (argument.value() != kNone) return value_of(argument.value());
  if (argument.is_constant()) {
    const IValue& value = argument.constant();
    if (value.isDevice() && on_meta)
      return at::Device(at::kMeta);  // x.to("cpu") stays without data
    // An int given for a list stands for all its entries; one given for a float becomes a float.
    if (value.isInt() && type.kind() == c10::TypeKind::ListType) {
      return list_of({value}, *type.castRaw<c10::ListType>()->getElementType());
    }
    if (value.isInt() && type.kind() == c10::TypeKind::FloatType) {
      return static_cast<double>(value.toInt());
    }
    // x * 2: a number becomes a tensor that does not decide the dtype.
    if (value.isScalar() && type.kind() == c10::TypeKind::TensorType) {
      const at::Scalar scalar = value.toScalar();
      const at::Tensor number = at::scalar_tensor(scalar, scalar.type());
      number.unsafeGetTensorImpl()->set_wrapped_number(true);
      return number;
    }
    return value;
  }
  std::vector<IValue> items;
  const auto* list = type.castRaw<c10::ListType>();
  if (!list) fail_type("optimize", "a list argument", type.str(), "");
  const c10::Type& element = *list->getElementType();
  for (const Argument& item : std::get<std::vector<Argument>>(argument.held)) {
    items.push_back(to_ivalue(item, element, value_of, on_meta));
  }
  return list_of(items, element);
}

// Raises ValueError if an op's results are not as planned. Their sizes may depend on values
// although no rule or meta kernel says so, and the next step reads raw memory.
void check_results(const Node& node, std::size_t got, std::size_t wanted) {
  if (got == wanted) return;
  fail_value("optimize", text(wanted, " results of ", node.name), text(got),
             "its results depend on values; call the model itself");
}

void check_result(const Node& node, const at::Tensor& result, const SlotPlan& slot) {
  const Dims wanted = slot.is_blocked() ? slot.format.physical_shape(slot.dims) : slot.dims;
  if (result.sizes() == wanted && result.scalar_type() == slot.dtype) return;
  fail_value("optimize", text(slot.dtype, " ", wanted, " of ", node.name),
             text(result.scalar_type(), " ", result.sizes()),
             "its results depend on values; call the model itself");
}

// A reshape of a contiguous tensor is contiguous, too.
std::optional<FixedFormats> fixed(const Node& node) {
  return is_reshape(node) ? FixedFormats{kPlain, kPlain} : FixedFormats{kStrided, kStrided};
}

// The results of a step whose op may return views, according to its schema, so that no element is
// read.
std::vector<at::Tensor> views(const Step& step, const at::Tensor& src) {
  const Node& node = *step.node;
  const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
  if (!op || op->schema().arguments().empty() || op->schema().returns().size() != 1) return {};
  const auto* given = op->schema().arguments()[0].alias_info();
  const bool may_alias = given && !given->isWrite() && op->schema().returns()[0].alias_info();
  return may_alias ? views_of(step, src) : std::vector<at::Tensor>();
}

Prepared prepare(const Step& step, const Running& running) {
  return prepare_call(step, running,
                      {.result = [](const at::Tensor& result, const SlotPlan&) { return result; }});
}

std::string why(const Step& step) {
  const std::string& declined = step.node->declined;
  return declined.empty() ? "no kernel for blocked tensors; use ops that have one, or give it a "
                            "blocked form by torch_blocked.register"
                          : declined;
}

}  // namespace

std::vector<IValue> call(const Node& node, const std::function<IValue(Value)>& value_of,
                         bool on_meta) {
  const auto op = c10::Dispatcher::singleton().findSchema({node.name, node.overload});
  if (!op) fail_value("optimize", "an operator of this PyTorch", node.name, "");
  const auto& declared = op->schema().arguments();
  if (node.arguments.size() != declared.size()) {
    fail_value("optimize", text(declared.size(), " arguments of ", node.name),
               text(node.arguments.size()), "capture the model again");
  }
  torch::jit::Stack stack;
  for (std::size_t i = 0; i < node.arguments.size(); ++i) {
    stack.push_back(to_ivalue(node.arguments[i], *declared[i].type(), value_of, on_meta));
  }
  op->callBoxed(&stack);
  if (stack.size() != 1 || !stack[0].isTensorList()) return stack;
  std::vector<IValue> flat;
  for (const at::Tensor& each : stack[0].toTensorVector()) flat.emplace_back(each);
  return flat;
}

std::vector<at::Tensor> views_of(const Step& step, const at::Tensor& src) {
  std::vector<at::Tensor> views;
  for (const IValue& result : call(*step.node, [&](Value) { return src; }, /*on_meta=*/true)) {
    if (!result.isTensor() || !result.toTensor().defined()) return {};
    if (!result.toTensor().is_alias_of(src)) return {};
    views.push_back(result.toTensor());
  }
  return views;
}

at::Tensor in_format(const at::Tensor& tensor, const SlotPlan& slot) {
  if (slot.format == kChannelsLast && tensor.dim() >= 3) {
    if (is_channels_last(tensor)) return tensor;
    const at::Tensor dst = empty_dense(tensor.sizes(), true, tensor.options());
    return dst.copy_(tensor);
  }
  return tensor.contiguous();
}

at::Tensor as_images(const at::Tensor& physical) { return physical.flatten(0, 1).movedim(-1, 1); }

at::Tensor from_images(const at::Tensor& images, std::int64_t batch) {
  return images.movedim(1, -1).contiguous().unflatten(0, {batch, -1});
}

Prepared prepare_call(const Step& step, const Running& running, const Seen& seen) {
  const auto index = static_cast<std::size_t>(&step - running.plan.steps.data());
  return {[&step, &plan = running.plan, &memory = running.memory, &tensors = running.tensors, seen,
           index] {
    const auto results = call(*step.node, [&](Value value) -> IValue {
      const at::Tensor& tensor = tensors[step.reads.at(value)];
      return seen.argument ? seen.argument(tensor) : tensor;
    });
    check_results(*step.node, results.size(), step.writes.size());
    for (std::size_t i = 0; i < step.writes.size(); ++i) {
      if (!results[i].isTensor()) continue;
      const at::Tensor& result = results[i].toTensor();
      const Slot to = step.writes[i];
      const bool read = memory.slots[to].last > index;
      if (read && seen.is_physical && result.defined()) {
        check_result(*step.node, result, plan.slots[to]);
      }
      tensors[to] = seen.result(result, plan.slots[to]);
    }
  }};
}

std::string by_aten(const Plan&, const Step&) { return "aten"; }
std::string by_torch_blocked(const Plan&, const Step&) { return "torch_blocked"; }
std::string by_aten_unless_blocked(const Plan& plan, const Step& step) {
  return plan.slots[step.writes[0]].is_blocked() ? "torch_blocked" : "aten";
}

constinit const NodeKind nodes::boxed = {
    .name = "boxed",
    .fixed = fixed,
    .may_be_view = true,
    .views = views,
    .prepare = prepare,
    .implementation = by_aten,
    .why = why,
};

}  // namespace torch_blocked::graph

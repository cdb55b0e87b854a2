// Nodes as calls through the dispatcher: arguments typed by the op's schema.
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include "format/errors.h"
#include "graph/graph.h"

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

// A list as the schema wants it.
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
    // An int given for a list stands for all its entries; one given for a float is one.
    if (value.isInt() && type.kind() == c10::TypeKind::ListType) {
      return list_of({value}, *type.castRaw<c10::ListType>()->getElementType());
    }
    if (value.isInt() && type.kind() == c10::TypeKind::FloatType) {
      return static_cast<double>(value.toInt());
    }
    // x * 2: a number takes part as a tensor that does not decide the dtype.
    if (value.isScalar() && type.kind() == c10::TypeKind::TensorType) {
      const at::Tensor number = at::scalar_to_tensor(value.toScalar());
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

Meta meta_of(const IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return {};
  return {value.toTensor().sizes().vec(), value.toTensor().scalar_type()};
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

std::vector<Meta> infer(const Graph& graph, const std::vector<Meta>& inputs) {
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
    if (node.convolution) {
      meta(node.output()) = {problem_of(node, metas).dst_dims, meta(node.convolution->src).dtype};
      continue;
    }
    if (node.affine || node.linear) {
      meta(node.output()) = meta(node.affine ? node.affine->src : node.linear->src);
      if (node.linear) meta(node.output()).dims.back() = node.linear->weight.size(0);
      continue;
    }
    if (node.squeeze_excite) {
      meta(node.output()) = meta(node.squeeze_excite->src);
      continue;
    }
    if (node.gather) {
      meta(node.output()) = meta(node.gather->srcs[0]);
      meta(node.output()).dims[1] = std::ssize(node.gather->channels);
      continue;
    }
    if (const auto known = known_results(node, metas)) {
      for (std::size_t i = 0; i < known->size(); ++i) meta(node.outputs[i]) = (*known)[i];
      continue;
    }
    const std::vector<IValue> results = call(node, value_of, /*on_meta=*/true);
    // x.unbind(): the model went on with so many.
    if (results.size() != node.outputs.size()) {
      fail_value("optimize", text(node.outputs.size(), " results of ", node.name),
                 text(results.size()), "optimize the model for these sizes");
    }
    for (std::size_t i = 0; i < results.size(); ++i) meta(node.outputs[i]) = meta_of(results[i]);
  }
  return metas;
}

}  // namespace torch_blocked::graph

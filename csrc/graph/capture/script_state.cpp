// Takes snapshots of a TorchScript module's attributes, compares and restores them.
#include "graph/capture/script_state.h"

#include <ATen/core/class_type.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>

#include <algorithm>

namespace torch_blocked::graph {
namespace {

using c10::IValue;

bool has_values(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided;
}

bool are_equal(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  return at::equal(a, b) || (a.is_floating_point() && at::allclose(a, b, 0, 0, true));
}

// The items of a value, in the order of HeldValue::items.
std::vector<IValue> contents(const IValue& value) {
  if (value.isTuple()) return value.toTupleRef().elements().vec();
  if (value.isList()) return value.toListRef().vec();
  if (value.isObject()) return value.toObjectRef().slots();
  std::vector<IValue> items;
  if (value.isGenericDict()) {
    for (const auto& each : value.toGenericDict()) {
      items.push_back(each.key());
      items.push_back(each.value());
    }
  }
  return items;
}

HeldValue held(const IValue& value) {
  HeldValue held{.value = value};
  if (value.isTensor() && has_values(value.toTensor())) {
    held.memory = value.toTensor().detach().clone();
  }
  for (const IValue& item : contents(value)) held.items.push_back(torch_blocked::graph::held(item));
  return held;
}

bool is_same(const IValue& now, const HeldValue& before) {
  if (now.isTensor() && before.value.isTensor()) {
    const at::Tensor& tensor = now.toTensor();
    return tensor.is_same(before.value.toTensor()) &&
           (!before.memory.defined() || are_equal(tensor, before.memory));
  }
  if (now.tagKind() != before.value.tagKind()) return false;
  const bool holds = now.isTuple() || now.isList() || now.isObject() || now.isGenericDict();
  if (!holds)
    return now.is(before.value) || (!now.isPtrType() && now == before.value) ||
           (now.isString() && now.toStringRef() == before.value.toStringRef());
  const std::vector<IValue> items = contents(now);
  return std::ranges::equal(items, before.items, is_same);
}

void put_back(const HeldValue& before) {
  const IValue& value = before.value;
  if (is_same(value, before)) return;
  if (before.memory.defined()) {
    const at::Tensor tensor = value.toTensor().detach();
    if (tensor.sizes() != before.memory.sizes()) tensor.resize_(before.memory.sizes());
    tensor.copy_(before.memory);
  }
  for (const HeldValue& item : before.items) put_back(item);
  if (value.isList()) {
    c10::impl::GenericList list = value.toList();
    list.clear();
    for (const HeldValue& item : before.items) list.push_back(item.value);
  } else if (value.isGenericDict()) {
    c10::impl::GenericDict dict = value.toGenericDict();
    dict.clear();
    for (std::size_t i = 0; i < before.items.size(); i += 2) {
      dict.insert(before.items[i].value, before.items[i + 1].value);
    }
  } else if (value.isObject()) {
    const auto object = value.toObject();
    for (std::size_t i = 0; i < before.items.size(); ++i) {
      object->setSlot(i, before.items[i].value);
    }
  }
}

}  // namespace

ScriptState::ScriptState(const IValue& module) { add(module.toObject(), ""); }

void ScriptState::add(const c10::intrusive_ptr<c10::ivalue::Object>& object,
                      const std::string& prefix) {
  const auto type = object->type();
  for (std::size_t i = 0; i < type->numAttributes(); ++i) {
    const IValue& value = object->getSlot(i);
    const std::string name = prefix + type->getAttributeName(i);
    if (type->getAttribute(i)->is_module()) {
      add(value.toObject(), name + ".");
    } else if (!type->is_parameter(i)) {
      slots_.push_back({name, object, i, held(value)});
    }
  }
}

std::vector<std::string> ScriptState::changes() const {
  const at::NoGradGuard no_grad;
  std::vector<std::string> names;
  for (const Slot& slot : slots_) {
    if (!is_same(slot.object->getSlot(slot.place), slot.before)) names.push_back(slot.name);
  }
  return names;
}

void ScriptState::restore() const {
  const at::NoGradGuard no_grad;
  for (const Slot& slot : slots_) {
    put_back(slot.before);
    slot.object->setSlot(slot.place, slot.before.value);
  }
}

}  // namespace torch_blocked::graph

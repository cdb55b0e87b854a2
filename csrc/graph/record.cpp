#include "graph/record.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <string_view>

#include "format/errors.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;

thread_local Recorder* running = nullptr;

std::unique_ptr<at::ObserverContext> on_enter(const at::RecordFunction& function) {
  if (running) running->enter(function);
  return nullptr;
}
void on_leave(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (running) running->leave(function);
}

// A number that Python's `x * 2` has made a tensor of.
IValue number_of(const at::Tensor& wrapped) {
  switch (wrapped.scalar_type()) {
    case at::kDouble:
      return *wrapped.const_data_ptr<double>();
    case at::kLong:
      return *wrapped.const_data_ptr<std::int64_t>();
    case at::kBool:
      return *wrapped.const_data_ptr<bool>();
    default:
      return {};
  }
}

// TorchScript hands its whole stack over, of which the op takes the end.
at::ArrayRef<const IValue> arguments_of(const at::RecordFunction& function) {
  const at::ArrayRef<const IValue> all = function.inputs();
  const std::size_t count = function.operator_schema()->arguments().size();
  return all.size() > count ? all.slice(all.size() - count) : all;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Memory that an op leaves as it was: somebody else fills it, unseen.
bool is_uninitialized(std::string_view name) {
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
}

}  // namespace

Recorder::Recorder(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& state,
                   OnResult on_result)
    : on_result_(std::move(on_result)) {
  for (const at::Tensor& input : inputs) {
    new_value(input);
    given_.insert(input.unsafeGetTensorImpl());
    computed_.insert(input.storage().unsafeGetStorageImpl());
    state_.insert(input.storage().unsafeGetStorageImpl());
  }
  for (const at::Tensor& tensor : state) {
    if (tensor.has_storage()) state_.insert(tensor.storage().unsafeGetStorageImpl());
  }
}

Recorder* Recorder::current() { return running; }

void Recorder::start() {
  running = this;
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(on_enter, on_leave)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::TORCHSCRIPT_FUNCTION}));
}

void Recorder::stop() {
  if (!handle_) return;
  at::removeCallback(*handle_);
  handle_.reset();
  running = nullptr;
}

void Recorder::ask(const at::Tensor& tensor, std::int64_t what, Dims answer) {
  const auto found = values_.find(tensor.unsafeGetTensorImpl());
  if (found == values_.end() || constants_.contains(found->second)) return;
  questions_.push_back({found->second, what, std::move(answer)});
}

std::vector<at::Tensor> Recorder::alive() const {
  std::vector<at::Tensor> tensors;
  for (const auto& weak : known_) {
    if (auto strong = weak.lock()) tensors.emplace_back(std::move(strong));
  }
  return tensors;
}

void Recorder::restore() {
  for (auto& [tensor, before] : written_) tensor.copy_(before);
  written_.clear();
}

// Also what ops inside others write, and what is written after a refusal.
void Recorder::save_written(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  if (!schema || !schema->is_mutable()) return;
  running = nullptr;  // the copies are not the forward's
  const auto inputs = arguments_of(function);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const IValue& input = inputs[i];
    if (!writes(schema->arguments()[i]) || !input.isTensor()) continue;
    const at::Tensor& tensor = input.toTensor();
    if (!tensor.defined() || !tensor.has_storage()) continue;
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    if (state_.contains(storage)) written_.insert(written_.begin(), {tensor, tensor.clone()});
  }
  running = this;
}

void Recorder::refuse(const std::string& reason) {
  if (refusal_.empty()) refusal_ = reason;
}

// Observers must not throw; what is not an op, as a Python function of autograd, calls ops.
void Recorder::enter(const at::RecordFunction& function) {
  has_script_ |= function.scope() == at::RecordScope::TORCHSCRIPT_FUNCTION;
  if (!function.operator_name()) return;
  const bool outermost = depth_++ == 0;
  try {
    save_written(function);
    if (outermost && refusal_.empty()) begin(function, arguments_of(function));
  } catch (const std::exception& error) {
    refuse(error.what());
  }
}

void Recorder::leave(const at::RecordFunction& function) {
  if (!function.operator_name() || --depth_ > 0 || !refusal_.empty()) return;
  try {
    end(function);
  } catch (const std::exception& error) {
    refuse(error.what());
  }
}

void Recorder::begin(const at::RecordFunction& function, at::ArrayRef<const IValue> inputs) {
  const auto schema = *function.operator_schema();
  Node node{
      .name = schema.name(), .overload = schema.overload_name(), .arguments = {}, .outputs = {}};
  if (is_uninitialized(node.name)) refuse(text(node.name, " makes memory that is filled unseen"));
  if (at::autocast::is_autocast_enabled(at::kCPU)) refuse("autocast changes types unseen");
  for (const IValue& input : inputs) node.arguments.push_back(argument(input));
  nodes_.push_back(std::move(node));
  if (schema.is_mutable()) replace_in_place(schema, inputs);
}

// The functional form gives the same where nobody else sees the memory that is written.
void Recorder::replace_in_place(const c10::FunctionSchema& schema,
                                at::ArrayRef<const IValue> inputs) {
  Node& node = nodes_.back();
  const auto written = std::ranges::count_if(schema.arguments(), writes);
  if (written != 1 || !writes(schema.arguments()[0]) || !inputs[0].isTensor() ||
      !node.name.ends_with("_")) {
    return refuse(text(node.name, " writes into its arguments"));
  }
  node.name.pop_back();
  const at::Tensor& self = inputs[0].toTensor();
  const bool mixed = std::ranges::any_of(inputs, [&](const IValue& input) {
    return input.isTensor() && input.toTensor().defined() &&
           input.toTensor().scalar_type() != self.scalar_type() &&
           !input.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
  });
  if (!c10::Dispatcher::singleton().findSchema({node.name, node.overload}) || mixed ||
      given_.contains(self.unsafeGetTensorImpl()) || self.storage().use_count() != 1) {
    refuse(text(node.name, "_ writes what others may see"));
  }
}

void Recorder::end(const at::RecordFunction& function) {
  Node& node = nodes_.back();
  const at::ArrayRef<IValue> all = function.outputs();
  const std::size_t count = function.operator_schema()->returns().size();
  const auto outputs = all.size() > count ? all.slice(all.size() - count) : all;
  std::vector<at::Tensor> tensors;
  if (outputs.size() == 1 && outputs[0].isTensorList()) {
    tensors = outputs[0].toTensorVector();
  } else {
    for (const IValue& output : outputs) {
      if (!output.isTensor()) return refuse(text(node.name, " returns no tensor"));
      tensors.push_back(output.toTensor());
    }
  }
  if (tensors.empty()) return refuse(text(node.name, " returns nothing"));
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      node.outputs.push_back(count_++);
      continue;
    }
    if (!tensor.has_storage()) return refuse(text(node.name, " returns no strided tensor"));
    node.outputs.push_back(new_value(tensor));
    on_result_(tensor);
    computed_.insert(tensor.storage().unsafeGetStorageImpl());
  }
}

Argument Recorder::argument(const IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return {IValue()};
    if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) return {ValueRef{value_of(tensor)}};
    const IValue number = number_of(tensor);
    if (number.isNone()) refuse("a complex number");
    return {number};
  }
  if (value.isList()) {
    std::vector<Argument> items;
    for (const IValue& item : value.toListRef()) items.push_back(argument(item));
    return {std::move(items)};
  }
  if (!value.isNone() && !value.isBool() && !value.isInt() && !value.isDouble() &&
      !value.isString() && !value.isDevice()) {
    refuse(text("an argument of type ", value.tagKind()));
  }
  return {value};
}

// What no op has made was there before, unless it shares memory with what one has.
Value Recorder::value_of(const at::Tensor& tensor) {
  const auto found = values_.find(tensor.unsafeGetTensorImpl());
  if (found != values_.end()) return found->second;
  if (!tensor.has_storage() || computed_.contains(tensor.storage().unsafeGetStorageImpl())) {
    refuse("a tensor comes from a result by no op");
  }
  const Value value = new_value(tensor);
  given_.insert(tensor.unsafeGetTensorImpl());
  constants_[value] = tensor;
  return value;
}

Value Recorder::new_value(const at::Tensor& tensor) {
  known_.emplace_back(tensor.getIntrusivePtr());
  return values_[tensor.unsafeGetTensorImpl()] = count_++;
}

}  // namespace torch_blocked::graph

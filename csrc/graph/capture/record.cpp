// Records the ops of a forward as nodes, through an observer of PyTorch's dispatcher. In-place ops
// become functional ones, and writes into shared memory are followed.
#include "graph/capture/record.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "format/errors.h"
#include "graph/aten.h"
#include "runtime/interrupts.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;

thread_local Recorder* running = nullptr;

// Ops that are called during its lifetime are not recorded.
struct Unheard {
  Recorder* was = std::exchange(running, nullptr);
  Unheard() = default;
  Unheard(const Unheard&) = delete;
  Unheard& operator=(const Unheard&) = delete;
  ~Unheard() { running = was; }
};

std::unique_ptr<at::ObserverContext> on_enter(const at::RecordFunction& function) {
  if (running) running->enter(function);
  return nullptr;
}
void on_leave(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (running) running->leave(function);
}

// The number in a tensor that Python's `x * 2` has wrapped it in.
IValue number_of(const at::Tensor& wrapped) {
  switch (wrapped.scalar_type()) {
    case at::kDouble:
      return *wrapped.const_data_ptr<double>();
    case at::kLong:
      return *wrapped.const_data_ptr<std::int64_t>();
    case at::kBool:
      return *wrapped.const_data_ptr<bool>();
    case at::kComplexDouble:
      return *wrapped.const_data_ptr<c10::complex<double>>();
    default:
      return {};
  }
}

// The arguments of the op. TorchScript gives observers its whole stack, which ends with them.
at::ArrayRef<const IValue> arguments_of(const at::RecordFunction& function) {
  const at::ArrayRef<const IValue> all = function.inputs();
  const std::size_t count = function.operator_schema()->arguments().size();
  return all.size() > count ? all.slice(all.size() - count) : all;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Ops that are not recorded. torch.tensor([...]) makes a tensor with dispatch to Python off and
// fills it unseen, so the tensor counts as one that existed before.
bool is_silent(std::string_view name) {
  return name == "aten::detach_" ||
         (name.starts_with("aten::empty") &&
          c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python));
}

// Ops that tell a tensor's metadata, not its values. Only TorchScript calls them: Python asks
// without an op (watched.py records its questions).
constexpr std::array<std::string_view, 10> kOfMetadata = {
    "aten::dim",
    "aten::is_complex",
    "aten::is_contiguous",
    "aten::is_floating_point",
    "aten::is_same_size",
    "aten::is_signed",
    "aten::numel",
    "aten::size",
    "aten::storage_offset",
    "aten::stride",
};

bool shows_otherwise(const c10::OperatorName& name) {
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  return op && op->hasTag(at::Tag::inplace_view);
}

// The op that returns what an in-place op writes; nothing if none takes the same arguments. That of
// pow_.Scalar is pow.Tensor_Scalar, because pow.Scalar has a number as its base.
std::optional<c10::OperatorHandle> functional_op(const c10::FunctionSchema& in_place,
                                                 const std::string& name) {
  const auto same_type = [](const c10::Argument& a, const c10::Argument& b) {
    return *a.type() == *b.type();
  };
  for (const std::string& overload :
       {in_place.overload_name(), "Tensor_" + in_place.overload_name(), std::string("Tensor"),
        std::string()}) {
    const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    if (op && std::ranges::equal(op->schema().arguments(), in_place.arguments(), same_type)) {
      return op;
    }
  }
  return std::nullopt;
}

// The same argument on the meta device. Numbers stay as they are.
IValue on_meta(const IValue& argument) {
  if (argument.isTensor()) {
    const at::Tensor& tensor = argument.toTensor();
    const bool has_memory = tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return has_memory ? at::empty(tensor.sizes(), tensor.options().device(at::kMeta)) : tensor;
  }
  if (!argument.isList()) return argument;
  c10::impl::GenericList list(argument.toList().elementType());
  for (const IValue& item : argument.toListRef()) list.push_back(on_meta(item));
  return list;
}

// The type of an op's result for these arguments. Throws what the op throws.
at::ScalarType type_on_meta(const c10::OperatorHandle& op, at::ArrayRef<const IValue> inputs) {
  const Unheard unheard;
  torch::jit::Stack stack;
  for (const IValue& input : inputs) stack.push_back(on_meta(input));
  op.callBoxed(stack);
  return stack.at(0).toTensor().scalar_type();
}

const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

Recorder::Recorder(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& state,
                   OnResult on_result, Where where, IsOwn is_own)
    : on_result_(std::move(on_result)), where_(std::move(where)), is_own_(std::move(is_own)) {
  for (const at::Tensor& input : inputs) {
    varying_.insert(new_value(input));
    given_.insert(input.unsafeGetTensorImpl());
    computed_.emplace(memory_of(input), input.storage().getWeakStorageImpl());
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
  if (found == values_.end() || !varying_.contains(found->second.value)) return;
  questions_.push_back({found->second.value, what, std::move(answer)});
}

bool Recorder::is_constant(const at::Tensor& tensor) {
  const Value value = value_of(tensor);
  return refusal_.empty() && !varying_.contains(value);
}

void Recorder::expose(const at::Tensor& tensor) {
  given_.insert(tensor.unsafeGetTensorImpl());
  memories_.erase(memory_of(tensor));
}

bool Recorder::runs_constant_op() const {
  return depth_ > 0 && running_.is_noted && refusal_.empty() && !nodes_.empty() &&
         !varies(nodes_.back());
}

// x.new_zeros(2) depends only on x's type, which is the same for all inputs of a capture.
bool Recorder::varies(const Node& node) const {
  if (is_random(node)) return true;
  if (node.name.starts_with("aten::new_")) return false;
  bool varies = false;
  for_values(node.arguments, [&](Value value) { varies |= varying_.contains(value); });
  return varies;
}

// Whether an op has read only constants and returned no tensor: Python then has a number that is
// the same for all inputs.
bool Recorder::is_number_of_constants(const Node& node, at::ArrayRef<IValue> results) const {
  const auto has_tensors = [](const IValue& each) {
    return each.isTensor() || each.isTensorList() || each.isOptionalTensorList();
  };
  return std::ranges::none_of(results, has_tensors) && !varies(node);
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

// Saves the state that an op is about to write, even inside another op or after a refusal.
void Recorder::save_written(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  if (!schema || !schema->is_mutable()) return;
  const Unheard unheard;
  const auto inputs = arguments_of(function);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const IValue& input = inputs[i];
    if (!writes(schema->arguments()[i]) || !input.isTensor()) continue;
    const at::Tensor& tensor = input.toTensor();
    if (!tensor.defined() || !tensor.has_storage()) continue;
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    if (!state_.contains(storage)) continue;
    written_.insert(written_.begin(), {tensor, tensor.clone()});
    wrote_state_ = true;
  }
}

void Recorder::refuse(const std::string& reason) {
  if (refusal_.empty()) refusal_ = reason;
}

// If the error being caught is an interrupt and not the op's, the forward has to end with it.
void Recorder::refuse(const std::exception& error) {
  if (!raised_ && is_interrupt(error)) raised_ = std::current_exception();
  refuse(error.what());
}

void Recorder::raise_again() {
  if (raised_) std::rethrow_exception(std::exchange(raised_, nullptr));
}

// Whether an op takes a tensor of a class that computes on others and has no memory itself, such as
// the weights of torchao and Quanto. What the op does is then what that class calls.
bool Recorder::takes_wrapper(const at::RecordFunction& function) const {
  return std::ranges::any_of(arguments_of(function), [&](const IValue& argument) {
    if (!argument.isTensor()) return false;
    const at::Tensor& tensor = argument.toTensor();
    const bool may_wrap = tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python) &&
                          tensor.has_storage() && tensor.numel() > 0;
    if (!may_wrap || tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()) {
      return false;
    }
    return !is_own_(tensor);
  });
}

// An observer must not throw, so errors become refusals. A call without an operator name, such as a
// Python function of autograd, is not recorded, but the ops that it calls are.
void Recorder::enter(const at::RecordFunction& function) {
  has_fixed_sizes_ |= function.scope() == at::RecordScope::TORCHSCRIPT_FUNCTION;
  if (!function.operator_name()) return;
  bool opens = false;
  try {
    opens = depth_ == 0 && takes_wrapper(function);
  } catch (const std::exception& error) {
    refuse(error);
  }
  if (opens) return opened_.push_back(&function);
  const bool outermost = depth_++ == 0;
  try {
    save_written(function);
    if (outermost) running_ = {.is_noted = !is_silent(function.operator_name()->name)};
    if (outermost && running_.is_noted && refusal_.empty()) begin(function, arguments_of(function));
  } catch (const std::exception& error) {
    refuse(error);
  }
  if (outermost) running_.start = std::chrono::steady_clock::now();
}

void Recorder::leave(const at::RecordFunction& function) {
  if (!opened_.empty() && opened_.back() == &function) return opened_.pop_back();
  if (!function.operator_name() || --depth_ > 0) return;
  in_ops_ += std::chrono::steady_clock::now() - running_.start;
  if (!refusal_.empty() || !running_.is_noted) return;
  try {
    end(function);
  } catch (const std::exception& error) {
    refuse(error);
  }
}

void Recorder::begin(const at::RecordFunction& function, at::ArrayRef<const IValue> inputs) {
  const auto schema = *function.operator_schema();
  Node node{.name = schema.name(),
            .overload = schema.overload_name(),
            .arguments = {},
            .outputs = {},
            .origin = where_()};
  // The same as at::autocast::is_autocast_enabled(at::kCPU), whose header includes those of all
  // ops.
  if (!c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU))
    refuse("autocast changes types unseen");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    node.arguments.push_back(argument(inputs[i]));
    if (inputs[i].isTensor()) running_.tensors.emplace_back(i, inputs[i].toTensor());
    if (!inputs[i].isTensorList()) continue;
    for (const at::Tensor& tensor : inputs[i].toTensorVector()) {
      running_.tensors.emplace_back(i, tensor);
    }
  }
  nodes_.push_back(std::move(node));
  if (schema.is_mutable()) replace_in_place(schema, inputs);
}

// Replaces the op by its functional form, which has the same result. note_write() then applies the
// write to other tensors of the memory.
void Recorder::replace_in_place(const c10::FunctionSchema& schema,
                                at::ArrayRef<const IValue> inputs) {
  Node& node = nodes_.back();
  const auto written = std::ranges::count_if(schema.arguments(), writes);
  if (written != 1 || !writes(schema.arguments()[0]) || !inputs[0].isTensor() ||
      !node.name.ends_with("_")) {
    return refuse(text(node.name, " writes into its arguments"));
  }
  node.name.pop_back();
  const auto functional = functional_op(schema, node.name);
  const at::Tensor& self = inputs[0].toTensor();
  const auto memory = memories_.find(memory_of(self));
  running_.writes = true;
  running_.reaches_others = self.storage().use_count() != 1;
  if (!functional || given_.contains(self.unsafeGetTensorImpl()) ||
      (running_.reaches_others &&
       (memory == memories_.end() || shows_otherwise(schema.operator_name())))) {
    return refuse(text(node.name, "_ writes what others may see"));
  }
  node.overload = functional->operator_name().overload_name;
  running_.type = type_of_result(*functional, inputs);
  if (memory != memories_.end()) has_fixed_sizes_ |= memory->second.may_be_copied;
}

// Uses a rule if there is one for the op: meta kernels written in Python import torch's tracer.
at::ScalarType Recorder::type_of_result(const c10::OperatorHandle& functional,
                                        at::ArrayRef<const IValue> inputs) const {
  Node node = nodes_.back();
  node.outputs = {count_};
  std::vector<Meta> metas(static_cast<std::size_t>(count_));
  for (const auto& [place, tensor] : running_.tensors) {
    const Value value = node.arguments[place].value();
    if (value == kNone) continue;  // a number or a list
    metas[static_cast<std::size_t>(value)] = {tensor.sizes().vec(), tensor.scalar_type()};
  }
  const auto known = known_results(node, metas);
  return known ? known->at(0).dtype : type_on_meta(functional, inputs);
}

void Recorder::end(const at::RecordFunction& function) {
  const at::ArrayRef<IValue> all = function.outputs();
  const std::size_t count = function.operator_schema()->returns().size();
  const auto outputs = all.size() > count ? all.slice(all.size() - count) : all;
  const bool of_metadata = std::ranges::count(kOfMetadata, nodes_.back().name) > 0;
  has_fixed_sizes_ |= of_metadata;
  if (of_metadata || is_number_of_constants(nodes_.back(), outputs)) {
    nodes_.pop_back();
    running_ = {};
    return;
  }
  const std::string& name = nodes_.back().name;
  std::vector<at::Tensor> tensors;
  if (outputs.size() == 1 && outputs[0].isTensorList()) {
    tensors = outputs[0].toTensorVector();
  } else {
    for (const IValue& output : outputs) {
      if (!output.isTensor()) return refuse(text(name, " returns no tensor"));
      tensors.push_back(output.toTensor());
    }
  }
  if (tensors.empty()) return refuse(text(name, " returns nothing"));
  std::vector<Meta> results;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && !tensor.has_storage()) {
      return refuse(text(name, " returns no strided tensor"));
    }
    results.push_back(tensor.defined() ? Meta{tensor.sizes().vec(), tensor.scalar_type()} : Meta{});
  }
  note_results(tensors, results);
  running_ = {};
}

void Recorder::note_results(const std::vector<at::Tensor>& tensors,
                            const std::vector<Meta>& results) {
  std::vector<Value>& outputs = nodes_.back().outputs;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    outputs.push_back(count_++);
    if (tensors[i].defined()) metas_[outputs.back()] = results[i];
  }
  const Node node = nodes_.back();
  if (varies(node)) varying_.insert(outputs.begin(), outputs.end());
  if (running_.writes) {
    metas_[node.output()].dtype = running_.type;
    const bool is_own = running_.type == results[0].dtype;
    return note_write(tensors[0], is_own ? node.output() : cast(node.output(), results[0]));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    Shown shown = shown_by(tensors[i], node, i, results);
    known_.emplace_back(tensors[i].getIntrusivePtr());
    values_[tensors[i].unsafeGetTensorImpl()] = std::move(shown);
    on_result_(tensors[i]);
  }
  if (!may_copy(node) || running_.tensors.empty()) return;
  for (const at::Tensor& tensor : {tensors[0], running_.tensors[0].second}) {
    const auto memory = memories_.find(memory_of(tensor));
    if (memory != memories_.end()) memory->second.may_be_copied = true;
  }
}

// The memory and views of a result. Memory that no argument has was made by the op.
Recorder::Shown Recorder::shown_by(const at::Tensor& result, const Node& node, std::size_t output,
                                   const std::vector<Meta>& results) {
  const c10::StorageImpl* memory = memory_of(result);
  const Value value = node.outputs[output];
  const auto source = std::ranges::find_if(running_.tensors, [&](const auto& argument) {
    return argument.second.defined() && memory_of(argument.second) == memory;
  });
  if (source == running_.tensors.end()) {
    computed_.emplace(memory, result.storage().getWeakStorageImpl());
    const bool is_new = running_.made.insert(memory).second;
    if (!is_new) {  // several results in one memory, and none of them is all of it
      memories_.erase(memory);
      return {value};
    }
    memories_[memory] = {value};
    return {value, memory};
  }
  Shown shown = values_.at(source->second.unsafeGetTensorImpl());
  shown.value = value;
  if (shown.memory && !source->second.is_same(result)) {
    shown.views.push_back({node, source->first, output, results});
  }
  return shown;
}

void Recorder::note_write(const at::Tensor& tensor, Value written) {
  Shown& self = values_.at(tensor.unsafeGetTensorImpl());
  if (!running_.reaches_others) {
    memories_[memory_of(tensor)] = {written};
    self = {written, memory_of(tensor)};
    return;
  }
  Memory& memory = memories_.at(self.memory);
  std::vector<Value> sources = {memory.value};
  for (std::size_t i = 0; i + 1 < self.views.size(); ++i) {
    sources.push_back(show(self.views[i], sources.back()));
  }
  self.value = written;
  for (std::size_t i = self.views.size(); i-- > 0;) {
    const ViewStep& step = self.views[i];
    std::optional<Node> node = written_back(step, sources[i], written);
    if (!node) return refuse(text("a write into what ", step.node.name, " shows"));
    has_fixed_sizes_ |= depends_on_sizes(step);
    written = emit(std::move(*node), {metas_.at(sources[i])});
  }
  memory.value = written;
  self.writes = ++memory.writes;
}

// Adds a node; returns the value of its first result.
Value Recorder::emit(Node node, const std::vector<Meta>& results) {
  const Value first = count_;
  if (!nodes_.empty()) node.origin = nodes_.back().origin;  // the op's that asked for it
  const bool varies = this->varies(node);
  for (const Meta& result : results) {
    if (varies) varying_.insert(count_);
    node.outputs.push_back(count_);
    metas_[count_++] = result;
  }
  nodes_.push_back(std::move(node));
  return first;
}

// `value` converted to the type of `result`, which has the same dims.
Value Recorder::cast(Value value, const Meta& result) {
  std::vector<Argument> arguments{{ValueRef{value}}};
  for (const IValue& argument :
       {IValue(static_cast<std::int64_t>(result.dtype)), IValue(false), IValue(false), IValue()}) {
    arguments.push_back({argument});
  }
  Node node{
      .name = "aten::to", .overload = "dtype", .arguments = std::move(arguments), .outputs = {}};
  return emit(std::move(node), {result});
}

Value Recorder::show(const ViewStep& step, Value source) {
  if (step.node.arguments[step.argument].value() == kNone) {
    refuse(text(step.node.name, " shows several tensors"));
  }
  return emit(shown(step, source), step.results) + static_cast<Value>(step.output);
}

// The value that a tensor has now. If its memory was written through another tensor, its views are
// repeated on the new value.
Value Recorder::current(Shown& self) {
  const auto found = memories_.find(self.memory);
  if (found == memories_.end() || self.writes == found->second.writes) return self.value;
  const Memory& memory = found->second;
  self.value = memory.value;
  for (const ViewStep& step : self.views) self.value = show(step, self.value);
  self.writes = memory.writes;
  return self.value;
}

Argument Recorder::argument(const IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return {IValue()};
    if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) return {ValueRef{value_of(tensor)}};
    const IValue number = number_of(tensor);
    if (number.isNone()) refuse(text("a number of type ", tensor.scalar_type()));
    return {number};
  }
  if (value.isList()) {
    std::vector<Argument> items;
    for (const IValue& item : value.toListRef()) items.push_back(argument(item));
    return {std::move(items)};
  }
  if (!value.isNone() && !value.isScalar() && !value.isString() && !value.isDevice()) {
    refuse(text("an argument of type ", value.tagKind()));
  }
  return {value};
}

// A tensor that no recorded op has made existed before and becomes a constant, unless it shares
// memory with an op's result.
Value Recorder::value_of(const at::Tensor& tensor) {
  const auto found = values_.find(tensor.unsafeGetTensorImpl());
  if (found != values_.end()) return current(found->second);
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
  values_[tensor.unsafeGetTensorImpl()] = {count_};
  return count_++;
}

}  // namespace torch_blocked::graph

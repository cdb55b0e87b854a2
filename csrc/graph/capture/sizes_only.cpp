// Runs ops for their sizes only: a fallback for a dispatch key that we switch on returns zeros
// where a rule knows the sizes.
#include "graph/capture/sizes_only.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>

#include "graph/capture/record.h"
#include "graph/capture/view_writes.h"
#include "graph/graph.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

// PyTorch reserves this key for libraries that defer ops, and has no kernels for it. It comes
// before all keys except those of tracers, so we see composite ops such as conv2d whole.
constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

bool is_alias(const c10::Argument& argument) { return argument.alias_info() != nullptr; }

// Ops that may return their input itself in evaluation mode, though their schema does not say so.
bool may_return_input(const Node& node) { return may_copy(node) || node.name.ends_with("dropout"); }

// The argument as rules want it: tensors become values, whose metas are added, and numbers
// constants.
Argument argument_of(const IValue& value, std::vector<Meta>& metas) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return {IValue()};
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return {IValue(tensor.item())};
    metas.push_back({tensor.sizes().vec(), tensor.scalar_type()});
    return {ValueRef{static_cast<Value>(metas.size()) - 1}};
  }
  if (!value.isList()) return {value};
  std::vector<Argument> items;
  for (const IValue& item : value.toListRef()) items.push_back(argument_of(item, metas));
  return {std::move(items)};
}

bool are_floating(const std::vector<Meta>& metas) {
  return std::ranges::all_of(metas, [](const Meta& m) { return at::isFloatingType(m.dtype); });
}

// The metas of the op's results, if it makes new floating-point tensors and has a rule.
std::optional<std::vector<Meta>> made_by(const c10::FunctionSchema& schema,
                                         at::ArrayRef<IValue> arguments) {
  if (std::ranges::any_of(schema.arguments(), is_alias)) return std::nullopt;
  if (std::ranges::any_of(schema.returns(), is_alias)) return std::nullopt;
  Node node{
      .name = schema.name(), .overload = schema.overload_name(), .arguments = {}, .outputs = {}};
  if (may_return_input(node)) return std::nullopt;
  std::vector<Meta> metas;
  for (const IValue& argument : arguments) node.arguments.push_back(argument_of(argument, metas));
  node.outputs.resize(schema.returns().size());
  auto results = known_results(node, metas);
  return results && are_floating(*results) ? results : std::nullopt;
}

// Whether the op does nothing except write numbers into its first argument and return it.
bool only_writes(const c10::OperatorHandle& op, at::ArrayRef<IValue> arguments) {
  const c10::FunctionSchema& schema = op.schema();
  const auto writes = [](const c10::Argument& a) {
    return is_alias(a) && a.alias_info()->isWrite();
  };
  return schema.name().ends_with("_") && !op.hasTag(at::Tag::inplace_view) &&
         schema.returns().size() == 1 && std::ranges::count_if(schema.arguments(), writes) == 1 &&
         writes(schema.arguments()[0]) && arguments[0].isTensor() &&
         at::isFloatingType(arguments[0].toTensor().scalar_type()) &&
         arguments[0].toTensor().has_storage();
}

// Pages fresh from the system are zeros without being written. To fill ResNet-50's values, which
// nobody reads, took 18 ms.
at::Tensor zeros(const Meta& meta) {
  constexpr std::size_t kLeastBytes = 64 << 10;
  const auto bytes =
      static_cast<std::size_t>(c10::multiply_integers(meta.dims)) * c10::elementSize(meta.dtype);
  if (bytes < kLeastBytes) return at::zeros(meta.dims, meta.dtype);
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return at::zeros(meta.dims, meta.dtype);  // raises a better error
  const auto unmap = [bytes](void* data) { munmap(data, bytes); };
  return at::from_blob(pages, meta.dims, unmap, meta.dtype);
}

void run_sizes_only(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard inner_ops_run(kKey);
  const std::size_t count = op.schema().arguments().size(), first = stack->size() - count;
  const at::ArrayRef<IValue> arguments(stack->data() + first, count);
  const Recorder* recorder = Recorder::current();
  const bool runs = recorder && recorder->runs_constant_op();  // Python may read what it returns
  if (!runs && count > 0 && only_writes(op, arguments)) {
    stack->resize(first + 1);
    return;
  }
  const auto results = runs ? std::nullopt : made_by(op.schema(), arguments);
  if (!results) {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
    return;
  }
  stack->resize(first);
  for (const Meta& meta : *results) stack->push_back(zeros(meta));
}

}  // namespace

SizesOnly::SizesOnly() { c10::impl::tls_set_dispatch_key_included(kKey, true); }

SizesOnly::~SizesOnly() { c10::impl::tls_set_dispatch_key_included(kKey, false); }

}  // namespace torch_blocked::graph

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&torch_blocked::graph::run_sizes_only>());
}

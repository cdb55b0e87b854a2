#include "graph/compiled.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <thread>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "format/errors.h"
#include "runtime/isa.h"
#include "runtime/memory_pool.h"
#include "runtime/primitive.h"

namespace torch_blocked::graph {
namespace {

// Plans kept, each with its memory: enough for the sizes a server meets often.
constexpr std::size_t kPlans = 16;

std::string key_of(const std::vector<at::Tensor>& inputs) {
  Key key("plan");
  for (const at::Tensor& input : inputs) {
    key.add(input.sizes()).add(static_cast<std::int64_t>(input.scalar_type()));
  }
  return std::move(key).finish();
}

std::vector<Meta> metas_of(const std::vector<at::Tensor>& inputs) {
  std::vector<Meta> metas;
  for (const at::Tensor& input : inputs) {
    metas.push_back({input.sizes().vec(), input.scalar_type()});
  }
  return metas;
}

std::string format_name(const SlotPlan& slot) {
  if (slot.dims.size() < 3) return "";
  static constexpr std::array kPlainNames{"ncw", "nchw", "ncdhw"};
  static constexpr std::array kChannelsLastNames{"nwc", "nhwc", "ndhwc"};
  const std::size_t row = slot.dims.size() - 3;
  if (row >= kPlainNames.size()) return "";
  if (slot.format == kPlain) return kPlainNames[row];
  if (slot.format == kChannelsLast) return kChannelsLastNames[row];
  return blocked_name(static_cast<std::int64_t>(slot.dims.size()), slot.format);
}

std::string implementation_of(const Step& step) {
  switch (step.kind) {
    case StepKind::kConvolution:
      return step.implementation;
    case StepKind::kAffine:
    case StepKind::kConcat:
    case StepKind::kGather:
    case StepKind::kReorder:
    case StepKind::kRegroup:
    case StepKind::kSqueezeExcite:
      return "torch_blocked";
    case StepKind::kLinear:
    case StepKind::kPooling:
      return "onednn";
    default:
      return "aten";
  }
}

std::string why_of(const Step& step) {
  if (step.kind == StepKind::kReorder) return "the next step takes this format";
  if (step.kind == StepKind::kBoxed) return "no kernel for blocked tensors";
  if (step.kind == StepKind::kSqueezeExcite) {
    return text("squeeze and excitation in one step, ", step.node->squeeze_excite->layers.size(),
                " layers");
  }
  if (step.kind != StepKind::kConvolution) return "";
  const char* gathers = step.gather ? "; gathers its channels" : "";
  if (step.microseconds > 0) return text("fastest alone: ", step.microseconds, " us", gathers);
  return text("first in the list", gathers);
}

// What tuning and packing used and freed goes back to the system: 150 MiB for ResNet-50.
void return_idle_memory() {
  release_pool();
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace

Compiled::Compiled(Graph graph, const std::vector<at::Tensor>& example, Tuner tuner)
    : graph_(std::move(graph)), tuner_(std::move(tuner)) {
  simplify(graph_, infer(graph_, metas_of(example)));
  entry_for(example);
}

std::shared_ptr<Compiled::Entry> Compiled::entry_for(const std::vector<at::Tensor>& inputs) {
  const std::string key = key_of(inputs);
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(entries_, key, [](const auto& each) { return each->key; });
  if (found != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, found);
    return entries_.front();
  }
  if (released_) {
    fail_value("optimize", "inputs of sizes that were planned before release()",
               inputs.empty() ? "none" : text(inputs[0].sizes().vec()),
               "run them once before release(), or optimize the model again");
  }
  auto entry = std::make_shared<Entry>();
  entry->key = key;
  entry->plan = make_plan(graph_, metas_of(inputs), tuner_, native_blocks()[0]);
  entries_.push_front(entry);
  if (entries_.size() > kPlans) entries_.pop_back();
  return entry;
}

std::unique_ptr<Run> Compiled::take(Entry& entry) {
  {
    const std::lock_guard lock(entry.mutex);
    if (!entry.idle.empty()) {
      auto run = std::move(entry.idle.back());
      entry.idle.pop_back();
      return run;
    }
  }
  return std::make_unique<Run>(graph_, entry.plan, weights_);
}

void Compiled::put_back(Entry& entry, std::unique_ptr<Run> run) {
  // As many as can run at a time; others give their memory back, outside the lock.
  static const std::size_t kept = std::max(1u, std::thread::hardware_concurrency());
  const std::lock_guard lock(entry.mutex);
  if (entry.idle.size() < kept) entry.idle.push_back(std::move(run));
}

Tuner::Known Compiled::times() {
  const std::lock_guard lock(mutex_);
  return tuner_.known();
}

void Compiled::release() {
  const std::lock_guard lock(mutex_);
  for (const auto& entry : entries_) put_back(*entry, take(*entry));  // has packed what it needs
  for (Node& node : graph_.nodes) {
    if (node.convolution) node.convolution->weight.reset();
    if (node.linear) node.linear->weight.reset();
    if (node.squeeze_excite) node.squeeze_excite->layers.clear();
  }
  released_ = true;
  return_idle_memory();
}

std::vector<at::Tensor> Compiled::operator()(const std::vector<at::Tensor>& inputs) {
  const auto entry = entry_for(inputs);
  auto run = take(*entry);
  const auto values = (*run)(inputs);
  put_back(*entry, std::move(run));
  std::vector<at::Tensor> outputs;
  for_arguments(graph_.outputs, [&](Value value) { outputs.push_back(values.at(value)); });
  return outputs;
}

void Compiled::prepare(const std::vector<at::Tensor>& inputs) {
  const auto entry = entry_for(inputs);
  put_back(*entry, take(*entry));
  return_idle_memory();
}

std::vector<StepReport> Compiled::report(const std::vector<at::Tensor>& inputs) {
  const auto entry = entry_for(inputs);
  auto run = take(*entry);
  run->timed(inputs);
  const std::vector<double> times = run->timed(inputs);
  put_back(*entry, std::move(run));
  std::vector<StepReport> report;
  for (std::size_t i = 0; i < times.size(); ++i) {
    const Step& step = entry->plan.steps[i];
    const SlotPlan& dst = entry->plan.slots[step.writes[0]];
    report.push_back({step.node ? step.node->name : "reorder",
                      text(format_name(dst), format_name(dst).empty() ? "" : " ", dst.dims),
                      implementation_of(step), why_of(step), times[i]});
  }
  return report;
}

std::int64_t Compiled::arena_bytes(const std::vector<at::Tensor>& inputs) {
  const auto entry = entry_for(inputs);
  auto run = take(*entry);
  const std::int64_t bytes = run->arena_bytes();
  put_back(*entry, std::move(run));
  return bytes;
}

}  // namespace torch_blocked::graph

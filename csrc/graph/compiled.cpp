// Plans a graph for the inputs that come, keeps the plans and their runs, and runs them.
#include "graph/compiled.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include "format/errors.h"
#include "graph/capture/well_formed.h"
#include "graph/passes/rules.h"
#include "graph/planning/planner.h"
#include "graph/planning/stretches.h"
#include "runtime/estimated_threads.h"
#include "runtime/interrupts.h"
#include "runtime/isa.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/onednn/primitive.h"

namespace torch_blocked::graph {
namespace {

// Plans kept, each with its memory: enough for the sizes a server meets often.
constexpr std::size_t kPlans = 16;
// The most sizes that are noted as covered.
constexpr std::size_t kCovered = 4096;

// Kernels read constants directly, so they must be in the CPU's memory. (Python refuses a model's
// weights earlier, by their names.)
void check_devices(const Graph& graph) {
  for (const auto& [value, tensor] : graph.constants) {
    if (tensor.device().is_cpu()) continue;
    fail_type("optimize", "constants in the memory of the CPU",
              text("one of ", tensor.sizes(), " on ", tensor.device()), "move it to the CPU");
  }
}

// Whether a node reads a value without elements. Only read values count: an op may leave a result
// empty that nobody asked for.
bool has_empty(const Graph& graph, const std::vector<Meta>& metas) {
  bool found = false;
  const auto look = [&](Value value) {
    found |= c10::multiply_integers(metas[static_cast<std::size_t>(value)].dims) == 0;
  };
  for (const Value value : graph.inputs) look(value);
  for (const Node& node : graph.nodes) for_values(node.arguments, look);
  for_values(graph.outputs, look);
  return found;
}

}  // namespace

Compiled::Compiled(Graph graph, Tuner tuner, std::shared_ptr<Weights> weights, Computes computes,
                   std::vector<std::string> keep)
    : graph_(std::move(graph)),
      weights_(std::move(weights)),
      computes_(computes),
      keep_(std::move(keep)),
      tuner_(std::move(tuner)) {
  check_devices(graph_);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  quantize_weights(graph_);
  fold_constants(graph_, widens_bytes);
  settle_masks(graph_);
}

bool Compiled::add_covered(const std::vector<Given>& inputs) {
  const std::lock_guard lock(mutex_);
  std::vector<Meta> metas = metas_of(inputs);
  try {
    infer(graph_, metas);
  } catch (const std::exception& error) {  // an op tells the sizes of its results only in a run
    if (is_interrupt(error)) throw;
    return false;
  }
  if (graph_.also.size() == kCovered) graph_.also.erase(graph_.also.begin());
  graph_.also.push_back(std::move(metas));
  return true;
}

void Compiled::check_sizes() const { infer(graph_, graph_.input_metas); }

void Compiled::check_unknown() const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  graph::check_unknown(graph_);
}

bool Compiled::covers(const std::vector<Given>& inputs) {
  const std::lock_guard lock(mutex_);
  if (released_) return false;
  return graph::covers(graph_, metas_of(inputs));
}

template <typename F>
auto Compiled::with_tuner(F&& f) {
  if (!is_deterministic()) return f(tuner_);
  Tuner by_estimates(Timing::kNothing, "", {});
  return f(by_estimates);
}

// Runs in a child of fork() if another thread of the parent was planning. After release() none of
// this is written any more.
void Compiled::renew() {
  if (released_) return;
  abandon(simplified_);
  abandon(as_captured_);
  abandon(graph_.also);
  new (&tuner_) Tuner(tuner_.anew());
}

std::shared_ptr<Compiled::Entry> Compiled::entry_for(const std::vector<Given>& inputs,
                                                     bool simplified) {
  const std::string key = key_of(inputs);
  const std::lock_guard lock(mutex_);
  Entries& entries = simplified ? simplified_ : as_captured_;
  const auto found = std::ranges::find(entries, key, [](const auto& each) { return each->key; });
  if (found != entries.end()) {
    if (released_) return *found;  // plans are no longer replaced
    entries.splice(entries.begin(), entries, found);
    return entries.front();
  }
  if (released_) {
    fail_value("optimize", "inputs of sizes that were planned before release()",
               inputs.empty() ? "none" : text(inputs[0].meta.dims),
               "run them once before release(), or optimize the model again");
  }
  auto entry =
      with_tuner([&](Tuner& tuner) { return planned(inputs, simplified, tuner, *weights_); });
  entry->key = key;
  entries.push_front(entry);
  if (entries.size() > kPlans) entries.pop_back();
  return entry;
}

// Without times, bfloat16 counts as faster where the CPU multiplies it.
std::shared_ptr<Compiled::Entry> Compiled::planned(const std::vector<Given>& inputs,
                                                   bool simplified, Tuner& tuner, Weights& packed) {
  const Narrowing all{.keep = keep_};
  if (!simplified || computes_ == Computes::kAsCaptured) {
    return planned_in(nullptr, inputs, simplified, tuner, packed);
  }
  if (computes_ == Computes::kNarrow) return planned_in(&all, inputs, true, tuner, packed);
  if (computes_ == Computes::kFastest && !gains_by_bfloats()) {
    auto entry = planned_in(nullptr, inputs, true, tuner, packed);
    entry->types = "in float32, because this CPU does not multiply bfloat16";
    return entry;
  }
  if (!tuner.enabled()) return planned_in(&all, inputs, true, tuner, packed);
  return fastest(inputs, tuner, packed);
}

namespace {

// Microseconds of whole runs: the least of some, in turn with each other.
std::vector<double> least_times(const std::vector<Run*>& runs, const std::vector<Given>& inputs) {
  constexpr double kLong = 2e5;  // two runs of a model as slow as this are enough
  constexpr int kRounds = 5;
  std::vector<double> least(runs.size(), std::numeric_limits<double>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < runs.size(); ++i) {
      check_interrupts();
      const auto start = std::chrono::steady_clock::now();
      (*runs[i])(inputs);
      const std::chrono::duration<double, std::micro> time =
          std::chrono::steady_clock::now() - start;
      if (round > 0 || time.count() > kLong) least[i] = std::min(least[i], time.count());
    }
    if (*std::ranges::max_element(least) > kLong && round > 0) break;
  }
  return least;
}

// The times of a plan's steps in a run after a first one.
std::vector<double> step_times(Run& run, const std::vector<Given>& inputs) {
  run.timed(inputs);
  std::vector<double> times;
  for (const Run::Timed& step : run.timed(inputs)) times.push_back(step.microseconds);
  for (std::size_t i = 0; const Run::Timed& step : run.timed(inputs)) {
    times[i] = std::min(times[i], step.microseconds);
    ++i;
  }
  return times;
}

}  // namespace

std::shared_ptr<Compiled::Entry> Compiled::fastest(const std::vector<Given>& inputs, Tuner& tuner,
                                                   Weights& packed) {
  const Narrowing all{.keep = keep_};
  Weights trial(&packed);  // what the slower plans pack dies with them
  const auto narrow = planned_in(&all, inputs, true, tuner, trial),
             wide = planned_in(nullptr, inputs, true, tuner, trial);
  Run of_narrow(narrow->graph, narrow->plan, narrow->packed),
      of_wide(wide->graph, wide->plan, wide->packed);
  Narrowing both = faster_types({narrow->plan, step_times(of_narrow, inputs)},
                                {wide->plan, step_times(of_wide, inputs)}, graph_.values);
  both.keep = keep_;
  const bool mixes = !both.in_float32.empty() && both.in_float32.size() <= both.cuts.size();
  std::vector<Run*> runs{&of_narrow, &of_wide};
  std::shared_ptr<Entry> mixed;
  std::optional<Run> of_mixed;
  if (mixes) {
    mixed = planned_in(&both, inputs, true, tuner, trial);
    runs.push_back(&of_mixed.emplace(mixed->graph, mixed->plan, mixed->packed));
  }
  const std::vector<double> times = least_times(runs, inputs);
  const auto best = std::ranges::min_element(times) - times.begin();
  std::string measured =
      text("whole runs took ", times[0], " us in bfloat16, ", times[1], " us in float32");
  if (mixes) measured += text(", ", times[2], " us in both");
  const Narrowing* types = best == 0 ? &all : best == 1 ? nullptr : &both;
  auto entry = planned_in(types, inputs, true, tuner, packed);
  if (best == 1) entry->types = text("in float32, because that is faster: ", measured);
  if (best == 2) {
    entry->types = text("in bfloat16, and ", both.in_float32.size(), " of ", both.cuts.size() + 1,
                        " stretches in float32, because that is faster: ", measured);
  }
  return entry;
}

// Kernels need something to compute. A graph that reads an empty value runs as it was captured,
// because ATen knows what empty means to each op.
std::shared_ptr<Compiled::Entry> Compiled::planned_in(const Narrowing* narrowing,
                                                      const std::vector<Given>& inputs,
                                                      bool simplified, Tuner& tuner,
                                                      Weights& packed) {
  check_inputs(inputs, graph_.input_metas);
  std::vector<at::Tensor> constants;
  for (const auto& [value, tensor] : graph_.constants) constants.push_back(tensor);
  weights_->check_unchanged(constants);
  auto entry = std::make_shared<Entry>(packed);
  entry->graph = graph_;
  const std::vector<Meta> metas = infer(graph_, metas_of(inputs));
  const bool empty = has_empty(graph_, metas);
  if (simplified && !empty) {
    simplify(entry->graph, metas, *weights_, narrowing);
  } else {
    fold_constants(entry->graph);  // bytes that layers would have taken
  }
  if (empty) {
    for (Node& node : entry->graph.nodes)
      node.declined = "a tensor of this run is empty; there is nothing to compute";
  }
  for (auto& [value, tensor] : entry->graph.constants) tensor = weights_->own(tensor);
  for (Node& node : entry->graph.nodes) node.kind->own(node, *weights_);
  try {
    entry->plan = make_plan(entry->graph, inputs, tuner, Format::blocked(native_blocks()[0]));
  } catch (...) {
    tuner.finish_plan();
    throw;
  }
  tuner.finish_plan();
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
  const std::lock_guard lock(entry.nodes_mutex);
  return std::make_unique<Run>(entry.graph, entry.plan, entry.packed);
}

void Compiled::put_back(Entry& entry, std::unique_ptr<Run> run) {
  // Keeps as many as can run at a time. Others are destroyed outside the lock.
  static const std::size_t kept = std::max(1u, std::thread::hardware_concurrency());
  const std::lock_guard lock(entry.mutex);
  if (entry.idle.size() < kept) entry.idle.push_back(std::move(run));
}

Tuner::Known Compiled::times() {
  const std::lock_guard lock(mutex_);
  return tuner_.known();
}

std::vector<at::Tensor> Compiled::by_estimates(const std::vector<Given>& inputs) {
  Tuner tuner = [&] {
    const std::lock_guard lock(mutex_);
    return tuner_.without_timing();
  }();
  Weights packed(weights_.get());
  return run(*planned(inputs, true, tuner, packed), inputs);
}

void Compiled::forget_plans() {
  const std::lock_guard lock(mutex_);
  simplified_.clear();
  weights_->drop_packed();
}

void Compiled::compute_as_captured() {
  forget_plans();
  const std::lock_guard lock(mutex_);
  computes_ = Computes::kAsCaptured;
}

void Compiled::release() {
  const std::lock_guard lock(mutex_);
  released_ = true;
  for (const auto& entry : simplified_) {
    put_back(*entry, take(*entry));  // a run has packed the weights that it reads
    const std::lock_guard lock(entry->nodes_mutex);
    for (Node& node : entry->graph.nodes) node.kind->release(node);
  }
  graph_.constants.clear();
  as_captured_.clear();
  weights_->release();
  return_idle_memory();
}

std::vector<at::Tensor> Compiled::run(Entry& entry, const std::vector<Given>& inputs) {
  auto run = take(entry);
  const auto values = (*run)(inputs);
  put_back(entry, std::move(run));
  std::vector<at::Tensor> outputs;
  for_values(entry.graph.outputs, [&](Value value) { outputs.push_back(values.at(value)); });
  return outputs;
}

std::vector<at::Tensor> Compiled::operator()(const std::vector<Given>& inputs) {
  return run(*entry_for(inputs), inputs);
}

std::vector<at::Tensor> Compiled::by_ops(const std::vector<Given>& inputs) {
  return run(*entry_for(inputs, false), inputs);
}

void Compiled::prepare(const std::vector<Given>& inputs) {
  const auto entry = entry_for(inputs);
  put_back(*entry, take(*entry));
}

std::string Compiled::first_difference(const std::vector<Given>& inputs, double tolerance) {
  Tuner tuner(Timing::kNothing, "", {});
  Weights packed(weights_.get());
  const auto entry = planned(inputs, true, tuner, packed),
             ops = planned(inputs, false, tuner, packed);
  std::map<Value, at::Tensor> expected;
  Run(ops->graph, ops->plan, ops->packed)
      .watched(inputs, [&](std::size_t, Value value, const at::Tensor& result) {
        if (result.is_floating_point()) expected[value] = result.clone();
      });
  std::string difference;
  Run(entry->graph, entry->plan, entry->packed)
      .watched(inputs, [&](std::size_t step, Value value, const at::Tensor& result) {
        const auto found = expected.find(value);
        if (!difference.empty() || found == expected.end() || !result.numel()) return;
        if (!result.is_floating_point()) return;  // bytes of these numbers
        const at::Tensor apart =
            result.to(found->second.scalar_type()).sub(found->second).abs().max();
        const double scale = found->second.abs().max().item<double>();
        if (apart.item<double>() <= tolerance * scale) return;  // NaN is a difference, too
        const Step& at = entry->plan.steps[step];
        difference = text("step ", step, " (", at.node->name, " ", result.sizes(), " by ",
                          at.kind->implementation(entry->plan, at), "): off by ",
                          apart.item<double>(), " of ", scale);
      });
  return difference;
}

std::vector<StepReport> Compiled::report(const std::vector<Given>& inputs) {
  const auto entry = entry_for(inputs);
  auto run = take(*entry);
  run->timed(inputs);
  const std::vector<Run::Timed> times = run->timed(inputs);
  put_back(*entry, std::move(run));
  std::vector<StepReport> report;
  for (std::size_t i = 0; i < times.size(); ++i) {
    StepReport step = report_of(entry->plan, i);
    step.microseconds = times[i].microseconds;
    step.pieces = times[i].pieces;
    step.meets = times[i].meets;
    report.push_back(std::move(step));
  }
  return report;
}

std::string Compiled::types(const std::vector<Given>& inputs) { return entry_for(inputs)->types; }

std::vector<Compiled::Result> Compiled::results(const std::vector<Given>& inputs) {
  const auto entry = entry_for(inputs);
  std::vector<Result> results;
  auto run = take(*entry);
  run->watched(inputs, [&](std::size_t i, Value value, const at::Tensor& result) {
    const Step& step = entry->plan.steps[i];
    std::vector<Value> reads;
    for (const auto& [read, slot] : step.reads) reads.push_back(read);
    results.push_back({i, value, std::move(reads), result.clone()});
  });
  put_back(*entry, std::move(run));
  return results;
}

std::string Compiled::outline(const std::vector<Given>& inputs) {
  const auto entry = entry_for(inputs);
  std::string outline;
  for (std::size_t i = 0; i < entry->plan.steps.size(); ++i) {
    const StepReport step = report_of(entry->plan, i);
    outline += text(step.op, "\t", step.input, "\t", step.output, "\t", step.implementation, "\n");
  }
  return outline;
}

std::vector<StepExplanation> Compiled::explain(const std::vector<Given>& inputs) {
  const auto entry = entry_for(inputs);
  const std::lock_guard lock(mutex_);
  if (released_) {
    fail_value("explain", "a model with dense weights", "one after release()", "explain it before");
  }
  return with_tuner([&](Tuner& tuner) { return explained(*entry, inputs, tuner); });
}

std::vector<StepExplanation> Compiled::explained(const Entry& entry,
                                                 const std::vector<Given>& inputs, Tuner& tuner) {
  Planner planner(entry.graph, inputs, tuner, Format::blocked(native_blocks()[0]));
  planner.plan();
  const Plan& plan = entry.plan;
  const auto held = [&](Slot slot) -> StepExplanation::Held {
    const SlotPlan& memory = plan.slots[slot];
    return {slot, format_name(memory), memory.dims, memory.dtype};
  };
  std::vector<StepExplanation> explanations;
  for (const Step& step : plan.steps) {
    StepExplanation explained;
    explained.kind = step.kind->name;
    explained.is_node = step.node != nullptr;
    for (const auto& [value, slot] : step.reads) {
      if (!plan.constants.contains(value)) explained.reads.push_back(held(slot));
    }
    for (const Slot slot : step.writes) explained.writes.push_back(held(slot));
    if (step.node) {
      explained.is_fixed = step.kind->fixed(*step.node).has_value();
      explained.rivals = step.kind->rivals(planner, step);
      const Value result = step.node->output();
      const std::size_t ndims = planner.metas()[static_cast<std::size_t>(result)].dims.size();
      for (const auto& [format, more] : planner.beside(result)) {
        explained.formats.emplace_back(format.name(ndims), more);
      }
    }
    explanations.push_back(std::move(explained));
  }
  tuner.finish_plan();
  return explanations;
}

std::int64_t Compiled::arena_bytes(const std::vector<Given>& inputs) {
  const auto entry = entry_for(inputs);
  auto run = take(*entry);
  const std::int64_t bytes = run->arena_bytes();
  put_back(*entry, std::move(run));
  return bytes;
}

}  // namespace torch_blocked::graph

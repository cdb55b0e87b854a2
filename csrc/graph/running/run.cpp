// Runs a plan: prepares its steps, gives their tensors memory, and calls them in order, on all
// threads together where possible.
#include "graph/running/run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>

#include "format/errors.h"
#include "graph/report.h"
#include "ops/blocked.h"
#include "ops/moving/reorder.h"
#include "runtime/memory/borders.h"
#include "runtime/memory/huge_pages.h"
#include "runtime/trace/trace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

// Switches off autograd and autocast: types are those of the capture.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

// The path of a part, where `model` is itself part of another model.
std::string joined(const std::string& model, const std::string& part) {
  return model.empty() || part.empty() ? model + part : text(model, ".", part);
}

}  // namespace

at::Tensor PackedStore::get(const Node& node, const std::vector<at::Tensor>& weights,
                            const std::string& format, const std::function<at::Tensor()>& pack) {
  const std::lock_guard lock(mutex_);
  const std::pair key(&node, format);
  if (const auto found = packed_.find(key); found != packed_.end()) return found->second;
  const at::Tensor packed = weights_.packed(weights, format, pack);
  writes_ = true;
  packed_.emplace(key, packed);
  writes_ = false;
  return packed;
}

Run::Run(const Graph& graph, const Plan& plan, PackedStore& weights)
    : plan_(plan),
      memory_(plan_memory(plan)),
      arena_(at::empty({memory_.bytes}, at::kByte)),
      slots_(plan.slots.size()),
      releases_(plan.steps.size()) {
  auto* arena = static_cast<char*>(arena_.mutable_data_ptr());
  prefer_huge_pages(arena, arena_.nbytes());
  for (const auto& [offset, bytes, held] : memory_.parts) set_border(arena + offset, bytes, held);
  for (Slot slot = 0; slot < slots_.size(); ++slot) {
    const Placement& placement = memory_.slots[slot];
    if (placement.is_given) {
      place(slot, arena);
    } else if (placement.last < plan.steps.size()) {
      releases_[placement.last].push_back(slot);
    }
  }
  for (const auto& [value, slot] : plan.constants) {
    slots_[slot] = graph.constants.at(value);
    constants_.insert(slots_[slot].storage().unsafeGetStorageImpl());
    for (auto& row : releases_) std::erase(row, slot);
  }
  make_leaving();  // with the sizes and strides that preparing reads
  const Running running{plan_, memory_, slots_, weights};
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    // A step does nothing if its result is already in place.
    steps_.push_back(memory_.copies[i] ? step.kind->prepare(step, running) : Prepared{[] {}, true});
    if (i == 0 || !steps_[i].loops_only || !steps_[i - 1].loops_only) sections_.push_back(i);
  }
  sections_.push_back(steps_.size());
  for (const Chain& chain : plan.chains) chains_.push_back(chain_of(chain));
  end();
}

// The slot's tensor in memory that begins at `data`.
void Run::place(Slot slot, void* data) {
  const SlotPlan& s = plan_.slots[slot];
  const Placement& placement = memory_.slots[slot];
  void* begin = static_cast<char*>(data) + placement.offset;
  slots_[slot] = placement.strides ? at::from_blob(begin, s.dims, *placement.strides, s.dtype)
                                   : reorder_side(begin, s.dims, s.format, s.dtype).tensor;
}

void Run::make_leaving() {
  for (const Leaving& leaving : memory_.leaving) {
    const SlotPlan& s = plan_.slots[leaving.slot];
    slots_[leaving.slot] = empty_dense(s.dims, s.format == kChannelsLast, s.dtype);
    void* data = slots_[leaving.slot].mutable_data_ptr();
    for (const Slot other : leaving.others) place(other, data);
  }
}

std::function<void()> Run::chain_of(const Chain& chain) const {
  std::vector<RunRows> runs;
  for (std::size_t i = chain.first; i < chain.end; ++i) runs.push_back(steps_[i].run_rows);
  const Step &first = plan_.steps[chain.first], &last = plan_.steps[chain.end - 1];
  const Slot src = first.reads.at(first.node->read(0)), dst = last.writes[0];
  const Value added = last.node->read(1);
  const bool adds = added != kNone;
  const Slot residual = adds ? last.reads.at(added) : src;
  return [&tensors = slots_, all = RowChain(chain.stages), runs, src, dst, adds, residual] {
    all.run(runs,
            {.src = static_cast<const std::uint8_t*>(tensors[src].const_data_ptr()),
             .residual = adds ? static_cast<const std::uint8_t*>(tensors[residual].const_data_ptr())
                              : nullptr,
             .dst = static_cast<std::uint8_t*>(tensors[dst].mutable_data_ptr())});
  };
}

void Run::begin(const std::vector<Given>& inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) slots_[plan_.inputs[i]] = inputs[i].tensor;
  make_leaving();
}

// A chain runs as such if all of its steps are in the range; otherwise its steps run one by one.
void Run::run_each(std::size_t first, std::size_t end) {
  auto chain = std::ranges::lower_bound(plan_.chains, first, {}, &Chain::first);
  for (std::size_t i = first; i < end;) {
    if (chain != plan_.chains.end() && chain->first == i && chain->end <= end) {
      chains_[static_cast<std::size_t>(chain - plan_.chains.begin())]();
      i = (chain++)->end;
    } else {
      steps_[i++].run();
    }
  }
}

// Runs one step, or several that threads go through together.
void Run::run_steps(std::size_t first, std::size_t end) {
  if (end - first == 1) {
    steps_[first].run();
  } else {
    on_all_threads([&] { run_each(first, end); });
  }
  leave(first, end);
}

// Runs after steps: checks tails, if that is on, and releases memory.
void Run::leave(std::size_t first, std::size_t end) {
  if (checks_tails()) check_tails(first, end);
  for (std::size_t i = first; i < end; ++i) {
    for (const Slot slot : releases_[i]) slots_[slot] = at::Tensor();
  }
}

// Runs each step by itself and reports it to torch's profiler and to trace, whichever is on.
void Run::run_observed() {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    StepReport step = report_of(plan_, i);
    at::RecordFunction range(at::RecordScope::USER_SCOPE);
    if (range.isActive()) range.before(text(step.op, " of ", step.origin.module));
    if (!trace::recording()) {
      run_steps(i, i + 1);
      continue;
    }
    const std::int64_t since = trace::now_ns();
    trace::Event event{trace::Kind::kOp, step.op, step.why};
    const trace::Event* around = trace::innermost();
    event.module = joined(around ? around->module : "", step.origin.module);
    event.line = step.origin.line;
    event.src = std::move(step.input);
    event.dst = std::move(step.output);
    event.implementation = std::move(step.implementation);
    event.flops = step.flops;
    event.bytes = static_cast<std::int64_t>(step.bytes);
    const std::size_t place = trace::open(std::move(event), since);
    run_steps(i, i + 1);
    trace::close(place);
  }
}

// Checks results that still exist. The memory of others has been reused by later steps.
void Run::check_tails(std::size_t first, std::size_t end) const {
  for (std::size_t i = first; i < end; ++i) {
    const Step& step = plan_.steps[i];
    for (const Slot slot : step.writes) {
      const SlotPlan& s = plan_.slots[slot];
      if (!s.is_blocked() || !slots_[slot].defined()) continue;
      if (i + 1 < end && memory_.slots[slot].last < end) continue;
      check_tail("optimize", slots_[slot], s.dims[1],
                 text("please report step ", i, ", ", step.node ? step.node->name : step.kind->name)
                     .c_str());
    }
  }
}

void Run::end() {
  for (const Slot slot : plan_.inputs) slots_[slot] = at::Tensor();
  for (const Leaving& leaving : memory_.leaving) {
    slots_[leaving.slot] = at::Tensor();
    for (const Slot other : leaving.others) slots_[other] = at::Tensor();
  }
}

std::map<Value, at::Tensor> Run::operator()(const std::vector<Given>& inputs) {
  const Below below;
  begin(inputs);
  if (at::hasCallbacks()) {
    run_observed();
  } else {
    for (std::size_t i = 0; i + 1 < sections_.size(); ++i) {
      run_steps(sections_[i], sections_[i + 1]);
    }
  }
  std::map<Value, at::Tensor> outputs;
  const auto* arena = static_cast<const char*>(arena_.const_data_ptr());
  for (const auto& [value, slot] : plan_.outputs) {
    const at::Tensor& tensor = slots_[slot];
    if (!tensor.defined()) {
      outputs[value] = tensor;
      continue;
    }
    const auto* data = static_cast<const char*>(tensor.const_data_ptr());
    const bool inside = data >= arena && data < arena + arena_.nbytes();
    // The caller may write into results, and the next call reads the constants.
    const bool is_kept = inside || constants_.contains(tensor.storage().unsafeGetStorageImpl());
    outputs[value] = is_kept ? tensor.clone() : tensor;
    const bool stays = memory_.slots[slot].is_given || plan_.constants.contains(value);
    if (!stays) slots_[slot] = at::Tensor();
  }
  end();
  return outputs;
}

std::vector<Run::Timed> Run::timed(const std::vector<Given>& inputs) {
  const Below below;
  begin(inputs);
  std::vector<Timed> times;
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    take_most_pieces();
    const auto start = std::chrono::steady_clock::now();
    if (steps_[i].loops_only) {
      on_all_threads(steps_[i].run);  // as in a plan
    } else {
      steps_[i].run();
    }
    leave(i, i + 1);
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    times.push_back({time.count(), take_most_pieces(), !steps_[i].loops_only});
  }
  end();
  return times;
}

void Run::watched(const std::vector<Given>& inputs, const Seen& seen) {
  const Below below;
  begin(inputs);
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    steps_[i].run();  // without leave(), so that ATen's memory is still there
    const Step& step = plan_.steps[i];
    for (std::size_t j = 0; step.node && j < step.writes.size(); ++j) {
      const Slot slot = step.writes[j];
      const SlotPlan& s = plan_.slots[slot];
      const at::Tensor& tensor = slots_[slot];
      if (!tensor.defined()) continue;
      seen(i, step.node->outputs[j],
           s.is_blocked() ? reorder_to_dense("optimize", {tensor, s.dims[1]}, false) : tensor);
    }
  }
  end();
}

}  // namespace torch_blocked::graph

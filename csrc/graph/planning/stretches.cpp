// Cuts two plans of one graph, in bfloat16 and in float32, at the values that both make, and takes
// the faster type for each stretch between. A change of type costs a conversion.
#include "graph/planning/stretches.h"

#include <algorithm>
#include <array>

#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

// As of a reorder (plan.cpp): the start of threads, and bytes that each reads or writes.
constexpr double kConversionMicroseconds = 3, kBytesPerMicrosecond = 25e3;

// The place in a plan of the step that makes each value of the captured graph.
std::map<Value, std::size_t> makers_of(const Plan& plan, Value values) {
  std::map<Value, std::size_t> makers;
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const Node* node = plan.steps[i].node;
    if (node && node->outputs.size() == 1 && node->output() < values) makers[node->output()] = i;
  }
  return makers;
}

struct Cut {
  Value value;
  std::size_t narrow, wide;  // the steps that make it
};

// The values that both plans make, as many as have the same order in both.
std::vector<Cut> cuts_of(const Plan& narrow, const Plan& wide, Value values) {
  const auto makers = makers_of(wide, values);
  std::vector<Cut> cuts;
  for (const auto& [value, step] : makers_of(narrow, values)) {
    const auto found = makers.find(value);
    if (found != makers.end()) cuts.push_back({value, step, found->second});
  }
  std::ranges::sort(cuts, {}, &Cut::narrow);
  std::vector<Cut> ordered;
  for (const Cut& cut : cuts) {
    if (ordered.empty() || cut.wide > ordered.back().wide) ordered.push_back(cut);
  }
  return ordered;
}

double conversion(const Plan& plan, std::size_t step) {
  const SlotPlan& slot = plan.slots[plan.steps[step].writes[0]];
  const double elements = static_cast<double>(c10::multiply_integers(slot.dims));
  return kConversionMicroseconds + 6 * elements / (kBytesPerMicrosecond * threads());
}

double sum(const std::vector<double>& times, std::size_t begin, std::size_t end) {
  double total = 0;
  for (std::size_t i = begin; i < end; ++i) total += times[i];
  return total;
}

// The times of the stretches that the cuts make.
std::vector<Stretch> stretches_of(const TimedPlan& in_bfloat16, const TimedPlan& in_float32,
                                  const std::vector<Cut>& cuts) {
  std::vector<Stretch> stretches;
  std::size_t narrow = 0, wide = 0;
  double change = 0;  // inputs are float32, and are converted in any case
  const auto add = [&](std::size_t narrow_end, std::size_t wide_end) {
    stretches.push_back({sum(in_bfloat16.microseconds, narrow, narrow_end),
                         sum(in_float32.microseconds, wide, wide_end), change});
    narrow = narrow_end;
    wide = wide_end;
  };
  for (const Cut& cut : cuts) {
    add(cut.narrow + 1, cut.wide + 1);
    change = conversion(in_float32.plan, cut.wide);
  }
  add(in_bfloat16.plan.steps.size(), in_float32.plan.steps.size());
  return stretches;
}

}  // namespace

std::set<std::size_t> faster_in_float32(const std::vector<Stretch>& stretches) {
  // By the type of the last stretch so far, bfloat16 [0] or float32 [1]: the least time, and for
  // each stretch the type of the one before.
  std::array<double, 2> least{0, 0};
  std::vector<std::array<std::size_t, 2>> before;
  for (const Stretch& stretch : stretches) {
    std::array<std::size_t, 2> from{};
    std::array<double, 2> next{};
    for (const std::size_t type : {0, 1}) {
      const double changes = least[1 - type] + stretch.change;
      from[type] = least[type] <= changes ? type : 1 - type;
      next[type] = std::min(least[type], changes) + (type == 1 ? stretch.wide : stretch.narrow);
    }
    least = next;
    before.push_back(from);
  }
  std::set<std::size_t> wide;
  std::size_t type = least[1] < least[0] ? 1 : 0;
  for (std::size_t i = before.size(); i-- > 0;) {
    if (type == 1) wide.insert(i);
    type = before[i][type];
  }
  return wide;
}

Narrowing faster_types(const TimedPlan& in_bfloat16, const TimedPlan& in_float32, Value values) {
  const std::vector<Cut> cuts = cuts_of(in_bfloat16.plan, in_float32.plan, values);
  Narrowing narrowing;
  for (const Cut& cut : cuts) narrowing.cuts.insert(cut.value);
  narrowing.in_float32 = faster_in_float32(stretches_of(in_bfloat16, in_float32, cuts));
  return narrowing;
}

}  // namespace torch_blocked::graph

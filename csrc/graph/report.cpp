// Describes a plan's steps for .plan() and explain: formats, implementation, reason, origin, flops
// and bytes.
#include "graph/report.h"

#include <algorithm>

#include "format/errors.h"

namespace torch_blocked::graph {
namespace {

// "nChw16c [1, 64, 56, 56] bfloat16": without the format if the value is no image, and without the
// type if that is float32.
std::string described(const SlotPlan& slot) {
  const std::string format = format_name(slot);
  const char* dtype = slot.dtype == at::kBFloat16 ? " bfloat16" : "";
  return text(format, format.empty() ? "" : " ", slot.dims, dtype);
}

// The origin of a step's node. A step between nodes has that of its first reader, and none if only
// the graph's result needs it.
Origin origin_of(const Plan& plan, std::size_t i) {
  const Step& step = plan.steps[i];
  if (step.node) return step.node->origin;
  const auto reads = [&](const auto& each) { return each.second == step.writes[0]; };
  for (std::size_t later = i + 1; later < plan.steps.size(); ++later) {
    if (std::ranges::any_of(plan.steps[later].reads, reads)) return origin_of(plan, later);
  }
  return {};
}

// The first value that the step reads, in the order of its node's arguments.
std::string input_of(const Plan& plan, const Step& step) {
  if (step.reads.empty()) return "";
  auto first = step.reads.begin();
  if (step.node) {
    const auto found = step.reads.find(step.node->read(0));
    if (found != step.reads.end()) first = found;
  }
  return described(plan.slots[first->second]);
}

double bytes_of(const Plan& plan, const Step& step) {
  double bytes = 0;
  const auto add = [&](Slot slot) {
    const SlotPlan& memory = plan.slots[slot];
    bytes += static_cast<double>(c10::multiply_integers(memory.dims)) *
             static_cast<double>(c10::elementSize(memory.dtype));
  };
  for (const auto& [value, slot] : step.reads) add(slot);
  for (const Slot slot : step.writes) add(slot);
  return bytes;
}

// The kind's reason, and whether the step is part of a chain that runs band by band.
std::string why_of(const Plan& plan, std::size_t i) {
  const std::string why = plan.steps[i].kind->why(plan.steps[i]);
  for (const Chain& chain : plan.chains) {
    if (i < chain.first || i >= chain.end) continue;
    return text(why, why.empty() ? "" : "; ", "rows go through steps ", chain.first, " to ",
                chain.end - 1, " in turn");
  }
  return why;
}

}  // namespace

std::string format_name(const SlotPlan& slot) {
  const std::size_t ndims = slot.dims.size();
  if (ndims < 3 || ndims > 5) return "";
  return std::string((slot.format == kStrided ? kPlain : slot.format).name(ndims));
}

StepReport report_of(const Plan& plan, std::size_t i) {
  const Step& step = plan.steps[i];
  return {.op = step.node ? step.node->name : step.kind->name,
          .input = input_of(plan, step),
          .output = described(plan.slots[step.writes[0]]),
          .implementation = step.kind->implementation(plan, step),
          .why = why_of(plan, i),
          .origin = origin_of(plan, i),
          .flops = step.kind->flops(plan, step),
          .bytes = bytes_of(plan, step)};
}

}  // namespace torch_blocked::graph

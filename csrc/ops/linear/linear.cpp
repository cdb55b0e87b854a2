#include "ops/linear/linear.h"

#include <algorithm>

#include "format/errors.h"

namespace torch_blocked {
namespace {

const Implementations<LinearProblem, LayerPlan> kLinearImplementations("linear", {
#define IMPLEMENTATION(name) linears::name,
#include "ops/linear/list.inc"
#undef IMPLEMENTATION
                                                                                 });

}  // namespace

bool takes_linear(const LinearProblem& p) {
  return std::ranges::any_of(kLinearImplementations.rows(), [&](const auto& row) {
    return !kLinearImplementations.refuses(row, p);
  });
}

std::vector<const char*> linear_implementations_for(const LinearProblem& p) {
  const auto* forced = kLinearImplementations.forced();
  const auto named = kLinearImplementations.choose(p, forced, [&] {
    return text(p.rows, " rows of ", p.inputs, " inputs, ", p.outputs, " outputs");
  });
  std::vector<const char*> names{named->name};
  for (const auto& row : kLinearImplementations.rows()) {
    if (!forced && row.name != names[0] && kLinearImplementations.plan(row, p))
      names.push_back(row.name);
  }
  return names;
}

bool linear_sums_in_place(const char* implementation) {
  return kLinearImplementations.row(implementation).traits.sums_in_place;
}

bool linear_may_be_fastest(const LinearProblem& p, const char* implementation) {
  const auto& row = kLinearImplementations.row(implementation);
  return !row.traits.only_measured ||
         kLinearImplementations.estimate(row, p) < kLinearImplementations.least_estimate(p);
}

LayerPlan plan_linear(const LinearProblem& p, const char* implementation) {
  kLinearImplementations.set_last(implementation);
  return kLinearImplementations.plan(kLinearImplementations.row(implementation), p).value();
}

std::vector<Refusal> linear_refusals(const LinearProblem& p) {
  return kLinearImplementations.refusals(p);
}

}  // namespace torch_blocked

// Concats along channels. Where the operands are whole blocks of one image, they are made where
// they belong, and nothing runs.
#include "ops/concat.h"

#include <ATen/ops/cat.h>

#include "graph/nodes/boxed.h"
#include "graph/rules.h"

namespace torch_blocked::graph {
namespace {

// Lanes are moved four bytes at a time.
bool takes(const Candidate& candidate) {
  return is_concat(candidate.node, 1, candidate.result().dims.size()) &&
         candidate.result().dtype == at::kFloat && candidate.reads_images();
}

Prepared prepare(const Step& step, const Running& running) {
  std::vector<Slot> srcs;
  Dims channels;
  for_values(step.node->arguments, [&](Value value) {
    srcs.push_back(step.reads.at(value));
    channels.push_back(running.plan.slots[srcs.back()].dims[1]);
  });
  const Slot dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  if (!slot.is_blocked()) {
    return {[&tensors = running.tensors, srcs, dst] {
      std::vector<at::Tensor> operands;
      for (const Slot src : srcs) operands.push_back(tensors[src]);
      at::cat_out(tensors[dst], operands, 1);
    }};
  }
  return {[&tensors = running.tensors, srcs, channels, dst, total = slot.dims[1]] {
            std::vector<Blocked> operands;
            for (std::size_t i = 0; i < srcs.size(); ++i) {
              operands.push_back({tensors[srcs[i]], channels[i]});
            }
            join_channels(operands, {tensors[dst], total});
          },
          true};
}

}  // namespace

constinit const NodeKind nodes::concat = {
    .name = "concat",
    .takes = takes,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .joins_channels = true,
    .prepare = prepare,
    .implementation = by_aten_unless_blocked,
};

}  // namespace torch_blocked::graph

// Concats along channels. Where the operands are whole blocks of one image, they are made where
// they belong, and nothing runs.
#include "ops/concat.h"

#include <ATen/ops/cat.h>

#include "graph/nodes/boxed.h"
#include "graph/rules.h"
#include "runtime/isa.h"

namespace torch_blocked::graph {
namespace {

// Lanes are moved four bytes at a time, so bytes and bfloat16 only as whole blocks.
bool takes(const Candidate& candidate) {
  const at::ScalarType dtype = candidate.result().dtype;
  if (!is_concat(candidate.node, 1, candidate.result().dims.size())) return false;
  bool whole = true;
  for_values(candidate.node.arguments, [&](Value value) {
    whole &= candidate.meta(value).dims[1] % native_blocks()[0] == 0;
  });
  const bool is_narrow = dtype == at::kByte || dtype == at::kBFloat16;
  return (dtype == at::kFloat || (is_narrow && whole)) && candidate.reads_images();
}

// Whole blocks, one operand after the other in each image.
Prepared prepare_blocks(const Running& running, const std::vector<Slot>& srcs, Slot dst) {
  return {[&tensors = running.tensors, srcs, dst] {
    auto* to = static_cast<std::uint8_t*>(tensors[dst].mutable_data_ptr());
    const std::int64_t images = tensors[dst].size(0);
    for (std::int64_t image = 0; image < images; ++image) {
      for (const Slot src : srcs) {
        const auto size = static_cast<std::int64_t>(tensors[src].nbytes()) / images;
        const auto* from = static_cast<const std::uint8_t*>(tensors[src].const_data_ptr());
        to = std::copy_n(from + image * size, size, to);
      }
    }
  }};
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
  if (slot.dtype != at::kFloat) return prepare_blocks(running, srcs, dst);
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
    .takes_bytes = true,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .joins_channels = true,
    .prepare = prepare,
    .implementation = by_aten_unless_blocked,
};

}  // namespace torch_blocked::graph

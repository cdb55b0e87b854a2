// Concats along channels. If the operands are whole blocks of one image, they are made in place,
// and nothing runs. Otherwise the operands that begin at a block are made in place, and the rest is
// moved behind them.
#include "ops/moving/concat.h"

#include <ATen/ops/cat.h>

#include "graph/nodes/boxed.h"
#include "graph/nodes/moving/gather.h"
#include "graph/passes/rules.h"
#include "runtime/isa.h"

namespace torch_blocked::graph {
namespace {

// Lanes are moved four or two bytes at a time, so bytes must be whole blocks.
bool takes(const Candidate& candidate) {
  const at::ScalarType dtype = candidate.result().dtype;
  if (!is_concat(candidate.node, 1, candidate.result().dims.size())) return false;
  bool whole = true;
  for_values(candidate.node.arguments, [&](Value value) {
    whole &= candidate.meta(value).dims[1] % native_blocks()[0] == 0;
  });
  const bool moves_lanes = dtype == at::kFloat || dtype == at::kBFloat16;
  return (moves_lanes || (dtype == at::kByte && whole)) && candidate.reads_images();
}

// Copies whole blocks, one operand after the other in each image.
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

// The whole blocks before the first operand that does not begin at a block.
std::int64_t leading_blocks(const std::vector<std::int64_t>& counts, std::int64_t block) {
  std::int64_t channels = 0;
  for (std::size_t i = 0; i < counts.size() && channels % block == 0; ++i) channels += counts[i];
  return channels / block;
}

// Copies lanes that are not whole blocks: all, or those behind the operands that lie in dst.
Prepared prepare_lanes(const Running& running, const std::vector<Slot>& srcs, Slot to) {
  const SlotPlan& dst = running.plan.slots[to];
  const std::vector<std::int64_t> counts = channel_counts(running.plan, srcs);
  const std::int64_t pixels = c10::multiply_integers(at::IntArrayRef(dst.dims).slice(2));
  ChannelGather join(joined_channels(counts), counts, dst.dims[0], pixels, dst.format.block,
                     static_cast<std::int64_t>(c10::elementSize(dst.dtype)));
  return {[&tensors = running.tensors, join = std::move(join), srcs, to,
           blocks = leading_blocks(counts, dst.format.block)] {
            const std::vector<const void*> places = data_of(tensors, srcs);
            void* out = tensors[to].mutable_data_ptr();
            join.run(places, out, places[0] == out ? blocks : 0);
          },
          true};
}

Prepared prepare(const Step& step, const Running& running) {
  const std::vector<Slot> srcs = sources(step, *step.node);
  const Slot dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  if (slot.is_blocked()) {
    return slot.dtype == at::kByte ? prepare_blocks(running, srcs, dst)
                                   : prepare_lanes(running, srcs, dst);
  }
  return {[&tensors = running.tensors, srcs, dst] {
    std::vector<at::Tensor> operands;
    for (const Slot src : srcs) operands.push_back(tensors[src]);
    at::cat_out(tensors[dst], operands, 1);
  }};
}

}  // namespace

constinit const NodeKind nodes::concat = {
    .name = "concat",
    .takes = takes,
    .takes_bytes = true,
    .types = [](const Rewrite&, const Node&) { return Types::kFollows; },
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .joins_channels = true,
    .prepare = prepare,
    .implementation = by_aten_unless_blocked,
};

}  // namespace torch_blocked::graph

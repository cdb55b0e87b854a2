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

// Lanes are moved four bytes at a time, so bytes and bfloat16 must be whole blocks.
bool has_whole_blocks(const Node& node, const std::vector<Meta>& metas) {
  bool whole = true;
  for_values(node.arguments, [&](Value value) {
    whole &= metas[Uses::at(value)].dims[1] % native_blocks()[0] == 0;
  });
  return whole;
}

bool takes(const Candidate& candidate) {
  const at::ScalarType dtype = candidate.result().dtype;
  if (!is_concat(candidate.node, 1, candidate.result().dims.size())) return false;
  const bool is_narrow = dtype == at::kByte || dtype == at::kBFloat16;
  return (dtype == at::kFloat ||
          (is_narrow && has_whole_blocks(candidate.node, candidate.metas))) &&
         candidate.reads_images();
}

Types types(const Rewrite& rewrite, const Node& node) {
  return has_whole_blocks(node, rewrite.metas) ? Types::kFollows : Types::kFloat32;
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
  ChannelGather join(joined_channels(counts), counts, dst.dims[0], pixels, dst.format.block);
  return {[&tensors = running.tensors, join = std::move(join), srcs, to,
           blocks = leading_blocks(counts, dst.format.block)] {
            const std::vector<const float*> places = data_of(tensors, srcs);
            auto* out = tensors[to].mutable_data_ptr<float>();
            join.run(places, out, places[0] == out ? blocks : 0);
          },
          true};
}

Prepared prepare(const Step& step, const Running& running) {
  const std::vector<Slot> srcs = sources(step, *step.node);
  const Slot dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  if (slot.is_blocked()) {
    return slot.dtype == at::kFloat ? prepare_lanes(running, srcs, dst)
                                    : prepare_blocks(running, srcs, dst);
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
    .types = types,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .joins_channels = true,
    .prepare = prepare,
    .implementation = by_aten_unless_blocked,
};

}  // namespace torch_blocked::graph

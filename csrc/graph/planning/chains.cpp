// Finds the steps that run band by band of rows (ops/products/row_chain.h): an inverted residual, a
// depthwise convolution with the 1x1 after it, a bottleneck. After the first two stages, no stage
// may have a window of several rows if an earlier one has: the rows that it needs beyond a band are
// computed twice where two threads meet.
//
// Pointwise steps are no stages. For a while, norms before 1x1 convolutions and ReLUs before
// depthwise ones were; DenseNet-121 and Xception were no faster with them on a Zen 3.
#include <algorithm>

#include "graph/planning/plan.h"
#include "runtime/estimated_threads.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

class Finder {
 public:
  explicit Finder(const Plan& plan) : plan_(plan), readers_(plan.slots.size()) {
    for (const Step& step : plan.steps) {
      for (const auto& [value, slot] : step.reads) ++readers_[slot];
    }
    for (const auto& [value, slot] : plan.outputs) ++readers_[slot];
  }

  // The longest chain that begins with a step. It may have only one stage.
  Chain from(std::size_t first) const {
    Chain chain{first, first, {}};
    bool has_window = false;
    for (std::size_t i = first; i < plan_.steps.size(); ++i) {
      const auto stage = stage_of(i);
      if (!stage || (i > first && !follows(i))) break;
      const bool is_window = stage->window.reach() > 1;
      if (is_window && has_window && i > first + 1) {
        leave_to_next(chain);
        break;
      }
      has_window |= is_window;
      chain.stages.push_back(*stage);
      chain.end = i + 1;
    }
    return chain;
  }

 private:
  std::optional<RowStage> stage_of(std::size_t i) const {
    const Step& step = plan_.steps[i];
    return step.node ? step.kind->row_stage(step) : std::nullopt;
  }

  // Whether a step is the only reader of the step before it. A step that adds a residual ends a
  // chain.
  bool follows(std::size_t i) const {
    const Step &before = plan_.steps[i - 1], &step = plan_.steps[i];
    const Slot between = before.writes[0];
    return before.node->read(1) == kNone && before.writes.size() == 1 && readers_[between] == 1 &&
           step.node->read(1) != step.node->read(0) && step.reads.at(step.node->read(0)) == between;
  }

  // Moves a 1x1 between two windows to the second window's chain if another 1x1 stays with the
  // first window. Such a 1x1 makes more channels than it reads.
  static void leave_to_next(Chain& chain) {
    const std::size_t count = chain.stages.size();
    const auto is_point = [&](std::size_t i) { return chain.stages[i].window.reach() == 1; };
    if (count < 2 || !is_point(count - 1) || !is_point(count - 2)) return;
    chain.stages.pop_back();
    --chain.end;
  }

  const Plan& plan_;
  std::vector<std::size_t> readers_;  // by slot
};

// Whether a chain is worth it. It keeps the values between its stages in L2, and threads meet only
// once. In return each band reads all weights, and rows at the ends of threads' parts are computed
// twice: 0.29 of a 14x14 layer before one with 5x5 windows, on two threads.
bool pays(const Chain& chain) {
  constexpr std::int64_t kLeastRows = 8;  // fewer would leave threads without rows
  constexpr double kMostTwice = 0.08;
  // Less than this stays in other caches until the next step reads it, and to one thread these are
  // as good as L2: on a Zen 3, MobileNetV2 gains from chains at 512x512 but not at 224x224.
  constexpr std::int64_t kLeastBetween = 8 << 20;
  const EstimatedThreads fixed;
  std::int64_t weights = 0, between = 0;
  bool copies = false;  // a step that runs alone copies rows, to have padding around them
  if (chain.stages.size() < 2) return false;
  const RowStage& last = chain.stages.back();
  if (last.n * last.dst_rows < kLeastRows) return false;
  for (std::size_t i = 0; i < chain.stages.size(); ++i) {
    const RowStage& stage = chain.stages[i];
    weights += stage.weight_bytes;
    if (i > 0) between += stage.n * stage.src_blocks * stage.src_plane();
    copies |= !stage.reads_images();
  }
  if (copies) return weights <= between;
  const RowChain rows(chain.stages);
  return weights * rows.bands() * last.n <= between && rows.made_twice() <= kMostTwice &&
         (threads() > 1 || between >= kLeastBetween);
}

}  // namespace

std::vector<Chain> find_chains(const Plan& plan) {
  const Finder finder(plan);
  std::vector<Chain> chains;
  for (std::size_t i = 0; i < plan.steps.size();) {
    Chain chain = finder.from(i);
    i = std::max(chain.end, i + 1);
    if (pays(chain)) chains.push_back(std::move(chain));
  }
  return chains;
}

}  // namespace torch_blocked::graph

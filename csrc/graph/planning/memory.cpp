// Places a plan's values in memory. First finds values that share memory with another one (concats,
// views, sums in place), then assigns offsets in the arena.
#include "graph/planning/memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "format/sizes.h"
#include "ops/blocked.h"
#include "runtime/memory/borders.h"

namespace torch_blocked::graph {
namespace {

// A cache line. oneDNN's kernels and ours need no more.
constexpr std::int64_t kAlignment = 64;

std::int64_t bytes_of(const SlotPlan& slot) {
  const std::int64_t elements = c10::multiply_integers(
      slot.dims.size() < 3 ? slot.dims : slot.format.physical_shape(slot.dims));
  return elements * static_cast<std::int64_t>(c10::elementSize(slot.dtype));
}

class MemoryPlanner {
 public:
  explicit MemoryPlanner(const Plan& plan)
      : plan_(plan),
        root_(plan.slots.size()),
        shift_(root_.size()),
        first_(root_.size()),
        bases_(root_.size()),
        seen_(root_.size()) {
    std::iota(root_.begin(), root_.end(), Slot{0});
    result_.slots.resize(plan.slots.size());
    result_.copies.resize(plan.steps.size(), true);
    for (Slot slot = 0; slot < plan.slots.size(); ++slot) {
      result_.slots[slot].bytes = bytes_of(plan.slots[slot]);
    }
    find_lifetimes();
    find_bases();
    for (std::size_t i = 0; i < plan.steps.size(); ++i) place_view(i);
    for (std::size_t i = plan.steps.size(); i-- > 0;) place_concat(i);
    for (std::size_t i = 0; i < plan.steps.size(); ++i) work_in_place(i);
  }

  MemoryPlan plan() {
    find_leaving();
    assign_offsets();
    for (Slot slot = 0; slot < root_.size(); ++slot) {
      Placement& placement = result_.slots[slot];
      if (placement.is_given) placement.offset = result_.slots[root_[slot]].offset + shift_[slot];
    }
    return std::move(result_);
  }

 private:
  // The steps of the step's chain, which run at the same time; the step alone if it is in none.
  std::pair<std::size_t, std::size_t> together(std::size_t i) const {
    for (const Chain& chain : plan_.chains) {
      if (i >= chain.first && i < chain.end) return {chain.first, chain.end};
    }
    return {i, i + 1};
  }

  void find_lifetimes() {
    for (std::size_t i = 0; i < plan_.steps.size(); ++i) {
      const Step& step = plan_.steps[i];
      const auto [begin, end] = together(i);
      const bool fills = step.kind->fills(step, plan_.slots[step.writes[0]]);
      for (const Slot slot : step.writes) {
        first_[slot] = begin;
        last(slot) = end - 1;
        result_.slots[slot].is_given = fills && !step.kind->may_be_view;
      }
      for (const auto& [value, slot] : step.reads) last(slot) = end - 1;
    }
    for (const auto& [value, slot] : plan_.outputs) last(slot) = plan_.steps.size();
    for (std::size_t i = plan_.steps.size(); i-- > 0;) {
      const Step& step = plan_.steps[i];
      if (!step.kind->may_be_view) continue;
      for (const auto& [value, from] : step.reads) {
        for (const Slot to : step.writes) last(from) = std::max(last(from), last(to));
      }
    }
  }

  void find_bases() {
    for (Slot slot = 0; slot < bases_.size(); ++slot) bases_[slot] = {slot};
    for (const Step& step : plan_.steps) {
      if (!step.kind->may_be_view) continue;
      for (const Slot to : step.writes) {
        for (const auto& [value, from] : step.reads) {
          bases_[to].insert(bases_[from].begin(), bases_[from].end());
        }
      }
    }
  }

  // If all operands of a concat except the last are whole blocks of one image, they lie one after
  // the other in dst. The steps that make them then write them there directly.
  void place_concat(std::size_t i) {
    const Step& step = plan_.steps[i];
    if (!step.kind->joins_channels) return;
    const Slot to = step.writes[0];
    const SlotPlan& dst = plan_.slots[to];
    if (dst.dims[0] != 1 || dst.format == kChannelsLast) return;
    std::vector<Slot> operands;
    bool differ = true;
    for_values(step.node->arguments, [&](Value value) {
      const Slot slot = step.reads.at(value);
      differ &= std::ranges::find(operands, slot) == operands.end();
      operands.push_back(slot);
    });
    const auto has_tail = [&](Slot slot) {
      return dst.format.tail(plan_.slots[slot].dims[1]) != 0;
    };
    const auto tail = std::find_if(operands.begin(), operands.end(), has_tail);
    const bool whole = tail == operands.end() || tail + 1 == operands.end();
    if (!differ) return;
    if (!whole) {
      operands.erase(tail + 1, operands.end());
      if (dst.dtype != at::kByte && is_over_by(operands.back(), i)) place_behind(to, operands);
    } else if (place_all(to, operands)) {
      result_.slots[to].is_given = true;
      result_.copies[i] = false;
    }
  }

  bool place_all(Slot to, const std::vector<Slot>& operands) {
    if (!are_given(operands)) return false;
    if (root_[to] != to || !continues(operands)) return place_behind(to, operands);
    // They lie in the dst of a longer concat already, so this concat is a part of it.
    adopt(to, root_[operands[0]], shift_[operands[0]]);
    return true;
  }

  // Places the operands at the beginning of dst, which may itself lie in the dst of a later concat.
  bool place_behind(Slot to, const std::vector<Slot>& operands) {
    if (!are_given(operands) || !have_their_own(operands)) return false;
    std::int64_t shift = shift_[to];
    for (const Slot slot : operands) {
      const Slot whole = root_[slot];
      adopt(whole, root_[to], shift);
      shift += result_.slots[whole].bytes;
    }
    return true;
  }

  bool are_given(const std::vector<Slot>& slots) const {
    return std::ranges::all_of(slots, [&](Slot slot) { return result_.slots[slot].is_given; });
  }

  // Whether step i runs alone and is the last to read a slot's memory. Then the slot's tail may be
  // overwritten with other channels.
  bool is_over_by(Slot slot, std::size_t i) {
    if (together(i) != std::pair(i, i + 1)) return false;
    for (Slot other = 0; other < root_.size(); ++other) {
      if (root_[other] == root_[slot] && last(other) > i) return false;
    }
    return true;
  }

  // Whether each operand fills some memory of its own completely; it may be a view of all of it.
  bool have_their_own(const std::vector<Slot>& operands) const {
    std::set<Slot> roots;
    return std::ranges::all_of(operands, [&](Slot slot) {
      return result_.slots[root_[slot]].bytes == result_.slots[slot].bytes &&
             roots.insert(root_[slot]).second;
    });
  }

  bool continues(const std::vector<Slot>& operands) const {
    std::int64_t shift = shift_[operands[0]];
    for (const Slot slot : operands) {
      if (root_[slot] == slot || root_[slot] != root_[operands[0]] || shift_[slot] != shift) {
        return false;
      }
      shift += result_.slots[slot].bytes;
    }
    return true;
  }

  // Places a result in its input's memory if the bytes are the same: other dims of the same pixels,
  // or a format with the same order in memory. The same for a view that shows parts of its input,
  // in any order.
  void place_view(std::size_t i) {
    const Step& step = plan_.steps[i];
    if (step.reads.size() != 1) return;
    const Slot from = step.reads.begin()->second, to = step.writes[0];
    if (!result_.slots[from].is_given) return;
    if (step.kind->is_same_memory(step, plan_.slots[from], plan_.slots[to])) {
      adopt(to, root_[from], shift_[from]);
      result_.slots[to].is_given = true;
      result_.copies[i] = false;
    } else if (step.kind->may_be_view && !place_views(i, from)) {
      result_.slots[to].is_given = step.kind->fills(step, plan_.slots[to]);
    }
  }

  // Whether a view ends within the memory of `src`. ATen does not check that for tensors without
  // data.
  static bool lies_in(const at::Tensor& view, const at::Tensor& src) {
    if (view.numel() == 0) return true;
    std::int64_t last = view.storage_offset();
    for (std::int64_t i = 0; i < view.dim(); ++i) last += (view.size(i) - 1) * view.stride(i);
    const auto held = static_cast<std::int64_t>(src.storage().nbytes());
    return (last + 1) * static_cast<std::int64_t>(view.itemsize()) <= held;
  }

  bool place_views(std::size_t i, Slot from) {
    const Step& step = plan_.steps[i];
    const at::Tensor src = seen(from);
    const std::vector<at::Tensor> views =
        src.defined() ? step.kind->views(step, src) : std::vector<at::Tensor>();
    if (views.size() != step.writes.size()) return false;
    for (std::size_t j = 0; j < views.size(); ++j) {
      const SlotPlan& to = plan_.slots[step.writes[j]];
      if (views[j].sizes() != to.dims || views[j].scalar_type() != to.dtype) return false;
      if (!lies_in(views[j], src)) return false;
      if (to.format == kPlain && !views[j].is_contiguous()) return false;
      if (to.format == kChannelsLast && !is_channels_last(views[j])) return false;
    }
    for (std::size_t j = 0; j < views.size(); ++j) {
      const Slot to = step.writes[j];
      const std::int64_t skipped = views[j].storage_offset() - src.storage_offset();
      adopt(to, root_[from], shift_[from] + skipped * views[j].itemsize());
      Placement& placement = result_.slots[to];
      placement.is_given = true;
      if (plan_.slots[to].format == kStrided) placement.strides = views[j].strides().vec();
      seen_[to] = views[j];
    }
    result_.copies[i] = false;
    return true;
  }

  // The slot as a tensor without data. Undefined for blocked slots, which have no strides.
  at::Tensor seen(Slot slot) {
    const SlotPlan& plan = plan_.slots[slot];
    if (!seen_[slot].defined() && !plan.is_blocked()) {
      const auto options = at::TensorOptions(at::kMeta).dtype(plan.dtype);
      seen_[slot] = plan.format == kChannelsLast
                        ? at::empty_strided(plan.dims, channels_last_strides(plan.dims), options)
                        : at::empty(plan.dims, options);
    }
    return seen_[slot];
  }

  // Lets a step overwrite what it reads, such as the residual of a sum, if nobody else reads that.
  void work_in_place(std::size_t i) {
    const Step& step = plan_.steps[i];
    const Value over = step.kind->stored_over(step);
    if (over == kNone) return;
    const Slot from = step.reads.at(over), to = step.writes[0];
    const auto [begin, end] = together(i);
    bool is_read_too = false;
    for (std::size_t other = begin; other < end; ++other) {
      for (const auto& [value, slot] : plan_.steps[other].reads) {
        is_read_too |= (other != i || value != over) && overlaps(slot, from);
      }
    }
    if (is_read_too || !result_.slots[from].is_given || root_[to] != to || holds_others(to)) return;
    if (last(root_[from]) != end - 1 || last(from) != end - 1) return;
    if (plan_.slots[from].format != plan_.slots[to].format) return;
    if (result_.slots[from].bytes != result_.slots[to].bytes) return;
    adopt(to, root_[from], shift_[from]);
  }

  bool overlaps(Slot slot, Slot other) const {
    return std::ranges::any_of(bases_[slot],
                               [&](Slot base) { return root_[base] == root_[other]; });
  }

  bool holds_others(Slot slot) const {
    return std::ranges::count(root_, slot) > 1;  // itself, and perhaps others
  }

  // From now on `slot`, and all slots that lie in it, lie in `root`.
  void adopt(Slot slot, Slot root, std::int64_t shift) {
    for (Slot each = 0; each < root_.size(); ++each) {
      if (root_[each] != slot || each == slot) continue;
      root_[each] = root;
      shift_[each] += shift;
    }
    root_[slot] = root;
    shift_[slot] = shift;
    first_[root] = std::min(first_[root], first_[slot]);
    last(root) = std::max(last(root), last(slot));
  }

  // Finds results that fill their memory completely and share it with no other result. Others are
  // copied from the arena.
  void find_leaving() {
    std::map<Slot, std::vector<Slot>> results;  // by root
    for (const auto& [value, slot] : plan_.outputs) results[root_[slot]].push_back(slot);
    for (const auto& [root, slots] : results) {
      const Slot slot = slots[0];
      const Placement& placement = result_.slots[slot];
      if (slots.size() > 1 || !placement.is_given || plan_.slots[slot].is_blocked()) continue;
      if (placement.strides || placement.bytes != result_.slots[root].bytes) continue;
      Leaving leaving{slot, {}};
      for (Slot other = 0; other < root_.size(); ++other) {
        if (root_[other] == root && other != slot) leaving.others.push_back(other);
      }
      result_.leaving.push_back(std::move(leaving));
    }
  }

  bool leaves(Slot root) const {
    return std::ranges::any_of(result_.leaving,
                               [&](const Leaving& each) { return root_[each.slot] == root; });
  }

  // Places the largest slots first, each at the lowest offset that is free for its whole life.
  void assign_offsets() {
    std::vector<Slot> order;
    for (Slot slot = 0; slot < root_.size(); ++slot) {
      if (result_.slots[slot].is_given && root_[slot] == slot && !leaves(slot)) {
        order.push_back(slot);
      }
    }
    std::ranges::stable_sort(order, std::greater(), [&](Slot slot) { return size(slot); });
    std::vector<Slot> placed;  // by offset
    for (const Slot slot : order) {
      std::int64_t offset = 0;
      for (const Slot other : placed) {
        const bool together =
            kBorder > 0 || (first_[slot] <= last(other) && first_[other] <= last(slot));
        if (!together) continue;
        if (offset + size(slot) <= result_.slots[other].offset) break;
        offset = std::max(offset, result_.slots[other].offset + size(other));
      }
      result_.slots[slot].offset = offset;
      result_.bytes = std::max(result_.bytes, offset + size(slot));
      result_.parts.push_back({offset, result_.slots[slot].bytes, size(slot)});
      const auto behind = std::ranges::upper_bound(
          placed, offset, {}, [&](Slot other) { return result_.slots[other].offset; });
      placed.insert(behind, slot);
    }
  }

  std::int64_t size(Slot slot) const {
    return round_up(result_.slots[slot].bytes + kBorder, kAlignment);
  }
  std::size_t& last(Slot slot) { return result_.slots[slot].last; }

  const Plan& plan_;
  std::vector<Slot> root_;  // the slot whose memory a slot is part of, often itself
  std::vector<std::int64_t> shift_;
  std::vector<std::size_t> first_;
  std::vector<std::set<Slot>> bases_;  // of what slots a slot may be a view, including itself
  std::vector<at::Tensor> seen_;       // see seen()
  MemoryPlan result_;
};

}  // namespace

MemoryPlan plan_memory(const Plan& plan) { return MemoryPlanner(plan).plan(); }

}  // namespace torch_blocked::graph

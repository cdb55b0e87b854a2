// Chooses the format of every value by local search over costs, then emits a plan's steps, with
// reorders between them.
#include "graph/planning/plan.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "graph/planning/planner.h"
#include "runtime/estimated_threads.h"
#include "runtime/interrupts.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

// The cost of starting threads, and the bytes that each reads or writes. That is half the speed of
// reorders within the caches: 0.2 to 3 MB run at 55 to 75 GB/s on one thread of a Zen 5, and at 100
// on two.
constexpr double kReorderMicroseconds = 3, kReorderBytesPerMicrosecond = 25e3;

// A change of one group's format is timed if it may save at least kWorthTiming of the whole plan's
// cost. The change of all groups to channels-last is timed if it may bring the cost below
// kWorthTimingAll of it.
constexpr double kWorthTiming = 0.002, kWorthTimingAll = 0.85;

// A change must save more than rounding, so that formats with equal costs stay. The threshold is
// low because small gains that need no timing add up: a SegFormer of 92 ms has eleven reorders of
// 0.1 ms that it can do without.
constexpr double kGain = 0.0005, kGainMicroseconds = 1;

bool is_gain(double before, double after, double whole) {
  return after < before - std::min(kGain * whole, kGainMicroseconds);
}

std::size_t at(Value value) { return static_cast<std::size_t>(value); }

std::span<const Argument> tied_arguments(const Node& node) {
  const std::span<const Argument> all = node.arguments;
  const std::size_t from = std::min(node.kind->tied_from, all.size());
  return all.subspan(from, std::min(node.kind->tied_end, all.size()) - from);
}

}  // namespace

Groups::Groups(const Graph& graph) : parent_(at(graph.values)) {
  std::iota(parent_.begin(), parent_.end(), Value{0});
  for (const Node& node : graph.nodes) {
    if (node.kind->fixed(node)) continue;
    for_values(tied_arguments(node), [&](Value value) { join(value, node.output()); });
  }
}

Value Groups::of(Value value) const {
  while (parent_[at(value)] != value) value = parent_[at(value)];
  return value;
}

void Groups::join(Value a, Value b) { parent_[at(of(a))] = of(b); }

Planner::Planner(const Graph& graph, const std::vector<Given>& inputs, Tuner& tuner, Format blocked)
    : graph_(graph),
      metas_(infer(graph, metas_of(inputs))),
      groups_(graph),
      tuner_(tuner),
      blocked_(blocked),
      formats_(at(graph.values), kPlain),
      fixed_(at(graph.values)) {
  for (std::size_t i = 0; i < inputs.size(); ++i) fixed_[at(graph.inputs[i])] = inputs[i].format;
  for (const auto& [value, tensor] : graph.constants) fixed_[at(value)] = kStrided;
  for (const Node& node : graph.nodes) {
    const auto fixed = node.kind->fixed(node);
    for (const Value value : node.outputs) {
      if (fixed) {
        fixed_[at(value)] = fixed->writes;
      } else if (node.kind->prefers_blocks) {
        formats_[at(groups_.of(value))] = blocked;
      }
    }
  }
  // Nodes that read a value which is always blocked start blocked, too.
  for (const Node& node : graph.nodes) {
    if (node.kind->fixed(node)) continue;
    for_values(tied_arguments(node), [&](Value value) {
      const auto& fixed = fixed_[at(value)];
      if (fixed == blocked_) formats_[at(groups_.of(node.output()))] = blocked_;
    });
  }
}

Plan Planner::plan() {
  choose_formats();
  for (const Value value : graph_.inputs) plan_.inputs.push_back(new_slot(value, home(value)));
  for (const auto& [value, tensor] : graph_.constants) {
    plan_.constants[value] = new_slot(value, kStrided);
  }
  for (const Node& node : graph_.nodes) {
    check_interrupts();
    if (node.kind->waits) {
      waiting_[node.output()] = &node;
    } else {
      emit(node);
    }
  }
  for_values(graph_.outputs, [&](Value value) { plan_.outputs[value] = slot(value, kStrided); });
  plan_.chains = find_chains(plan_);
  for (const Chain& chain : plan_.chains) {
    for (std::size_t i = chain.first; i < chain.end; ++i) {
      plan_.steps[i].kind->choose_rows(plan_.steps[i]);
    }
  }
  return std::move(plan_);
}

Format Planner::home(Value value) const {
  return fixed_[at(value)].value_or(formats_[at(groups_.of(value))]);
}

// kStrided counts as plain, because most such values are. The unused lanes of blocks are moved,
// too: with 3 channels in blocks of 16 they are most of the bytes.
double Planner::reorder_cost(Value value, Format from, Format to) const {
  const auto is_plain = [](Format format) { return format == kPlain || format == kStrided; };
  if (from == to || (is_plain(from) && is_plain(to))) return 0;
  const Meta& meta = metas_[at(value)];
  const auto bytes = [&](Format format) {
    const Dims dims = format.is_blocked() ? format.physical_shape(meta.dims) : meta.dims;
    return static_cast<double>(c10::multiply_integers(dims)) *
           static_cast<double>(c10::elementSize(meta.dtype));
  };
  const EstimatedThreads fixed;
  return kReorderMicroseconds +
         (bytes(from) + bytes(to)) / (kReorderBytesPerMicrosecond * threads());
}

// The format in which a node reads its tied arguments.
Format Planner::wanted_by(const Node& node) const {
  const auto fixed = node.kind->fixed(node);
  return fixed ? fixed->reads : home(node.output());
}

double Planner::cost(const Nodes& nodes) {
  return total(nodes, [](const NodeKind& kind) { return kind.cost; });
}

double Planner::least_cost(const Nodes& nodes) {
  return total(nodes, [](const NodeKind& kind) { return kind.least ? kind.least : kind.cost; });
}

double Planner::total(const Nodes& nodes, Price (*price_of)(const NodeKind& kind)) {
  double total = 0;
  for (const Node* node : nodes) {
    const double own = price_of(*node->kind)(*this, *node, home(node->output()));
    if (own == kImpossible) return kImpossible;
    total += own;
    const Format wanted = wanted_by(*node);
    for_values(tied_arguments(*node), [&](Value value) {
      if (!graph_.constants.contains(value)) total += reorder_cost(value, home(value), wanted);
    });
  }
  return total;
}

Planner::Nodes Planner::all_nodes() const {
  Nodes all;
  for (const Node& node : graph_.nodes) all.push_back(&node);
  return all;
}

// Moves of each group by itself, and of pairs that a node connects. Between two channels-last
// layers, a depthwise layer gains nothing if only its src or only its dst changes to channels-last.
std::vector<Planner::Move> Planner::moves() const {
  std::map<Value, std::set<const Node*>> nodes_of;  // in order of execution: by address
  std::set<Value> timed;
  std::set<std::pair<Value, Value>> pairs;
  const auto is_free = [&](Value value) { return !fixed_[at(value)]; };
  for (const Node& node : graph_.nodes) {
    for (const Value made : node.outputs) {
      if (!is_free(made)) continue;
      nodes_of[groups_.of(made)].insert(&node);
      if (node.kind->least) timed.insert(groups_.of(made));
    }
    for_values(node.arguments, [&](Value value) {
      if (!is_free(value)) return;
      const Value from = groups_.of(value);
      nodes_of[from].insert(&node);
      const Value to = groups_.of(node.output());
      if (is_free(node.output()) && from != to) pairs.emplace(from, to);
    });
  }
  std::vector<Move> moves;
  for (const auto& [group, nodes] : nodes_of) {
    moves.push_back({{group}, {nodes.begin(), nodes.end()}, timed.contains(group)});
  }
  for (const auto& [from, to] : pairs) {
    std::set<const Node*> nodes = nodes_of[from];
    nodes.insert(nodes_of[to].begin(), nodes_of[to].end());
    moves.push_back(
        {{from, to}, {nodes.begin(), nodes.end()}, timed.contains(from) || timed.contains(to)});
  }
  return moves;
}

// About what nodes pay to reorder operands that are in other formats.
double Planner::reorders_of(const Nodes& nodes) const {
  double total = 0;
  for (const Node* node : nodes) {
    for_values(node->arguments, [&](Value value) {
      if (!is_constant(value)) total += reorder_cost(value, home(value), wanted_by(*node));
    });
  }
  return total;
}

// Gives the groups of a move the format in which its nodes take the least time. A single group is
// timed if that may save enough of the whole; a pair only if its reorders alone may.
void Planner::improve(const Move& move, double whole) {
  std::vector<Format> kept;
  for (const Value group : move.groups) kept.push_back(formats_[at(group)]);
  const auto put_back = [&] {
    for (std::size_t i = 0; i < kept.size(); ++i) formats_[at(move.groups[i])] = kept[i];
  };
  double before = cost(move.nodes);
  const bool has_reorders =
      move.groups.size() == 1 || reorders_of(move.nodes) > kWorthTiming * whole;
  for (const Format other : {blocked_, kChannelsLast, kPlain}) {
    if (std::ranges::all_of(kept, [&](Format format) { return format == other; })) continue;
    for (const Value group : move.groups) formats_[at(group)] = other;
    const bool asks = move.is_timed && other != blocked_ && !tuner_.times_all();
    const bool promises = !asks || before == kImpossible ||
                          (has_reorders && least_cost(move.nodes) < before - kWorthTiming * whole);
    const double after = promises ? cost(move.nodes) : kImpossible;
    put_back();
    if (!is_gain(before, after, whole)) continue;
    before = after;
    std::ranges::fill(kept, other);
    put_back();
  }
}

// Makes one move after the other until none makes the whole cheaper. Groups meet only at
// convolutions, so two or three rounds suffice. Returns the cost.
double Planner::descend(const std::vector<Move>& moves) {
  const Nodes all = all_nodes();
  double whole = cost(all);
  for (int round = 0; round < 3; ++round) {
    const double before = whole;
    for (const Move& move : moves) improve(move, whole);
    whole = cost(all);
    if (!(whole < before)) break;
  }
  return whole;
}

// Descends from the blocked format and from channels-last, because a chain of groups may gain only
// as a whole: each group alone would pay for reorders at both ends. The whole is timed in
// channels-last only if reorders or unused lanes cost so much that this may be far better.
void Planner::choose_formats() {
  if (!tuner_.enabled()) return;
  const std::vector<Move> moves = this->moves();
  const double from_blocked = descend(moves);
  std::vector<Format> formats = formats_;
  for (const Move& move : moves) {
    for (const Value group : move.groups) formats_[at(group)] = kChannelsLast;
  }
  const bool is_timed =
      tuner_.times_all() || least_cost(all_nodes()) < kWorthTimingAll * from_blocked;
  if (!is_timed || !is_gain(from_blocked, descend(moves), from_blocked)) {
    formats_ = std::move(formats);
  }
}

std::vector<std::pair<Format, double>> Planner::beside(Value value) {
  if (!tuner_.enabled() || fixed_[at(value)]) return {};
  Format& format = formats_[at(groups_.of(value))];
  const Format chosen = format;
  const Nodes all = all_nodes();
  const double least = cost(all);
  std::vector<std::pair<Format, double>> others;
  for (const Format other : {blocked_, kChannelsLast, kPlain}) {
    if (other == chosen) continue;
    format = other;
    others.emplace_back(other, cost(all) - least);
  }
  format = chosen;
  return others;
}

Slot Planner::new_slot(Value value, Format format) {
  plan_.slots.push_back({metas_[at(value)], format});
  return slots_[{value, format}] = plan_.slots.size() - 1;
}

const Node* Planner::waiting(Value value) const {
  const auto found = waiting_.find(value);
  return found == waiting_.end() || slots_.contains({value, home(value)}) ? nullptr : found->second;
}

Slot Planner::slot(Value value, Format format) {
  if (format == kStrided && home(value) != kStrided) format = kPlain;
  if (const auto found = slots_.find({value, format}); found != slots_.end()) {
    return found->second;
  }
  if (const Node* maker = waiting(value)) {
    emit(*maker);
    return slot(value, format);
  }
  const Slot from = slots_.at({value, home(value)});
  const Slot to = new_slot(value, format);
  const bool copies_views = home(value) == kStrided && format == kPlain;
  const NodeKind& kind = copies_views ? nodes::contiguous : nodes::reorder;
  plan_.steps.push_back({&kind, nullptr, {{value, from}}, {to}});
  return to;
}

void Planner::emit(const Node& node) {
  Step step{.kind = node.kind, .node = &node};
  node.kind->plan(*this, node, step);
  const Format wanted = wanted_by(node), format = home(node.output());
  for_values(tied_arguments(node), [&](Value value) { step.reads[value] = slot(value, wanted); });
  for (const Value value : node.outputs) step.writes.push_back(new_slot(value, format));
  plan_.steps.push_back(std::move(step));
}

Plan make_plan(const Graph& graph, const std::vector<Given>& inputs, Tuner& tuner, Format blocked) {
  return Planner(graph, inputs, tuner, blocked).plan();
}

}  // namespace torch_blocked::graph

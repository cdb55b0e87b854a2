// Makes a plan. Kinds of nodes call it while the plan is made.
#pragma once

#include <tuple>

#include "graph/planning/plan.h"

namespace torch_blocked::graph {

// Groups of values that share one format, because nodes tie their arguments to their results.
class Groups {
 public:
  explicit Groups(const Graph& graph);
  Value of(Value value) const;

 private:
  void join(Value a, Value b);
  std::vector<Value> parent_;
};

class Planner {
 public:
  Planner(const Graph& graph, const std::vector<Given>& inputs, Tuner& tuner, Format blocked);
  Plan plan();

  const std::vector<Meta>& metas() const { return metas_; }
  Format blocked() const { return blocked_; }  // the blocked format that may be chosen
  Tuner& tuner() { return tuner_; }
  bool is_constant(Value value) const { return graph_.constants.contains(value); }
  // The format in which a value is made.
  Format home(Value value) const;
  // Microseconds from one format to another.
  double reorder_cost(Value value, Format from, Format to) const;
  // After plan(): formats that a value could have, and how many microseconds more the whole graph
  // would then take, by the times that decided. None where times decide nothing.
  std::vector<std::pair<Format, double>> beside(Value value);
  // The slot of a value in a format; it is reordered once for all readers. kStrided asks for any
  // strides: a value that is made in another format is then given in plain.
  Slot slot(Value value, Format format);
  // The node that makes a value but has no step yet, because nothing has needed it; else null.
  const Node* waiting(Value value) const;
  // The result of make(), which is called once per key: a node, the format of its result and one
  // more format.
  using Key = std::tuple<const Node*, Format, Format>;
  template <typename T, typename Make>
  const T& once(const Key& key, const Make& make) {
    if (const T* known = made<T>(key)) return *known;
    return *std::any_cast<T>(&made_once_.emplace(key, T(make())).first->second);
  }
  // The result that once() has for a key; null if it was not called.
  template <typename T>
  const T* made(const Key& key) const {
    const auto found = made_once_.find(key);
    return found == made_once_.end() ? nullptr : std::any_cast<T>(&found->second);
  }

 private:
  using Price = double (*)(Planner&, const Node&, Format);
  using Nodes = std::vector<const Node*>;
  // Groups that change their format together, and the nodes that make or read their values.
  struct Move {
    std::vector<Value> groups;
    Nodes nodes;
    bool is_timed;  // some of these nodes are timed in each format
  };
  double total(const Nodes& nodes, Price (*price_of)(const NodeKind& kind));
  double cost(const Nodes& nodes);
  double least_cost(const Nodes& nodes);
  double reorders_of(const Nodes& nodes) const;
  Nodes all_nodes() const;
  Format wanted_by(const Node& node) const;
  std::vector<Move> moves() const;
  void choose_formats();
  void improve(const Move& move, double whole);
  double descend(const std::vector<Move>& moves);
  Slot new_slot(Value value, Format format);
  void emit(const Node& node);

  const Graph& graph_;
  std::vector<Meta> metas_;
  Groups groups_;
  Tuner& tuner_;
  Format blocked_;
  std::vector<Format> formats_;               // of groups
  std::vector<std::optional<Format>> fixed_;  // formats that no choice changes
  std::map<Key, std::any> made_once_;
  std::map<std::pair<Value, Format>, Slot> slots_;
  std::map<Value, const Node*> waiting_;
  Plan plan_;
};

}  // namespace torch_blocked::graph

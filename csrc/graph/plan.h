// A graph for inputs of given dims: the format of every value and the implementation of every
// convolution, chosen so that kernels and reorders together take the least time.
#pragma once

#include "graph/inputs.h"
#include "graph/node_kind.h"
#include "ops/convolution.h"

namespace torch_blocked::graph {

// Memory of a value in one format: an index into the plan's slots.
using Slot = std::size_t;

struct Step {
  const NodeKind* kind;
  const Node* node;  // null for steps between nodes: reorders and copies of views
  std::map<Value, Slot> reads = {};
  std::vector<Slot> writes = {};  // as node->outputs
  std::any choice = {};           // what the kind has chosen for these sizes and formats
};

struct Plan {
  std::vector<SlotPlan> slots;
  std::vector<Step> steps;
  std::vector<Slot> inputs;
  std::map<Value, Slot> constants;
  std::map<Value, Slot> outputs;  // values that the graph returns, in plain format or as made
};

// A problem of some family, as the tuner sees it.
struct Contest {
  // One implementation, ready to run on memory of its own.
  struct Entry {
    std::function<void()> run;
    at::Tensor weights;       // packed
    bool loops_only = false;  // threads may go through it together
  };

  std::string name;   // the key of its times, with all that decides them but the machine
  std::string words;  // what is being timed
  std::vector<const char*> implementations;
  // The fastest by estimates; null where these say nothing.
  std::function<const char*()> estimated;
  // Nothing if the implementation is not for this problem. `known`: another has been timed.
  std::function<std::optional<Entry>(const char* implementation, bool known)> entry;
};

// Finds the fastest implementation of a problem: by running all of them, from what an earlier
// process measured, or by estimates.
class Tuner {
 public:
  struct Choice {
    std::string implementation;
    double microseconds;
  };
  // What is known of problems, by their names; nothing where no implementation takes one.
  using Known = std::map<std::string, std::optional<Choice>>;
  // `enabled` false: estimates decide and nothing is run. `path`: the file that keeps measurements,
  // one a line; empty: none. `given`: choices for what the file does not have. `timing`: told what
  // is timed next, in words, and "" when a plan is made.
  Tuner(bool enabled, std::string path, Known given,
        std::function<void(const std::string&)> timing = {});
  // The fastest implementation; none if none takes the problem.
  std::optional<Choice> best(const Contest& contest);
  // All implementations that take the problem, timed now; empty where nothing is to be run.
  const std::vector<Choice>& all(const Contest& contest);
  bool enabled() const { return enabled_; }
  // Of the problems that were asked for.
  const Known& known() const { return known_; }
  // Tells whom it has told of timing that this is over.
  void finish_plan();

 private:
  std::optional<Choice> measured(const Contest& contest, const std::string& name);
  void tell(const std::string& words);

  bool enabled_;
  std::string path_;
  Known given_, known_;
  std::map<std::string, std::vector<Choice>> compared_;
  std::function<void(const std::string&)> timing_;
  bool told_ = false;
};

// `blocked`: the blocked format to choose beside channels-last and plain.
Plan make_plan(const Graph& graph, const std::vector<Given>& inputs, Tuner& tuner, Format blocked);

}  // namespace torch_blocked::graph

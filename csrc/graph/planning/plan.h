// A graph for inputs of given dims: the format of every value and the implementation of every
// convolution, chosen so that kernels and reorders together take the least time.
#pragma once

#include <set>

#include "graph/node_kind.h"
#include "graph/running/inputs.h"
#include "ops/convolution_problem.h"

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

// Steps [first, end) that run band by band of rows; none of what they make on the way is written.
struct Chain {
  std::size_t first, end;
  std::vector<RowStage> stages;
};

struct Plan {
  std::vector<SlotPlan> slots;
  std::vector<Step> steps;
  std::vector<Chain> chains = {};
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
    double handicap = 1;      // it must be faster by this factor
  };

  std::string name;   // the key of its times, with all that decides them but the machine
  std::string layer;  // the same without the sizes of images; empty: there are none
  std::string words;  // what is being timed
  // Those that may be the fastest; and the others, which are timed only where these all take more
  // than `expected` microseconds: then they are not what their estimates took them for.
  std::vector<const char*> implementations, others = {};
  double expected = 0;
  // `preferred` if that is not null and takes the problem, else the fastest by estimates; null
  // where these say nothing.
  std::function<const char*(const char* preferred)> estimated;
  // Nothing if the implementation is not for this problem. `known`: another has been timed.
  std::function<std::optional<Entry>(const char* implementation, bool known)> entry;
  // What times are told in the measure of; null: the clock's. The same layer in another format,
  // say, as it was timed in a contest of its own: a machine may be half as fast one second and not
  // the next, but those that run in turn find the same machine.
  struct Reference {
    Entry entry;
    double microseconds;
    // What is timed beside one must be faster by this factor. Kernels that take as long as each
    // other differed by 4 to 8 % beside a process that computes, so that 3 of 40 plans of ResNet-18
    // (benchmarks/plans.py) had a layer in another format for nothing.
    static constexpr double kHandicap = 1.08;
  };
  std::function<std::optional<Reference>()> reference = {};
};

// What is timed: nothing, what estimates and bounds leave open, or all that could run.
enum class Timing : std::uint8_t { kNothing, kOpen, kAll };

// Finds the fastest implementation of a problem: by running those that may be, from what an earlier
// process measured, or by estimates.
class Tuner {
 public:
  struct Choice {
    std::string implementation;
    double microseconds;
  };
  // What is known of problems, by their names; nothing where no implementation takes one.
  using Known = std::map<std::string, std::optional<Choice>>;
  // `path`: the file that keeps measurements, one a line; empty: none. `given`: choices for what
  // the file does not have. `told`: is told what is timed next, in words, and "" when a plan is
  // made.
  Tuner(Timing timing, std::string path, Known given,
        std::function<void(const std::string&)> told = {});
  // One that times nothing, and takes what this one has found for a layer of the same kind at other
  // sizes: its weights are packed already.
  Tuner without_timing() const;
  // One like this when it was made.
  Tuner anew() const;
  // The fastest implementation; none if none takes the problem.
  std::optional<Choice> best(const Contest& contest);
  // All implementations that take the problem, timed now; empty where nothing is to be run.
  const std::vector<Choice>& all(const Contest& contest);
  bool enabled() const { return timing_ != Timing::kNothing; }
  bool times_all() const { return timing_ == Timing::kAll; }
  // Of the problems that were asked for.
  const Known& known() const { return known_; }
  // Tells whom it has told of timing that this is over, and forgets what is too much to keep.
  void finish_plan();

 private:
  std::string key_of(const Contest& contest) const;
  std::optional<Choice> found(const Contest& contest);
  struct Measured {
    Choice choice;
    bool lasts;  // nobody disturbed it: another process may know it, too
  };
  std::optional<Measured> measured(const Contest& contest);
  std::optional<Choice> keep(const Contest& contest, const std::optional<Measured>& measured);
  void append(const std::string& name, const Choice& choice) const;
  void tell(const std::string& words);

  Timing timing_;
  std::string path_;
  Known given_, known_;
  std::map<std::string, std::string> of_layers_;  // implementations, by Contest::layer
  std::map<std::string, std::vector<Choice>> compared_;
  std::function<void(const std::string&)> told_;
  bool has_told_ = false;
};

// chains.cpp: which steps of a plan run band by band.
std::vector<Chain> find_chains(const Plan& plan);

// `blocked`: the blocked format to choose beside channels-last and plain.
Plan make_plan(const Graph& graph, const std::vector<Given>& inputs, Tuner& tuner, Format blocked);

}  // namespace torch_blocked::graph

// A plan of a graph for inputs of given dims: the format of every value and the implementation of
// every convolution, chosen to minimize the time of kernels and reorders together.
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

// Steps [first, end) that run band by band of rows. Their intermediate results are never written.
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

// A problem of any family (convolution, linear, ...), as the tuner sees it.
struct Contest {
  // One implementation, ready to run on memory of its own.
  struct Entry {
    std::function<void()> run;
    at::Tensor weights;       // packed
    bool loops_only = false;  // threads may go through it together
    double handicap = 1;      // it must be faster by this factor
  };

  std::string name;   // the key of its times: all that decides them, except the machine
  std::string layer;  // the same without the sizes of images; empty: there are none
  std::string words;  // for progress messages: what is being timed
  // `implementations` may be the fastest. `others` are timed only if all of these take more than
  // `expected` microseconds: then the estimates were wrong.
  std::vector<const char*> implementations, others = {};
  double expected = 0;
  // `preferred` if that is not null and takes the problem, else the fastest by estimates; null if
  // there are no estimates.
  std::function<const char*(const char* preferred)> estimated;
  // Nothing if the implementation does not take this problem. `known`: another one has been timed.
  std::function<std::optional<Entry>(const char* implementation, bool known)> entry;
  // What times are measured against, for example the same layer in another format with the time of
  // its own contest; null: the clock. A machine may be half as fast from one second to the next,
  // but two that run in turn see the same machine.
  struct Reference {
    Entry entry;
    double microseconds;
    // What is timed against a reference must be faster by this factor. Next to a process that
    // computes, equally fast kernels differed by 4 to 8 %, so that 3 of 40 plans of ResNet-18
    // (benchmarks/plans.py) had a layer in another format for nothing.
    static constexpr double kHandicap = 1.08;
  };
  std::function<std::optional<Reference>()> reference = {};
};

// What is timed: nothing, what estimates and bounds leave open, or everything that could run.
enum class Timing : std::uint8_t { kNothing, kOpen, kAll };

// Finds the fastest implementation of a problem: by timing candidates, from what an earlier process
// measured, or by estimates.
class Tuner {
 public:
  struct Choice {
    std::string implementation;
    double microseconds;
  };
  // What is known of problems, by their names; nothing for a problem that no implementation takes.
  using Known = std::map<std::string, std::optional<Choice>>;
  // `path`: the file that keeps measurements, one a line; empty: none. `given`: choices for
  // problems that the file does not have. `told` is called with a description of what is timed
  // next, and with "" when a plan is done.
  Tuner(Timing timing, std::string path, Known given,
        std::function<void(const std::string&)> told = {});
  // A tuner that times nothing. For a layer that this one knows at other sizes it takes the same
  // implementation: its weights are packed already.
  Tuner without_timing() const;
  // A tuner as this one was when it was made.
  Tuner anew() const;
  // The fastest implementation; nothing if none takes the problem.
  std::optional<Choice> best(const Contest& contest);
  // All implementations that take the problem, timed now; empty if this tuner times nothing.
  const std::vector<Choice>& all(const Contest& contest);
  bool enabled() const { return timing_ != Timing::kNothing; }
  bool times_all() const { return timing_ == Timing::kAll; }
  // The choices for problems that were asked for.
  const Known& known() const { return known_; }
  // Reports that timing is over, if it was reported at all, and forgets what is too large to keep.
  void finish_plan();

 private:
  std::string key_of(const Contest& contest) const;
  std::optional<Choice> found(const Contest& contest);
  struct Measured {
    Choice choice;
    bool lasts;  // nothing disturbed it: other processes may use it, too
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

// chains.cpp: finds the steps of a plan that run band by band.
std::vector<Chain> find_chains(const Plan& plan);

// `blocked`: the blocked format that may be chosen, besides channels-last and plain.
Plan make_plan(const Graph& graph, const std::vector<Given>& inputs, Tuner& tuner, Format blocked);

}  // namespace torch_blocked::graph

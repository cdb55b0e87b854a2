// What .plan() and explain say of a plan's steps.
#pragma once

#include "graph/planning/plan.h"

namespace torch_blocked::graph {

// One line of .plan().
struct StepReport {
  std::string op;
  std::string input, output;  // the first of each: "nChw16c [1, 64, 56, 56]"
  std::string implementation, why;
  Origin origin;        // of its node; of a reorder, the node that needs it
  double flops, bytes;  // of its products; of what it reads and writes, without weights
  // Known once the step has run.
  double microseconds = 0;  // in one run
  std::int64_t pieces = 0;  // as of Run::Timed, and meets
  bool meets = false;
};

// What explain says of a step besides its StepReport.
struct StepExplanation {
  struct Held {  // a value in memory
    Slot slot;
    std::string format;
    Dims dims;
    at::ScalarType dtype;
  };
  std::string kind;  // of its node; "reorder" or "contiguous" for steps between nodes
  bool is_node;
  bool is_fixed = false;            // its kind reads and writes one format only
  std::vector<Held> reads, writes;  // without constants
  std::vector<Rival> rivals;
  // Formats that its result could have, and how many microseconds more the whole graph would take.
  std::vector<std::pair<std::string, double>> formats;
};

StepReport report_of(const Plan& plan, std::size_t step);
// "nChw16c"; empty for values that are no images. kStrided is shown as plain: most such values are.
std::string format_name(const SlotPlan& slot);

}  // namespace torch_blocked::graph

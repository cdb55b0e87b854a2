// What there is to say of a plan's steps.
#pragma once

#include "graph/plan.h"

namespace torch_blocked::graph {

// One line of .plan().
struct StepReport {
  std::string op;
  std::string input, output;  // the first of each: "nChw16c [1, 64, 56, 56]"
  std::string implementation, why;
  Origin origin;        // of its node; of a reorder, that of the node which it is for
  double flops, bytes;  // of its products; of what it reads and writes, weights left out
  // Known once it has run.
  double microseconds = 0;  // in one run
  std::int64_t pieces = 0;  // as of Run::Timed, and meets
  bool meets = false;
};

StepReport report_of(const Plan& plan, std::size_t step);

}  // namespace torch_blocked::graph

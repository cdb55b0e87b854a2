// Steps that run the blocked form which another library has given its op.
#pragma once

#include <ATen/core/operator_name.h>

#include "graph/running/run.h"

namespace torch_blocked::graph {

// The form of a node's op, which has one.
c10::OperatorName form_of(const Node& node);

// The form on blocked memory. What it returns is checked at each run, and its zero tail at the
// first one, or always where that is switched on.
Prepared prepare_form(const Step& step, const Running& running);

}  // namespace torch_blocked::graph

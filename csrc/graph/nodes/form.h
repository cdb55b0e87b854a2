// Steps that run a blocked form that another library has registered for its op.
#pragma once

#include <ATen/core/operator_name.h>

#include "graph/running/run.h"

namespace torch_blocked::graph {

// The form of a node's op, which must have one.
c10::OperatorName form_of(const Node& node);

// Prepares the form on blocked memory. Each run checks what the form returns. The first run also
// checks the zero tail; all runs do where that check is switched on.
Prepared prepare_form(const Step& step, const Running& running);

}  // namespace torch_blocked::graph

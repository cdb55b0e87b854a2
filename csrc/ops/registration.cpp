// Registers every op of torch.ops.torch_blocked from the rows of ops/list.inc.
#include <torch/library.h>

#include "ops/registered.h"
#include "ops/torch_errors.h"

namespace torch_blocked {

TORCH_LIBRARY(torch_blocked, m) {
#define OP(result, name, arguments, schema) m.def(#name schema);
#include "ops/list.inc"
}

TORCH_LIBRARY_IMPL(torch_blocked, CPU, m) {
#define OP(result, name, arguments, schema) m.impl(#name, kernel<#name, &name>);
#include "ops/list.inc"
}

}  // namespace torch_blocked

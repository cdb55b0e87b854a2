// How an op of another library takes part: blocked tensors keep their format through it, in eager
// mode, under torch.compile and in torch_blocked.optimize.
#pragma once

#include <string>

#include "torch_blocked/export.h"

namespace torch_blocked {

// Says that the op `blocked` computes on physical tensors what `op` computes on dense ones. Both
// are names of torch ops, "my::swish", with the overload if there is one: "my::swish.out".
//
// `op` takes an activation [N, C, *spatial] first and returns one tensor with as many dims and
// channels. `blocked` has its arguments with `SymInt channels` after the first, takes and returns
// physical tensors, and leaves the tail zero; other tensors come dense. Each has a fake (Meta)
// kernel. The names are looked up at the first use: what does not fit raises ValueError then. That
// may be said before the ops are defined, in TORCH_LIBRARY too; define_op (kernel.h) does it all.
TORCH_BLOCKED_API void register_blocked_form(std::string op, std::string blocked);

}  // namespace torch_blocked

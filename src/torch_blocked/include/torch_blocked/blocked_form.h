// Lets ops of other libraries take blocked tensors, which then keep their format in eager mode,
// under torch.compile and in torch_blocked.optimize.
#pragma once

#include <string>

#include "torch_blocked/export.h"

namespace torch_blocked {

// Declares that the op `blocked` computes on physical tensors what `op` computes on dense ones.
// Both are names of torch ops, such as "my::swish", with the overload if there is one:
// "my::swish.out".
//
// `op` takes an activation [N, C, *spatial] as its first argument and returns one tensor with as
// many dims and channels. `blocked` has the same arguments with `SymInt channels` after the first.
// It takes and returns physical tensors and keeps the tail zero; other tensors are passed dense.
// Both need a fake (Meta) kernel. The names are looked up at the first use, and whatever does not
// fit raises ValueError then. So this may be called before the ops are defined, also in
// TORCH_LIBRARY. define_op (kernel.h) does all of this.
TORCH_BLOCKED_API void register_blocked_form(std::string op, std::string blocked);

}  // namespace torch_blocked

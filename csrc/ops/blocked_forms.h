// Ops of other libraries that compute on physical tensors what their ops compute on dense ones.
#pragma once

#include <ATen/core/operator_name.h>

#include <optional>

#include "torch_blocked/blocked_form.h"

namespace torch_blocked {

// Raises ValueError unless `blocked` is the name of an op that can be the blocked form of `op`.
void check_blocked_form(const std::string& op, const std::string& blocked);

// The blocked form of an op; nothing if it has none. Raises ValueError for one that does not fit.
std::optional<c10::OperatorName> blocked_form(const c10::OperatorName& op);

}  // namespace torch_blocked

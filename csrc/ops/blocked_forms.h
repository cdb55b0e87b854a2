// Blocked forms of other libraries' ops. A blocked form computes on physical tensors what the op
// computes on dense ones.
//
// Eager finds them through a rule of the ops table (src/torch_blocked/ops/register.py), plans
// through a row of graph/nodes/blocked_op.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/operator_name.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string>
#include <vector>

#include "torch_blocked/blocked_form.h"

namespace torch_blocked {

// Raises ValueError unless `blocked` is the name of an op that can be the blocked form of `op`.
void check_blocked_form(const std::string& op, const std::string& blocked);

// The blocked form of an op, or nothing. Raises ValueError for a form that does not fit.
std::optional<c10::OperatorName> blocked_form(const c10::OperatorName& op);

// What an op has to return for given arguments: its logical dims and type. An op without a fake has
// no dims here. It must return as many images and blocks as its first argument has, in any type.
struct FormResult {
  std::int64_t block;
  std::vector<c10::SymInt> dims;
  std::optional<at::ScalarType> dtype;
};

// Raises RuntimeError, which names the op and its form, unless `result` is a physical tensor as the
// op wants it and shares no memory with `arguments` of the form. arguments[0] is the physical one.
void check_form_result(const std::string& op, const std::string& form, const at::Tensor& result,
                       const std::vector<at::Tensor>& arguments, const FormResult& wanted);

// Raises RuntimeError, which names the op and its form, if the form wrote into the zero tail.
void check_form_tail(const std::string& op, const std::string& form, const at::Tensor& result,
                     std::int64_t channels);

}  // namespace torch_blocked

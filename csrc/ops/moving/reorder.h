// Reorders between dense, channels-last and blocked activations. The trace counts each of them.
#pragma once

#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>

#include "ops/blocked.h"

namespace torch_blocked {

// Either side of a reorder: the physical tensor of a blocked format, or a dense tensor. A dense
// tensor's format is read from its strides.
struct ReorderSide {
  at::Tensor tensor;
  Format format = kStrided;

  bool is_blocked() const { return format.is_blocked(); }
};

// The side of an activation [N, C, *spatial] in a format other than kStrided.
ReorderSide reorder_side(const void* data, at::IntArrayRef dims, Format format,
                         at::ScalarType dtype);

// src -> dst, both [N, C, *spatial] = dims.
void reorder(const char* op, at::IntArrayRef dims, const ReorderSide& src, const ReorderSide& dst);

// The same within a reorder that is counted already.
void reorder_uncounted(at::IntArrayRef dims, const ReorderSide& src, const ReorderSide& dst);

// Runs `run` as one reorder of the trace. `bytes` counts those read plus those written. `describe`
// says which formats it reorders; it is called only if somebody listens.
void counted_reorder(const char* op, std::int64_t bytes, c10::function_ref<std::string()> describe,
                     c10::function_ref<void()> run);

// [N, C, *spatial] with any strides -> nC*<block>c. `op` names who asked, for the trace.
Blocked reorder_to_blocked(const char* op, const at::Tensor& src, std::int64_t block,
                           std::optional<at::ScalarType> dtype = std::nullopt);

// nC*<block>c -> contiguous or channels-last.
at::Tensor reorder_to_dense(const char* op, const Blocked& src, bool channels_last,
                            std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace torch_blocked

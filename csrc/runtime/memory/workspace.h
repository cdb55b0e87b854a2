// Memory for one step of an op. Each thread keeps it for the next step.
#pragma once

#include <cstdint>

namespace torch_blocked {

// Who uses the memory: an op, a chain that calls ops as its stages, or a program that an op calls
// on what it has stored.
enum class WorkspaceOf { kOp, kChain, kStored };

// At least `floats` floats that belong to this thread, aligned to a page. The next call for the
// same `of` may move them.
float* workspace(std::int64_t floats, WorkspaceOf of = WorkspaceOf::kOp);

}  // namespace torch_blocked

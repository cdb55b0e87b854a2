// Memory for one step of an op. Each thread keeps it for the next step.
#pragma once

#include <cstdint>

namespace torch_blocked {

// Who uses the memory: an op, or a chain that calls ops as its stages.
enum class WorkspaceOf { kOp, kChain };

// At least `floats` floats that belong to this thread, aligned to a page. The next call for the
// same `of` may move them.
float* workspace(std::int64_t floats, WorkspaceOf of = WorkspaceOf::kOp);

}  // namespace torch_blocked

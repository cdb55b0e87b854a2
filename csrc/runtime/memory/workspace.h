// Memory for one step of an op, kept by each thread for the next.
#pragma once

#include <cstdint>

namespace torch_blocked {

// Whose memory it is: an op's, or a chain's whose stages are ops.
enum class WorkspaceOf { kOp, kChain };

// At least `floats` floats of this thread, aligned to a page; the next call for the same may move
// them.
float* workspace(std::int64_t floats, WorkspaceOf of = WorkspaceOf::kOp);

}  // namespace torch_blocked

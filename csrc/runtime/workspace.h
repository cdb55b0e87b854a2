// Memory for one step of an op, kept by each thread for the next.
#pragma once

#include <cstdint>

namespace torch_blocked {

// At least `floats` floats of this thread, aligned to a page; the next call may move them.
float* workspace(std::int64_t floats);

}  // namespace torch_blocked

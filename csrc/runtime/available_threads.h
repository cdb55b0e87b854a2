// How many threads the system gives.
#pragma once

namespace torch_blocked {

// How many threads a team of `wanted` can have. Where the system refuses a thread, libgomp ends the
// process. So before a team is larger than all before, as many threads are started and ended once.
int available_threads(int wanted);

}  // namespace torch_blocked
